"""Tests of prefill share their cases: ``prefill_cases`` beside this file, importable here and in the child process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
