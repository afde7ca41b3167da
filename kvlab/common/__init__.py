"""Tools of every room, without attention: arrays of two libraries, checks, pictures by class."""
