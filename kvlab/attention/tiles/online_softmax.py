"""Numbers that every attention kernel and its emulator share: base two, masks, and where P is rounded."""

from __future__ import annotations

import math

LOG2E = math.log2(math.e)
"""Scores are kept in units of log2: multiplied by this."""

LOWEST = -(2.0 - 2.0**-23) * 2.0**127
"""Maximum of no scores, the lowest float32. Finite: hidden scores are -inf, and beside it they weigh exactly 0."""

MASK_VALUE = -(2.0**100)
"""A bias of this or less hides a key."""

# O adds up P V with P rounded once to the storage dtype: where a score differs in its last bit (another order of
# summation), a P next to a rounding boundary may fall on the other side, half a step of bfloat16 of one term.
P_TIE = (2.0**-8, "P is rounded once to the storage dtype; a tie may fall on either side")
"""Lockstep tolerance of what adds up P V, and its reason."""

OUTPUT_TIE = (2.0**-7, P_TIE[1] + ", and the output is rounded again")
"""Lockstep tolerance of the output."""
