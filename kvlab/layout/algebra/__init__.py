"""Shapes and strides: layouts, swizzles, and their algebra."""
