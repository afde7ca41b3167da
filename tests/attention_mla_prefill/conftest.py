"""``mla_prefill_cases`` beside this file and the helpers in tests/attention, importable here and in the child."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "attention"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
