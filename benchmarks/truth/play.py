"""What runs under the profiler: ``python -m benchmarks.truth.play lanes|tma|wgmma|whole``."""

from __future__ import annotations

import sys

from . import accesses, whole

if __name__ == "__main__":
    if sys.argv[1] == "whole":
        whole.play()
    else:
        accesses.play(sys.argv[1])
