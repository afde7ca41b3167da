"""``decode_cases`` and the helpers of all tests of attention, importable here and in the child process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
