"""What runs under the profiler: ``python -m benchmarks.truth.play lanes|tma|wgmma|triton|hopper``."""

from __future__ import annotations

import sys

from . import accesses, whole

if __name__ == "__main__":
    if sys.argv[1] in whole.BACKENDS:
        whole.play(sys.argv[1])
    else:
        accesses.play(sys.argv[1])
