"""What pictures show, worked out as arrays before anything is drawn."""
