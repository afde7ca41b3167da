"""MHA decode over K and V of 4 bits on a GPU, beside fp8: correctness, bandwidth and tokens/s, recorded as JSON.

    python benchmarks/decode_4bit.py --output benchmarks/results/decode_4bit_h200.json

"nvfp4" is e2m1 with an e4m3 scale of each 16 columns and a number of K and of V, "nvfp4_4x4" the same with V's scales
in the 4x4 order, "int4" integers with a float32 scale of each token and head, "uint4" those with a minimum, too. 64
sequences of 32 query heads on 8 KV heads of 128. `of_read` is the rate at which K, V and their scales are read over
that of a plain reading kernel in the same run; `of_fp8` the tokens/s over those of fp8, by the kernel that "auto" takes
for fp8. Errors are against float64 on the same bytes. `--sweep` times other tiles as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_record
import torch
from mha_decode import milliseconds, read_bandwidth

from kvlab.attention import explain, mha_decode_paged
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import resolve_scales
from kvlab.attention.mha_decode.kernel import launch

B, HQ, HKV, D = 64, 32, 8, 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0)
SIZES = [(context, page) for context in (4096, 16384) for page in (16, 64)]
TILES = [
    (8, 32, 3, 1), (8, 32, 5, 1), (8, 32, 7, 1), (8, 64, 3, 1), (8, 64, 5, 2), (16, 32, 3, 1), (16, 32, 5, 1),
    (16, 64, 5, 2), (16, 128, 3, 4), (16, 128, 5, 4),
]
"""Rows, keys, stages, warps."""
RESIDENT = 512


def inputs(kind: str, context: int, page: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], int]:
    """(arguments, options, bytes of K, V and their scales) of a call, pages shuffled."""
    generator = torch.Generator("cuda").manual_seed(0)
    pages = B * context // page
    shape = (2, pages, page, HKV)
    if kind == "fp8":
        kv = torch.randn((*shape, D), dtype=torch.bfloat16, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        options: dict[str, Any] = {"k_scale": 0.75, "v_scale": 1.25}
    else:
        kv = torch.randint(0, 256, (*shape, D // 2), dtype=torch.uint8, device="cuda", generator=generator)
        small = kind.startswith("nvfp4")
        made = torch.rand((*shape, D // 16) if small else shape, device="cuda", generator=generator) + 0.5
        if small:
            made = made.to(torch.float8_e4m3fn)
            options = {"k_block_scale": made[0], "v_block_scale": made[1], "k_scale": 0.25, "v_scale": 0.5}
        else:
            made *= 0.25
            options = {"k_scale": made[0], "v_scale": made[1]}
        if kind == "uint4":
            options |= {"k_min": -8 * made[0], "v_min": -7 * made[1]}
        if kind == "nvfp4_4x4":
            fours = made[1].view(pages, page // 4, 4, HKV, D // 16)
            options["v_block_scale"] = fours.permute(0, 1, 3, 4, 2).contiguous()
    q = torch.randn((B, HQ, D), dtype=torch.bfloat16, device="cuda", generator=generator)
    table = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32).reshape(B, -1)
    lens = torch.full((B,), context, dtype=torch.int32, device="cuda")
    scales = sum(x.numel() * x.element_size() for x in options.values() if isinstance(x, torch.Tensor))
    return (q, kv[0], kv[1], table, lens), options, kv.numel() * kv.element_size() + scales


def rows(cache: torch.Tensor, pages: torch.Tensor, scale: Any, blocks: Any, least: Any) -> torch.Tensor:
    """``[Hq, keys, D]`` of a sequence's pages in float64."""
    pages, found = pages.long(), cache[pages.long()]
    if cache.dtype == torch.uint8:
        codes = torch.stack([found & 15, found >> 4], -1).flatten(-2).long()
        numbers = E2M1 if blocks is not None else INT4 if least is None else range(16)
        found = torch.tensor([*numbers], dtype=torch.float64, device="cuda")[codes]
        if blocks is not None:
            by = blocks[pages].double()
            by = by if by.ndim == 4 else by.permute(0, 1, 4, 2, 3).flatten(1, 2)
            found = found * by.repeat_interleave(16, -1)
    found = found.double() * (scale[pages][..., None] if isinstance(scale, torch.Tensor) else scale)
    found = found if least is None else found + least[pages][..., None]
    return found.flatten(0, 1).permute(1, 0, 2).repeat_interleave(HQ // HKV, 0)


def error(out: torch.Tensor, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> float:
    """The largest error of the first two sequences."""
    (q, k, v, table, _), found = arguments, []
    for b in range(2):
        keys = rows(k, table[b], options["k_scale"], options.get("k_block_scale"), options.get("k_min"))
        values = rows(v, table[b], options["v_scale"], options.get("v_block_scale"), options.get("v_min"))
        weights = (q[b][:, None].double() @ keys.transpose(1, 2) * D**-0.5).softmax(-1)
        found.append((out[b].double() - (weights @ values)[:, 0]).abs().max().item())
    return max(found)


def sweep_tiles(arguments: tuple[torch.Tensor, ...], options: dict[str, Any], moved: int, read: float) -> list[Any]:
    """The rates of other tiles with 1 to 4 splits, and with 4 over so few pages that they stay in L2."""
    (q, k, v, table, lens), config = arguments, explain(mha_decode_paged, *arguments, **options).config
    features, found = Features(scales=resolve_scales(q, k, v, B, **options)), []
    for BM, BN, stages, warps in TILES:
        rates: list[Any] = []
        for splits, pages in (*((n, table) for n in (1, 2, 3, 4)), (4, table % RESIDENT)):
            tried = dataclasses.replace(config, BM=BM, BN=BN, num_stages=stages, num_warps=warps, num_splits=splits)
            arrays = q[:, None], k, v, pages, lens
            try:
                ms = milliseconds(
                    lambda a=arrays, c=tried: launch(*a, scale=D**-0.5, config=c, features=features)
                )
            except Exception as reason:  # a tile that does not fit is a result
                rates.append(str(reason)[:60])
                break
            rates.append(round(moved / ms / 1e6 / read, 4))
        found.append([BM, BN, stages, warps, rates])
    return found


def measurements(sweep: bool) -> dict[str, Any]:
    found = []
    for context, page in SIZES:
        fp8, read = 0.0, 0.0
        for kind in ("fp8", "nvfp4", "nvfp4_4x4", "int4", "uint4"):
            arguments, options, moved = inputs(kind, context, page)
            out = mha_decode_paged(*arguments, **options)
            wrong = error(out, arguments, options)
            ms = milliseconds(lambda a=arguments, o=options, into=out: mha_decode_paged(*a, **o, out=into))
            fp8, read = (ms, read_bandwidth(arguments[1])) if kind == "fp8" else (fp8, read)
            plan = explain(mha_decode_paged, *arguments, **options)
            row = {
                "kind": kind, "context": context, "page": page, "max_error": wrong, "ms": ms,
                "tokens_per_s": B / ms * 1e3, "gbps": moved / ms / 1e6, "read_gbps": read,
                "of_read": moved / ms / 1e6 / read, "of_fp8": fp8 / ms, "backend": plan.backend,
                "config": dataclasses.asdict(plan.config),
            }
            if sweep and kind != "fp8" and page == 16:
                row["sweep"] = sweep_tiles(arguments, options, moved, read)
            found.append(row)
            print(*list(row.values())[:9], flush=True)
            del arguments, options, out
            torch.cuda.empty_cache()
    return {"decode": found}


if __name__ == "__main__":
    gpu_record.run("benchmarks/decode_4bit.py", __doc__, measurements)
