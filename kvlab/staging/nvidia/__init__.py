"""Tiles on NVIDIA: cp.async, TMA, mma.sync, wgmma."""
