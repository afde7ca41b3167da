"""Conversions of KV formats on a GPU: correctness and bandwidth, recorded as JSON.

    python benchmarks/convert.py --output benchmarks/results/convert_h200.json

Whole pools of about 270 MB, bfloat16 with 8 heads of 128 where nothing else is said, in pages of 16 tokens. The bytes
of a small pool are compared with NumPy's. Times are medians of CUDA-graph replays; pools are larger than the L2 cache.
`copy_us` is what torch's `copy_` of as many bytes takes in the same run: quote `of_copy`, the ratio. `in_place` is a
conversion within one buffer. `--sweep` times other tiles of those below 0.93 as well.
"""

from __future__ import annotations

from typing import Any

import gpu_record
import numpy as np
import torch
from kv_store import milliseconds

from kvlab.attention.strided_copy.config import choose_tile, unit_of
from kvlab.attention.strided_copy.kernel import ITEMS, launch
from kvlab.formats import Conversion, Format, convert, known_format

LAYERS, TOKENS, WANTED = 4, 16384, 0.93
PAIRS: dict[str, tuple[tuple[str, int], tuple[str, int], str]] = {
    "NHD to HND": (("vllm.blocks_first", 16), ("vllm.hnd", 16), "in place"),
    "HND to NHD": (("vllm.hnd", 16), ("vllm.blocks_first", 16), ""),
    "kv first to blocks first": (("vllm.kv_first", 16), ("vllm.blocks_first", 16), ""),
    "x-split to NHD": (("vllm.x_split", 16), ("flash_attention.paged", 16), "in place"),
    "NHD to x-split": (("vllm.kv_first", 16), ("vllm.x_split", 16), ""),
    "LMCache chunks of 256 to pages": (("lmcache.kv_2ltd", 256), ("vllm.blocks_first", 16), ""),
    "pages to LMCache chunks of 256": (("vllm.hnd", 16), ("lmcache.kv_2ltd", 256), ""),
    "TensorRT-LLM pool to kv first": (("trtllm.pool", 16), ("vllm.kv_first", 16), ""),
    "656-byte rows, pages of 64 to 32": (("mla.656", 64), ("mla.656", 32), ""),
    "584-byte rows, pages of 64 to 32": (("mla.584", 64), ("mla.584", 32), ""),
    "NVFP4, K linear, V 4x4, pages of 16 to 64": (("flashinfer.nvfp4", 16), ("flashinfer.nvfp4", 64), ""),
}
"""What is measured: formats with their page sizes."""


def formats(pair: str, tokens: int, layers: int) -> tuple[Format, Format]:
    one, other, _ = PAIRS[pair]
    first, second = (
        known_format(name, layers=layers, pages=tokens // page, page_size=page) for name, page in (one, other)
    )
    return first, second


def wrong_bytes(pair: str) -> int:
    """Bytes of a small pool that differ from those of NumPy."""
    plan = convert(*formats(pair, 512, 2))
    x = torch.randint(0, 256, (plan.source.nbytes,), dtype=torch.uint8)
    exact = plan.apply(x, fill=5)
    wrong = int((plan.apply(x.cuda(), fill=5).cpu() != exact).sum())
    if PAIRS[pair][2]:
        held = x.cuda()
        plan.apply_in_place(held)
        wrong += int((held.cpu() != exact).sum())
    return wrong


def measure(pair: str, sweep: bool) -> dict[str, Any]:
    tokens = TOKENS * (1 if "bf16" in known_format(PAIRS[pair][0][0]).print() and "mla" not in PAIRS[pair][0][0] else 4)
    source, target = formats(pair, tokens, LAYERS)
    plan = convert(source, target)
    x = torch.randint(0, 256, (source.nbytes,), dtype=torch.uint8, device="cuda")
    out = torch.zeros(target.nbytes, dtype=torch.uint8, device="cuda")
    size = sum(one.times * one.bits for one in plan.strided) // 8
    one, other = x[:size].clone(), x[:size].clone()
    copy = milliseconds([lambda: other.copy_(one)] * 10)
    result: dict[str, Any] = {
        "pair": pair, "source": source.print(), "target": target.print(), "wrong_bytes": wrong_bytes(pair),
        "mb": round(size / 1e6, 1), "copy_us": round(1e3 * copy, 2), "copy_gbps": round(2 * size / copy / 1e6, 1),
    }
    ms = milliseconds([lambda: plan.apply(x, out=out)] * 10)
    result |= {"us": round(1e3 * ms, 2), "gbps": round(2 * size / ms / 1e6, 1), "of_copy": round(copy / ms, 3)}
    if PAIRS[pair][2]:
        ms = milliseconds([lambda: plan.apply_in_place(x)] * 10)
        result |= {"in_place_us": round(1e3 * ms, 2), "in_place_of_copy": round(copy / ms, 3)}
    if sweep and result["of_copy"] < WANTED:
        result["sweep"] = _sweep(plan, x, out, copy)
    return result


def _sweep(plan: Conversion, x: torch.Tensor, out: torch.Tensor, copy: float) -> list[dict[str, Any]]:
    rows = []
    for tile, warps in ((8 << 10, 4), (16 << 10, 2), (16 << 10, 8), (32 << 10, 8)):
        chosen = [
            choose_tile(one, unit_of(one, addresses=[x.numel(), out.numel()]), tile=tile, num_warps=warps)
            for one in plan.strided
        ]
        views = [(x.view(item), out.view(item)) for c in chosen for item in [ITEMS[c.unit]]]
        tables = [None if c.table is None else torch.from_numpy(c.table).cuda() for c in chosen]

        def run(chosen: Any = chosen, views: Any = views, tables: Any = tables) -> None:
            for config, ends, table in zip(chosen, views, tables, strict=True):
                launch(*ends, config=config, table=table)

        ms = milliseconds([run] * 10)
        rows.append({"tile": tile, "warps": warps, "us": round(1e3 * ms, 2), "of_copy": round(copy / ms, 3)})
    return rows


def measurements(sweep: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    found = [measure(pair, sweep) for pair in PAIRS]
    return {"conversions": found, "least_of_copy": float(np.min([one["of_copy"] for one in found]))}


if __name__ == "__main__":
    gpu_record.run("benchmarks/convert.py", __doc__, measurements)
