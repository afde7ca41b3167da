"""Shared memory: banks, wavefronts, sectors, and the swizzle that is free of conflicts."""
