"""Linear layouts: matrices over bits."""
