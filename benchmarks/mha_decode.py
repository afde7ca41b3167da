"""MHA decode on a GPU: correctness and bandwidth, recorded as JSON.

    python benchmarks/mha_decode.py --output benchmarks/results/mha_decode.json

Correctness against float64 on the embedded capture of SmolLM2 and on the timed inputs. Times are medians of CUDA-
graph replays; GB/s counts K, V, q, the output, the lengths and the page table once. `read_gbps` is what a plain
reading kernel reaches on the same bytes in the same run: quote the ratio. "stack" is what a layer takes of a graph of
many, as a serving engine captures them, each with a cache of its own. `--backend triton` takes the portable kernel
also where there is one for this GPU; `--sweep` times other tile sizes as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_record
import numpy as np
import torch
import triton
import triton.language as tl

from kvlab.attention import explain, mha_decode, mha_decode_paged
from kvlab.attention.mha_decode.kernel import launch
from kvlab.attention.mha_decode.reference import reference
from kvlab.common.arrays import to_torch
from kvlab.data import load_smollm2
from kvlab.demo.steps import grow, paged_cache

SHAPES = [(64, 32, 8, 128, 4096, page, kv) for kv in ("bf16", "fp8") for page in (16, 64, 128)]
SHAPES += [(64, 32, 8, 128, 16384, 64, "fp8"), (64, 32, 8, 128, 4096, 64, "fp8-token")]


@triton.jit
def _read(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Read everything once, 16 bytes a lane, and keep one number a program."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        total += tl.load(x_ptr + start.to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def milliseconds(run: Any) -> float:
    return float(triton.testing.do_bench_cudagraph(run, rep=200, return_mode="median"))


def read_bandwidth(kv: torch.Tensor) -> float:
    """GB/s of reading the bytes of ``kv``, the best of a few grids."""
    flat = kv.view(torch.float32).reshape(-1)
    out = torch.empty(132 * 16, device=kv.device)
    times = []
    for programs in (132 * 4, 132 * 8, 132 * 16):
        times.append(
            milliseconds(lambda grid=programs: _read[(grid,)](flat, out, flat.numel(), BLOCK=4096, num_warps=8))
        )
    return flat.numel() * 4 / min(times) / 1e6


def captured(backend: str) -> dict[str, Any]:
    """Errors of the compiled kernel on the embedded capture, over its layers and decode steps."""
    capture = load_smollm2()
    pool = paged_cache(capture, page_size=16)
    to_reference, to_model = 0.0, 0.0
    assert capture.o is not None
    for step in range(capture.decode_steps):
        token = capture.prompt_tokens + step
        grow(pool, capture, token, token + 1)
        at = pool.with_lengths(np.array([token], np.uint32), 1)
        for layer in range(len(capture.layers)):
            q = capture.q[layer, token][None]
            on_gpu = to_torch(q).cuda(), at.to("cuda"), layer
            out = mha_decode(*on_gpu, scale=capture.scale, backend=backend).double().cpu().numpy()
            k, v = at.get_key_cache(layer).blocks, at.get_value_cache(layer).blocks
            exact, _ = reference(q[:, None], k, v, at.lookup_table, np.array([token + 1]), scale=capture.scale)
            to_reference = max(to_reference, np.abs(out - exact[:, 0]).max())
            to_model = max(to_model, np.abs(out - capture.o[layer, token].astype(np.float64)).max())
    return {
        "steps": capture.decode_steps,
        "layers": list(capture.layers),
        "to_reference": to_reference,
        "to_model": to_model,
    }


def synthetic(
    B: int, Hq: int, Hkv: int, D: int, context: int, page: int, kind: str, *, sweep: bool, backend: str
) -> dict[str, Any]:
    """Correctness and speed of one shape, pages shuffled: q of bfloat16; K and V too, or of fp8 e4m3 with one scale
    each ("fp8") or with one for every token and head ("fp8-token").
    """
    generator = torch.Generator("cuda").manual_seed(0)
    pages = B * context // page
    kv = torch.randn((2, pages, page, Hkv, D), dtype=torch.bfloat16, device="cuda", generator=generator)
    scales: dict[str, Any] = {}
    if kind != "bf16":
        kv = kv.to(torch.float8_e4m3fn)
        made = torch.rand((2, *kv.shape[1:4]), device="cuda", generator=generator) + 0.5
        scales = {"k_scale": made[0], "v_scale": made[1]} if kind == "fp8-token" else {"k_scale": 0.75, "v_scale": 1.25}
    q = torch.randn((B, Hq, D), dtype=torch.bfloat16, device="cuda", generator=generator)
    table = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32).reshape(B, -1)
    lens = torch.full((B,), context, dtype=torch.int32, device="cuda")
    arguments = (q, kv[0], kv[1], table, lens)
    options = {**scales, "backend": backend}
    out = mha_decode_paged(*arguments, **options)
    true = [_scaled(x, scales.get(name)) for x, name in ((kv[0], "k_scale"), (kv[1], "v_scale"))]
    few = slice(0, 4) if kind == "bf16" else slice(0, 2)
    exact = _attend(q[few].double(), *true, table, torch.float64)
    error = (out[few].double() - exact).abs()
    plain = (_attend(q[few], *true, table, q.dtype).double() - exact).abs()
    del true
    moved = kv.numel() * kv.element_size() + 2 * q.numel() * 2 + table.numel() * 4 + lens.numel() * 4
    moved += 8 * kv[0].numel() // D if kind == "fp8-token" else 0
    ms = milliseconds(lambda: mha_decode_paged(*arguments, **options, out=out))
    read = read_bandwidth(kv)
    plan = explain(mha_decode_paged, *arguments, **options)
    result = {
        "shape": f"B{B}-H{Hq}x{Hkv}-D{D}-ctx{context}-page{page}-{kind}",
        "max_error": error.max().item(), "mean_error": error.mean().item(),
        "torch_bf16_max_error": plain.max().item(), "torch_bf16_mean_error": plain.mean().item(),
        "ms": ms, "gbps": moved / ms / 1e6, "read_gbps": read, "of_read": moved / ms / 1e6 / read,
        "backend": plan.backend, "config": dataclasses.asdict(plan.config),
    }
    if sweep and kind != "fp8-token":
        portable = explain(mha_decode_paged, *arguments, backend="triton").config
        result["sweep"] = _sweep(arguments, portable, moved, read)
    return result


def stack(backend: str, layers: int = 32, context: int = 4096, page: int = 16) -> dict[str, Any]:
    """One sequence, 32 heads on 8, decoded by all layers in one CUDA graph; the L2 flushed before each replay."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    pages = context // page
    shape = (layers, 2, pages, page, 8, 128)
    caches = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
    q = torch.randn((1, 32, 128), dtype=torch.bfloat16, device="cuda", generator=generator)
    table = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32)[None]
    lens = torch.full((1,), context, dtype=torch.int32, device="cuda")
    out = torch.empty((layers, *q.shape), dtype=q.dtype, device="cuda")

    def step() -> None:
        for (k, v), into in zip(caches, out, strict=True):
            mha_decode_paged(q, k, v, table, lens, out=into, backend=backend)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ms = gpu_record.call_milliseconds(graph.replay)
    exact = _attend(q.double(), *caches[-1], table, torch.float64)
    return {
        "shape": f"B1-H32x8-D128-ctx{context}-page{page}-bf16", "layers": layers,
        "max_error": (out[-1].double() - exact).abs().max().item(), "ms_a_layer": ms / layers,
        "backend": explain(mha_decode_paged, q, *caches[0], table, lens, backend=backend).backend,
    }


def _sweep(arguments: tuple[torch.Tensor, ...], config: Any, moved: int, read: float) -> list[dict[str, Any]]:
    q, *rest = arguments
    rows = []
    for BN, stages, warps in (
        (32, 3, 4),
        (32, 4, 4),
        (64, 2, 4),
        (64, 3, 4),
        (64, 4, 4),
        (64, 3, 8),
        (128, 2, 4),
        (128, 2, 8),
        (128, 3, 4),
        (128, 3, 8),
    ):
        tried = dataclasses.replace(config, BN=BN, num_stages=stages, num_warps=warps)
        try:
            ms = milliseconds(lambda c=tried: launch(q[:, None], *rest, scale=0.088, config=c))
        except Exception as reason:  # a tile that does not fit is a result
            rows.append({"BN": BN, "stages": stages, "warps": warps, "failed": str(reason)[:80]})
            continue
        rows.append(
            {
                "BN": BN,
                "stages": stages,
                "warps": warps,
                "ms": round(ms, 4),
                "of_read": round(moved / ms / 1e6 / read, 4),
            }
        )
    return rows


def _dense(cache: torch.Tensor, table: torch.Tensor, group: int) -> torch.Tensor:
    """[pages, page, Hkv, D] of a sequence's pages -> [Hq, keys, D]."""
    return cache[table.long()].flatten(0, 1).permute(1, 0, 2).repeat_interleave(group, 0)


def _scaled(x: torch.Tensor, scale: Any) -> torch.Tensor:
    """K or V as it truly is, float32 where there are scales."""
    if scale is None:
        return x
    return x.float() * (scale[..., None] if isinstance(scale, torch.Tensor) else scale)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``softmax(q k^T scale) v`` in ``dtype``: float64, or what the tolerance is measured by."""
    group, rows = q.shape[1] // k.shape[2], []
    for b in range(len(q)):
        keys, values = _dense(k, table[b], group).to(dtype), _dense(v, table[b], group).to(dtype)
        scores = (q[b][:, None].to(dtype) @ keys.transpose(1, 2)) * q.shape[-1] ** -0.5
        rows.append((scores.softmax(-1) @ values)[:, 0])
    return torch.stack(rows)


def measurements(sweep: bool, backend: str) -> dict[str, Any]:
    return {
        "captured": captured(backend),
        "synthetic": [synthetic(*shape, sweep=sweep, backend=backend) for shape in SHAPES],
        "stack": stack(backend),
    }


if __name__ == "__main__":
    gpu_record.run("benchmarks/mha_decode.py", __doc__, measurements, ("auto", "triton"))
