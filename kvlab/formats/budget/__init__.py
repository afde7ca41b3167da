"""Bytes that a model's cache takes: from its configuration to layers, groups of layers, pages, requests and a card."""
