"""Tiles of attention kernels: pieces of head dimensions, splits of keys, memory, pairs of fp8."""
