"""What every room uses and knows nothing of attention: arrays of two libraries, checks, pictures by class."""
