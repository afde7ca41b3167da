"""Launches that begin while the one before still runs (programmatic dependent launch, from sm_90 on): what does not
depend on it goes ahead, then the kernel waits. The option ``launch_pdl`` asks for it; without it both instructions do
nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the launch behind this one begin, if EARLY; 0."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return 0


@triton.jit
def wait_for_launch_before(EARLY: tl.constexpr):
    """Wait, if EARLY, until the launch before has ended and what it wrote is there; 0."""
    if EARLY:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return 0
