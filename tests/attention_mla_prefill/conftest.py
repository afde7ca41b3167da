"""``mla_prefill_cases`` beside this file, helpers in tests/attention and tests/attention_pairs: importable here and in
the child."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, *(Path(__file__).parents[1] / name for name in ("attention", "attention_pairs"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
