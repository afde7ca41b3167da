"""Tile tensors: views of memory through layouts, and copies between them."""
