"""What every machine shares: the walk over the keys, fragments, programs, tiles in shared memory."""
