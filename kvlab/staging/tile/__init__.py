"""Common part of every machine: the walk over the keys, fragments, programs, tiles in shared memory."""
