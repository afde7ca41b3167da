"""``decode_cases`` and the helpers of all tests of attention, and those of tests/staging: importable here and in the
child process."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parents[1] / "staging", Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
