"""MLA prefill over a schedule: a fixed grid of programs shares the tiles and keys of uneven sequences equally."""
