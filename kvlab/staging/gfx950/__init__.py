"""CTA models of gfx950 over MAX's structures."""
