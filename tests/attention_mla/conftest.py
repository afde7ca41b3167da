"""``mla_cases`` beside this file, helpers in tests/attention, tests/attention_pairs and tests/staging: importable here
and in the child process."""

from __future__ import annotations

import sys
from pathlib import Path

BESIDE = ("attention", "attention_pairs", "staging")
for folder in (Path(__file__).parent, *(Path(__file__).parents[1] / name for name in BESIDE)):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
