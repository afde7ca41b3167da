"""Walks of wide tiles over a schedule, of 128 rows: those of Hopper's prefill kernel."""
