"""Copies between memories: cp.async, TMA and its tensor maps, barriers, the loaders of gfx950."""
