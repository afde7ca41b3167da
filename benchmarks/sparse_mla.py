"""Tasks of sparse MLA for the side-by-side benchmark: each token sees 2048 rows of its sequence's 8192, in any order.

kvlab gets the pool and the lists of slots; the peers get the same rows side by side in pages, as a dense decode of 2048
keys, and so the same result: what they take is what the gather is compared with. In a task of fp8 rows (656 bytes, with
scales) theirs are bfloat16.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

BATCH, CONTEXT, TOPK, PAGE = 128, 8192, 2048, 64
BLOCK = 128  # latents of a scale


def cases(Case: Any) -> list[Any]:
    """128 sequences of one token; the bytes are those of the rows that are named, their numbers, q and the output."""
    made = []
    for fp8, heads in ((False, 16), (False, 64), (False, 128), (True, 16), (True, 128)):
        params = {"b": BATCH, "h": heads, "ctx": TOPK, "page": PAGE, "context": CONTEXT}
        params["rows"] = "fp8" if fp8 else "bf16"
        rows = BATCH * TOPK * ((656 if fp8 else 1152) + 4)
        flop, small = 2.0 * BATCH * heads * TOPK * (576 + 512), BATCH * heads * (576 + 512) * 2
        name = f"sparse_mla_{'fp8_' if fp8 else ''}b{BATCH}_h{heads}_topk{TOPK}"
        made.append(Case(name, "mla", params, flop=flop, bytes=rows + small))
    return made


def add(bench: ModuleType) -> None:
    """Give the benchmark these tasks."""
    all_cases, make_inputs = bench.all_cases, bench.make_inputs
    bench.all_cases = lambda: [*all_cases(), *cases(bench.Case)]  # type: ignore[attr-defined]
    bench.make_inputs = lambda case, seed, device: (  # type: ignore[attr-defined]
        inputs if "context" in case.p else lambda x, *_: x
    )(make_inputs(case, seed, device), case.p, seed)


def inputs(x: Any, p: dict[str, Any], seed: int) -> Any:
    """Inputs of a dense MLA decode, of rows that lie anywhere in ``x.pool``; ``x.indices`` says where."""
    import torch

    device, dtype = x.q.device, x.q.dtype
    make = torch.Generator(device=device).manual_seed(seed)
    batch, keys = x.block_table.shape[0], p["ctx"]
    pages = torch.randperm(batch * (p["context"] // PAGE), generator=make, device=device).view(batch, -1)
    chosen = torch.rand(batch, p["context"], generator=make, device=device).argsort(1)[:, :keys]
    slots = pages.gather(1, chosen // PAGE) * PAGE + chosen % PAGE
    x.indices = slots.int()
    rows = torch.randn(pages.numel() * PAGE, 576, generator=make, device=device, dtype=dtype)
    if p["rows"] == "fp8":
        rows, packed = scaled(rows)
        x.pool = packed.view(-1, PAGE, 656)
    else:
        x.pool = rows.view(-1, PAGE, 576)
    at = x.block_table[:, : -(-keys // p["page"])].long().repeat_interleave(p["page"], 1)[:, :keys] * p["page"]
    flat = x.kv_cache.view(-1, 576)
    flat[at + torch.arange(keys, device=device) % p["page"]] = rows[slots]
    return x


def scaled(rows: Any) -> tuple[Any, Any]:
    """Rows as e4m3 with a float32 scale for every 128 latents has them, and these bytes ``[rows, 656]``."""
    import torch

    latent, rope = rows[:, :512].unflatten(1, (-1, BLOCK)).float(), rows[:, 512:].bfloat16()
    scale = latent.abs().amax(2) / 448
    content = (latent / scale[..., None]).to(torch.float8_e4m3fn)
    parts = [content.flatten(1), scale, rope]
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    seen = (content.float() * scale[..., None]).flatten(1)
    return torch.cat([seen.to(rows.dtype), rope.to(rows.dtype)], 1), packed
