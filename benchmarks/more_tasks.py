"""Tasks for the side-by-side benchmark of the same kinds as its own with other numbers: what was tuned for those has to
hold for these. Their names begin with ``more``.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

DECODES: dict[str, tuple[str, int, int, int, int]] = {
    "d64 uneven": ("96 6.8 1.0", 16, 32, 8, 64), "d64 equal": ("32x4096", 64, 32, 8, 64),
    "d80 equal": ("32x4096", 64, 32, 8, 80), "d96 uneven": ("96 6.8 1.0", 16, 32, 8, 96),
    "d112 equal": ("32x4096", 64, 32, 8, 112), "d192 uneven": ("96 6.8 1.0", 16, 16, 4, 192),
    "d192 equal": ("32x4096", 64, 16, 4, 192), "d256 uneven": ("96 6.8 1.0", 16, 16, 4, 256),
    "d256 equal": ("32x4096", 64, 16, 4, 256),
    "64 on 8 uneven": ("48 7.5 1.0", 32, 64, 8, 128), "28 on 4 uneven": ("64 7.0 1.2", 16, 28, 4, 128),
    "32 on 32 equal": ("16x2048", 16, 32, 32, 128), "16 on 1 equal": ("24x8192", 64, 16, 1, 128),
    "1 x 4k": ("1x4096", 16, 32, 8, 128),
    "fp8 d64 uneven": ("96 7.0 1.0", 64, 32, 8, 64), "fp8 d256 uneven": ("64 7.0 1.0", 64, 16, 4, 256),
}
"""Lengths (how many, mean and deviation of their logarithms; or how many of one length), page, heads, dimension."""
PREFILLS = [
    (2, 16, 16, 4096, 112, True), (2, 16, 16, 4096, 192, True), (4, 16, 16, 2048, 80, True),
    (2, 32, 32, 4096, 96, False), (2, 32, 8, 4096, 64, False), (8, 16, 16, 777, 128, True),
    (32, 16, 16, 256, 128, True), (2, 16, 4, 2048, 256, False), (4, 32, 32, 1024, 64, True),
]
"""Sequences, heads, tokens, dimension, causal."""


def lengths(told: str, chance: random.Random) -> list[int]:
    """Lengths as ``DECODES`` tells them."""
    if "x" in told:
        count, length = map(int, told.split("x"))
        return [length] * count
    many, mean, deviation = told.split()
    return [max(1, int(chance.lognormvariate(float(mean), float(deviation)))) for _ in range(int(many))]


def cases(Case: Any) -> list[Any]:
    """Tasks of decode, mixed batches, chunks, drafts, prompts, prefill and MLA."""
    made, chance = [], random.Random(7)

    def some(count: int, low: int, high: int) -> list[int]:
        return [chance.randint(low, high) for _ in range(count)]

    def decode(name: str, lens: list[int], page: int, hq: int, hkv: int, d: int) -> None:
        fp8 = name.startswith("fp8")
        params = {"lens": lens, "hq": hq, "hkv": hkv, "d": d, "page": page, "fp8": fp8}
        moved = 2 * sum(lens) * hkv * d * (1 if fp8 else 2) + 4 * len(lens) * hq * d
        flop = 4.0 * sum(lens) * hq * d
        made.append(Case(f"more decode {name}", "decode", params, 8e-2 if fp8 else 1e-2, flop=flop, bytes=moved))

    def paged(
        name: str, new: list[int], cached: list[int], page: int, hq: int = 32, hkv: int = 8, d: int = 128
    ) -> None:
        params = {"new": new, "cached": cached, "hq": hq, "hkv": hkv, "d": d, "page": page}
        pairs = sum(n * m + n * n / 2 for n, m in zip(new, cached, strict=True))
        moved = 4 * (sum(new) * hq * d + (sum(new) + sum(cached)) * hkv * d)
        made.append(Case(f"more {name}", "paged_prefill", params, flop=4.0 * hq * d * pairs, bytes=moved))

    def mla(name: str, lens: list[int], heads: int) -> None:
        params = {"b": len(lens), "h": heads, "ctx": max(lens), "lens": lens, "page": 64}
        moved = sum(lens) * 1152 + len(lens) * heads * 2176
        made.append(Case(f"more MLA {name}", "mla", params, flop=2.0 * heads * sum(lens) * 1088, bytes=moved))

    for name, (told, *sizes) in DECODES.items():
        decode(name, lengths(told, chance), *sizes)
    decode("7 and one of 60k", [60_000, *some(7, 50, 2000)], 16, 32, 8, 128)
    decode("fp8 40 and one of 120k", [120_000, *some(40, 100, 900)], 64, 32, 8, 128)
    for d, *heads in ((64, 32, 8), (96, 32, 8), (192, 16, 4), (256, 16, 4)):
        paged(f"mixed d{d}", [512] * 3 + [1] * 40, some(43, 0, 6000), 16, *heads, d)
        paged(f"10 chunks of 256 d{d}", [256] * 10, some(10, 1000, 16_000), 64, *heads, d)
        paged(f"32 drafts of 6 d{d}", [6] * 32, some(32, 300, 8000), 16, *heads, d)
    paged("48 drafts of 3 d256", [3] * 48, some(48, 300, 8000), 16, 16, 4, 256)
    paged("mixed 32 on 4", [1024] * 2 + [1] * 100, some(102, 0, 4000), 16, 32, 4)
    paged("mixed 64 on 8", [300, 700] + [1] * 80 + [4] * 10, some(92, 100, 5000), 64, 64, 8)
    paged("mixed 28 on 4", [512] * 3 + [1] * 40, some(43, 0, 6000), 16, 28, 4)
    paged("mixed 16 on 16", [400] * 3 + [1] * 40, some(43, 0, 6000), 16, 16, 16)
    paged("6 chunks of 1024", [1024] * 6, some(6, 1000, 20_000), 16)
    paged("24 chunks of 64 32 on 4", [64] * 24, some(24, 2000, 12_000), 64, 32, 4)
    paged("20 chunks of 33", [33] * 20, some(20, 1000, 12_000), 16)
    paged("a chunk of 512 on 64k", [512], [64_000], 16)
    paged("40 drafts of 5 64 on 8", [5] * 40, some(40, 300, 9000), 16, 64, 8)
    paged("24 drafts of 16", [16] * 24, some(24, 300, 9000), 16)
    paged("96 drafts of 2", [2] * 96, some(96, 100, 5000), 16)
    paged("200 short prompts and one of 2000", [*some(200, 5, 60), 2000], [0] * 201, 16)
    paged("64 prompts of 60 to 500", some(64, 60, 500), [0] * 64, 64)
    paged("16 x 128 on a prefix of 8192", [128] * 16, [8192] * 16, 16)
    paged("96 x 32 on a prefix of 2048", [32] * 96, [2048] * 96, 64)
    paged("24 prompts of 200 to 3000", some(24, 200, 3000), [0] * 24, 16)
    for b, hq, hkv, s, d, causal in PREFILLS:
        name = f"more prefill d{d} {b} x {s} {hq} on {hkv}{' causal' if causal else ''}"
        params = {"b": b, "hq": hq, "hkv": hkv, "s": s, "d": d, "dv": d, "causal": causal, "fp8": False, "flex": False}
        flop = 4.0 * b * hq * d * s * s / (2 if causal else 1)
        made.append(Case(name, "prefill", params, flop=flop, bytes=4 * b * s * d * (hq + hkv)))
    mla("32 uneven 64 heads", lengths("32 8.0 1.0", chance), 64)
    mla("1 x 128k 16 heads", [131_072], 16)
    mla("16 x 8k 128 heads", [8192] * 16, 128)
    mla("64 uneven 32 heads", lengths("64 7.0 1.2", chance), 32)
    mla("7 and one of 50k 128 heads", [50_000, *some(7, 100, 2000)], 128)
    mla("256 of 100 to 2000 16 heads", some(256, 100, 2000), 16)
    return made


def add(bench: ModuleType) -> None:
    """Give the benchmark these tasks."""
    all_cases = bench.all_cases
    bench.all_cases = lambda: [*all_cases(), *cases(bench.Case)]  # type: ignore[attr-defined]
