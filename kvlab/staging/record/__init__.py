"""Record of each byte of shared memory: copies in flight, reads, waits, barriers, and what was moved."""
