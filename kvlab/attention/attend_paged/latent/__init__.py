"""MLA decode over a schedule: a fixed grid of programs shares the latent rows of uneven sequences equally."""
