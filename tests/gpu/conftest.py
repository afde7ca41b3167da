"""The cases of the CPU tests serve the GPU tests too."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (
    "gpu", "attention", "attention_features", "attention_pairs", "attention_kv_store", "attention_mla",
    "attention_mla_prefill", "attention_prefill",
):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
