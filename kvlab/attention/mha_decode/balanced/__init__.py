"""MHA decode over a schedule: a fixed grid of programs shares the keys of uneven sequences equally."""
