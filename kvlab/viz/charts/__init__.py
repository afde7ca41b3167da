"""Charts: what is measured or worked out, on an axis of numbers."""
