"""The pairwise cases of all operations."""

from __future__ import annotations

from typing import Any

import paged_decode
import prefill

CASES: dict[str, list[Any]] = {
    "mha_decode": paged_decode.MHA_DECODE,
    "mha_decode_streaming": paged_decode.MHA_DECODE_STREAMING,
    "mha_prefill": prefill.MHA_PREFILL,
}
"""(row, what builds its call) of each operation."""
TABLES = {"mha_decode": paged_decode.DECODE, "mha_decode_streaming": paged_decode.STREAMING,
          "mha_prefill": prefill.PREFILL}  # fmt: skip
