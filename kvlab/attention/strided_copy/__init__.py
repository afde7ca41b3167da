"""Copies of bytes that strides describe, from one buffer to another or within one: what a conversion of formats is."""
