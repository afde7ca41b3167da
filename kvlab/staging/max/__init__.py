"""MAX's structures for gfx950 under their public names."""
