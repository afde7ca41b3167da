"""docs/facts.md: one fact a heading, each with an address that stays and the lines that give it.

    python tools/facts.py    # writes it; tests/test_facts.py says when it is not up to date
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "facts.md"

HEAD = """\
# Facts

Numbers that people look up, each under an address that stays: link to `facts.md#ANCHOR`. Below each are the lines that
give it. Counts of shared-memory passes on sm_90 are those that an H100's counters show; of other machines they are
provisional ([machines](machines.md)).

`python tools/facts.py` writes this page.
"""


class Fact(NamedTuple):
    """One fact: where it stands, what it is called, the sentence with ``{}`` for the value, the lines that give it."""

    anchor: str
    heading: str
    told: str
    code: str


SHARED = "import numpy as np\nfrom kvlab.hardware import wavefronts\nlane = np.arange(32)\n"
TILE = "import numpy as np\nfrom kvlab.hardware import wavefronts\nfrom kvlab.staging import SwizzledTile\n" \
    "tile, lane = SwizzledTile(rows=64, row_bytes=128), np.arange(32)\n"
BEST = "from kvlab.hardware import best_swizzle\n"
BUDGET = "from kvlab.formats import kv_budget\n"
ATOM = "from kvlab.hardware import get_atom\n"
ARCH = "from kvlab.hardware import ARCHS\n"
FORMAT = "from kvlab.formats import known_format\n"

FACTS = (
    Fact("wavefronts-of-ldmatrix-x4", "Wavefronts of ldmatrix.x4",
         "Four 8 x 8 matrices of 16-bit numbers need {} wavefronts at the least, one for each: 8 rows of 16 bytes.",
         TILE + 'wavefronts("ldmatrix.x4", tile.address(lane % 8, lane // 8)).ideal'),
    Fact("wavefronts-of-ldmatrix-x4-on-plain-rows", "Wavefronts of ldmatrix.x4 on plain rows of 128 bytes",
         "Rows of 128 bytes without a swizzle put all 8 rows of a matrix into the same 4 banks: {} wavefronts.",
         TILE + 'wavefronts("ldmatrix.x4", tile.plain().address(lane % 8, lane // 8)).wavefronts'),
    Fact("wavefronts-of-ldmatrix-x4-swizzled", "Wavefronts of ldmatrix.x4 on swizzled rows of 128 bytes",
         "With the swizzle of 128 bytes they are {}, the least.",
         TILE + 'wavefronts("ldmatrix.x4", tile.address(lane % 8, lane // 8)).wavefronts'),
    Fact("swizzle-of-64-byte-rows", "The swizzle of rows of 64 bytes",
         "For ldmatrix over rows of 32 bfloat16 numbers the smallest swizzle without conflicts is {}.",
         BEST + 'best_swizzle((64, 32), "bf16", "ldmatrix.x4").swizzle'),
    Fact("swizzle-of-128-byte-rows", "The swizzle of rows of 128 bytes",
         "For ldmatrix over rows of 64 bfloat16 numbers the smallest swizzle without conflicts is {}.",
         BEST + 'best_swizzle((64, 64), "bf16", "ldmatrix.x4").swizzle'),
    Fact("swizzle-of-256-byte-rows", "The swizzle of rows of 256 bytes",
         "For ldmatrix over rows of 128 bfloat16 numbers the smallest swizzle without conflicts is {}.",
         BEST + 'best_swizzle((64, 128), "bf16", "ldmatrix.x4").swizzle'),
    Fact("bank-of-an-address", "The bank of an address",
         "Byte 0x1234 of shared memory lies in bank {}: `address // 4 % 32`.", "0x1234 // 4 % 32"),
    Fact("wavefronts-of-ld-shared-b32-in-a-row", "Wavefronts of ld.shared.b32 along a row",
         "32 lanes that read 32 neighbouring words: {}.", SHARED + 'wavefronts("ld.shared.b32", lane * 4).wavefronts'),
    Fact("wavefronts-of-ld-shared-b32-down-a-column", "Wavefronts of ld.shared.b32 down a column",
         "32 lanes that read the first word of rows of 128 bytes: {}; with rows padded to 132 bytes it is 1.",
         SHARED + 'wavefronts("ld.shared.b32", lane * 128).wavefronts'),
    Fact("wavefronts-of-a-broadcast", "Wavefronts of a broadcast",
         "32 lanes that read one word: {}.", SHARED + 'wavefronts("ld.shared.b32", lane * 0).wavefronts'),
    Fact("wavefronts-of-ld-shared-b64", "Wavefronts of ld.shared.b64",
         "32 lanes that read 8 bytes each, in a row: {}, half a warp each.",
         SHARED + 'wavefronts("ld.shared.b64", lane * 8).wavefronts'),
    Fact("wavefronts-of-ld-shared-b128", "Wavefronts of ld.shared.b128",
         "32 lanes that read 16 bytes each, in a row: {}, a quarter of a warp each.",
         SHARED + 'wavefronts("ld.shared.b128", lane * 16).wavefronts'),
    Fact("shared-memory-of-a-cta-on-sm-80", "Shared memory of a CTA on sm_80", "At most {} bytes.",
         ARCH + 'ARCHS["sm_80"].shared_bytes'),
    Fact("shared-memory-of-a-cta-on-sm-90", "Shared memory of a CTA on sm_90", "At most {} bytes.",
         ARCH + 'ARCHS["sm_90"].shared_bytes'),
    Fact("lds-of-gfx950", "LDS of a workgroup on gfx950", "At most {} bytes, in 64 banks.",
         ARCH + 'ARCHS["gfx950"].shared_bytes'),
    Fact("registers-of-mma-sync-m16n8k16", "Numbers that a lane holds of mma.sync.m16n8k16",
         "Of A, B and C: {}.",
         ATOM + 'atom = get_atom("mma.sync.m16n8k16.bf16")\natom.regs_a, atom.regs_b, atom.regs_c'),
    Fact("lanes-of-a-row-of-c", "Who holds a row of C of mma.sync.m16n8k16",
         "Row 0 lies with lanes {}: a quad, which is why a row's maximum takes two shuffles.",
         "import numpy as np\n" + ATOM + 'row = np.broadcast_to(np.arange(16)[:, None], (16, 8))\n'
         'held = get_atom("mma.sync.m16n8k16.bf16").fragment_c(row)  # [lanes, registers]\n'
         "np.flatnonzero((held == 0).any(-1)).tolist()"),
    Fact("bytes-of-a-token-llama-3-1-8b", "KV bytes of a token of Llama 3.1 8B",
         "A token takes {} bytes of all layers in bfloat16.",
         BUDGET + 'kv_budget("llama-3.1-8b").growing_bytes_per_token'),
    Fact("bytes-of-a-token-deepseek-v3", "KV bytes of a token of DeepSeek V3",
         "A token takes {} bytes of all layers in bfloat16: 61 latent rows of 576 numbers.",
         BUDGET + 'kv_budget("deepseek-v3").growing_bytes_per_token'),
    Fact("bytes-of-a-token-smollm2", "KV bytes of a token of SmolLM2 135M",
         "A token takes {} bytes of all layers in bfloat16.",
         BUDGET + 'kv_budget("smollm2-135m").growing_bytes_per_token'),
    Fact("bytes-of-an-fp8-latent-row", "Bytes of an fp8 latent row",
         "DeepSeek's row of 512 fp8 latents, four float32 scales and a bfloat16 rope part of 64 takes {} bytes.",
         "512 + 4 * 4 + 2 * 64"),
    Fact("largest-float8-e4m3fn", "The largest number of float8_e4m3fn", "It is {}; there is no infinity.",
         "import ml_dtypes\nfloat(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)"),
    Fact("rounding-of-bfloat16", "Rounding of bfloat16", "Numbers of [1, 2) are {} apart.",
         "import ml_dtypes\nfloat(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)"),
    Fact("lse-of-no-key", "The result of a query without a key",
         "`(out, lse)` is {}, whatever the mask's value.",
         "import numpy as np\nfrom kvlab.attention import mha_decode_paged\n"
         "page, q = np.ones((1, 16, 1, 16), np.float32), np.ones((1, 1, 16), np.float32)\n"
         "out, lse = mha_decode_paged(q, page, page, np.array([[0]]), np.array([0]), return_lse=True)\n"
         "float(out[0, 0, 0]), float(lse[0, 0])"),
)


def value(fact: Fact) -> Any:
    """What its lines give: the last one is an expression."""
    *lines, last = fact.code.split("\n")
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return eval(last, names)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for fact in FACTS:
        found = value(fact)
        told = fact.told.format(f"{found:,}" if isinstance(found, int) else found)
        parts.append(f'<a id="{fact.anchor}"></a>\n\n## {fact.heading}\n\n{told}\n\n```python\n{fact.code}\n```\n')
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
