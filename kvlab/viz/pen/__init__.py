"""Tools that pictures are drawn with: a writer of SVG, axes, legends, colours, text, files. It knows no class of
objects."""
