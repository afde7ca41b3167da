"""MLA on a GPU, decode and prefill: correctness, bandwidth and rate, recorded as JSON.

    python benchmarks/mla.py --output benchmarks/results/mla_h100.json

Decode (512 + 64 columns, pages of 64 dealt at random): GB/s counts the latent rows, q, the output, the lengths and the
page table once; `of_read` is the ratio to what a plain reading kernel reaches on the same bytes in the same run, and
`of_gemm` that of the matrix products' rate to a large bf16 matrix product in the same run. Prefill (192/128, 128 heads,
causal): `of_gemm`, and `of_torch`, how often as fast as torch's scaled_dot_product_attention on K with the rope part
copied to every head (without that copy). Times are medians, decode's of CUDA-graph replays. `--backend triton` takes
decode's portable kernel also where there is one for this GPU; `--sweep` times other tile sizes as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_record
import torch
from mha_decode import milliseconds, read_bandwidth

from kvlab.attention import explain, mla_decode_paged, mla_prefill_paged, mla_store_paged
from kvlab.attention.call.latent_rows import latent_windows
from kvlab.attention.features.resolve import Features
from kvlab.attention.mla_decode.kernel import launch as launch_decode

PAGE, LATENT, ROPE = 64, 512, 64
SCALE = (128 + ROPE) ** -0.5
DECODE = [(128, 128, 4096, "bf16"), (128, 16, 4096, "bf16"), (1, 128, 65536, "bf16"), (128, 16, 4096, "rope-aware")]
PREFILL = [(4, 4096), (1, 16384)]
TILES = [  # BM, BN, warps, stages
    (16, 32, 4, 2), (16, 64, 8, 3), (16, 64, 8, 4), (32, 32, 8, 2), (32, 64, 8, 2), (64, 32, 8, 3),
]


def gemm_rate() -> float:
    """TFLOP/s of a bf16 matrix product of 8192."""
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device="cuda") for _ in "ab")
    return 2 * 8192**3 / gpu_record.call_milliseconds(lambda: a @ b) / 1e9


def latent_cache(tokens: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Pages of random rows, in bfloat16 or stored as rope-aware rows."""
    rows = torch.randn((tokens, LATENT + ROPE), dtype=torch.bfloat16, device="cuda", generator=generator)
    if kind == "bf16":
        return rows.reshape(-1, PAGE, LATENT + ROPE)
    cache = torch.zeros((tokens // PAGE, PAGE, LATENT + 2 * ROPE), dtype=torch.float8_e4m3fn, device="cuda")
    slots = torch.arange(tokens, device="cuda")
    mla_store_paged(rows[:, :LATENT].contiguous(), rows[:, LATENT:].contiguous(), cache, slots, scale=1.0)
    return cache


def decode(B: int, H: int, context: int, kind: str, gemm: float, sweep: bool, backend: str) -> dict[str, Any]:
    """One shape of decode."""
    generator = torch.Generator("cuda").manual_seed(0)
    cache = latent_cache(B * context, kind, generator)
    q = torch.randn((B, H, LATENT + ROPE), dtype=torch.bfloat16, device="cuda", generator=generator)
    table = torch.randperm(len(cache), device="cuda", generator=generator).to(torch.int32).reshape(B, -1)
    lens = torch.full((B,), context, dtype=torch.int32, device="cuda")
    out = mla_decode_paged(q, cache, table, lens, backend=backend)
    latent, rope = (window[table[-1].long()].flatten(0, 1) for window in latent_windows(cache, LATENT, ROPE))
    k = torch.cat([latent.double(), rope.double()], -1)
    exact, plain = (_attend(q[-1].to(t), k.to(t)) for t in (torch.float64, torch.bfloat16))
    moved = cache.numel() * cache.element_size() + 2 * (q.numel() + out.numel()) + 4 * (table.numel() + lens.numel())
    read = read_bandwidth(cache)
    product = 2 * B * H * context * (2 * LATENT + ROPE)

    def rates(ms: float) -> dict[str, float]:
        return {"ms": round(ms, 4), "of_read": round(moved / ms / 1e6 / read, 3),
                "of_gemm": round(product / ms / 1e9 / gemm, 3)}

    plan = explain(mla_decode_paged, q, cache, table, lens, backend=backend)
    result = {
        "shape": f"decode-B{B}-H{H}-ctx{context}-page{PAGE}-{kind}", "read_gbps": round(read),
        "max_error": (out[-1].double() - exact).abs().max().item(),
        "torch_bf16_max_error": (plain.double() - exact).abs().max().item(),
        **rates(milliseconds(lambda: mla_decode_paged(q, cache, table, lens, out=out, backend=backend))),
        "backend": plan.backend, "config": dataclasses.asdict(plan.config),
    }
    if sweep:
        config = explain(mla_decode_paged, q, cache, table, lens, backend="triton").config
        windows, rows = latent_windows(cache, LATENT, ROPE), []
        for BM, BN, warps, stages in TILES:
            splits = {config.num_splits, 1, 2, 64} if B > 1 else {config.num_splits, 32, 64}
            for num_splits in sorted(splits):
                tried = dataclasses.replace(
                    config, BM=BM, BN=BN, num_warps=warps, num_stages=stages, num_splits=num_splits,
                    row_tiles=-(-H // BM), one_page=BM < 64,
                )
                tile = f"{BM}x{BN}-warps{warps}-stages{stages}-splits{num_splits}"
                try:
                    ms = milliseconds(
                        lambda c=tried: launch_decode(
                            q[:, None], *windows, table, lens, scale=SCALE, features=Features(), config=c
                        )
                    )
                    rows.append({"tile": tile, **rates(ms)})
                except Exception as reason:  # a tile that does not fit is a result
                    rows.append({"tile": tile, "failed": str(reason)[:80]})
        result["sweep"] = rows
    return result


def _attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return ((q @ k.T) * SCALE).softmax(-1) @ k[:, :LATENT]


def prefill(B: int, S: int, gemm: float) -> dict[str, Any]:
    """One shape of causal prefill with 128 heads."""
    H, n = 128, B * S
    q, k, v = (torch.randn((n, H, columns), dtype=torch.bfloat16, device="cuda") for columns in (192, 128, 128))
    cache = latent_cache(n, "bf16", torch.Generator("cuda").manual_seed(0))
    table = torch.randperm(len(cache), device="cuda").to(torch.int32).reshape(B, -1)
    lens = torch.full((B,), S, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, n + 1, S, dtype=torch.int32, device="cuda")
    arrays = q, k, v, cache, table, lens, starts, starts
    out = mla_prefill_paged(*arrays, max_seqlen_q=S)
    ms = gpu_record.call_milliseconds(lambda: mla_prefill_paged(*arrays, max_seqlen_q=S, out=out))
    rope = cache[table.long()].reshape(B, S, 1, -1)[..., LATENT:].expand(-1, -1, H, -1)
    dense = [x.reshape(B, S, H, -1).transpose(1, 2) for x in (q, k, v)]
    dense[1] = torch.cat([dense[1], rope.transpose(1, 2)], -1)

    def torch_sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True)

    theirs = gpu_record.call_milliseconds(torch_sdpa)
    difference = (torch_sdpa().transpose(1, 2).reshape(out.shape).float() - out.float()).abs().max().item()
    product = B * H * S * S * (192 + 128)
    return {
        "shape": f"prefill-B{B}-H{H}-S{S}-192/128-causal", "ms": round(ms, 4), "torch_ms": round(theirs, 4),
        "of_torch": round(theirs / ms, 3), "of_gemm": round(product / ms / 1e9 / gemm, 3),
        "difference_to_torch": difference,
        "config": dataclasses.asdict(explain(mla_prefill_paged, *arrays, max_seqlen_q=S).config),
    }


def measurements(sweep: bool, backend: str) -> dict[str, Any]:
    gemm = gemm_rate()
    return {
        "gemm_tflops": round(gemm),
        "decode": [decode(*shape, gemm, sweep, backend) for shape in DECODE],
        "prefill": [prefill(*shape, gemm) for shape in PREFILL],
    }


if __name__ == "__main__":
    gpu_record.run("benchmarks/mla.py", __doc__, measurements, ("auto", "triton"))
