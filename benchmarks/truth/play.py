"""What runs under the profiler: ``python -m benchmarks.truth.play lanes|tma|wgmma|copies|alone|triton|hopper``."""

from __future__ import annotations

import sys

from . import accesses, copies, whole

if __name__ == "__main__":
    group = sys.argv[1]
    (whole if group in whole.BACKENDS else copies if group in ("copies", "alone") else accesses).play(group)
