"""Models of pictures, worked out as arrays before anything is drawn."""
