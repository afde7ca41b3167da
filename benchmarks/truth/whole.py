"""Whole kernels: one decode and one prefill of a fixed small problem, for the counters and for the emulator."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvlab.memory import bfloat16

from . import profiler, records

__all__ = ["DECODE", "PREFILL", "decode_inputs", "opcode", "play", "prefill_inputs", "record"]

WAVEFRONTS = "smsp__sass_l1tex_pipe_lsu_wavefronts_mem_shared.sum"
EXECUTED = "smsp__sass_inst_executed.sum"
EACH_WAVEFRONTS, EACH_EXECUTED = "memory_l1_wavefronts_shared", "inst_executed"
SASS_BYTES = 16  # an instruction
COUNTERS = {
    "wavefronts": WAVEFRONTS,
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_read_sectors": "dram__sectors_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_written_sectors": "lts__t_sectors_srcunit_tex_op_write.sum",
    "cp_async_sectors": "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
    "load_sectors": "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared_wavefronts_misc": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_misc.sum",
}

DECODE = {"batch": 2, "q_heads": 16, "kv_heads": 4, "head_dim": 128, "keys": 2048, "page": 64}
PREFILL = {"batch": 1, "tokens": 1024, "q_heads": 8, "kv_heads": 8, "head_dim": 128}


def decode_inputs() -> tuple[Any, ...]:
    """q, k, v, table, lengths of :data:`DECODE`: bfloat16, pages in random order."""
    rng = np.random.default_rng(0)
    B, Hq, Hkv, D, n, page = DECODE.values()
    pages = B * n // page
    q = rng.standard_normal((B, 1, Hq, D), np.float32).astype(bfloat16)
    k, v = (rng.standard_normal((pages, page, Hkv, D), np.float32).astype(bfloat16) for _ in range(2))
    table = rng.permutation(pages).reshape(B, -1).astype(np.int32)
    return q, k, v, table, np.full(B, n, np.int32)


def prefill_inputs() -> tuple[Any, ...]:
    """q, k, v of :data:`PREFILL`: bfloat16."""
    rng = np.random.default_rng(1)
    B, S, Hq, Hkv, D = PREFILL.values()
    return tuple(rng.standard_normal((B, S, heads, D), np.float32).astype(bfloat16) for heads in (Hq, Hkv, Hkv))


def play() -> None:
    """Launch both on the GPU, for the profiler."""
    import torch

    from kvlab.attention import mha_decode_paged, mha_prefill
    from kvlab.cache.arrays import to_torch

    mha_decode_paged(*(to_torch(x).cuda() for x in decode_inputs()), num_splits=1, backend="triton")
    mha_prefill(*(to_torch(x).cuda() for x in prefill_inputs()), causal=True, backend="triton")
    torch.cuda.synchronize()


def record(step: records.Steps) -> dict[str, Any]:
    """Both kernels, of one run under the profiler."""
    found: dict[str, Any] = step("whole", _count)
    return found


def _count() -> dict[str, Any]:
    """Counters of both kernels with cold caches, and every instruction that touches shared memory, in the order of the
    code: its SASS, how often a warp executed it, and its wavefronts in all.
    """
    metrics = [WAVEFRONTS, EXECUTED, *COUNTERS.values()]
    rows = profiler.profile("whole", metrics, "-k", "attend", by_instruction=[EACH_WAVEFRONTS, EACH_EXECUTED])
    out: dict[str, Any] = {}
    for name, problem, row in zip(("decode", "prefill"), (DECODE, PREFILL), rows, strict=True):
        out[name] = {
            "code_bytes": SASS_BYTES * len(row["instructions"][EACH_EXECUTED]),
            "problem": problem, "counters": {key: row[metric] for key, metric in COUNTERS.items()},
            "listing": _listing(row["instructions"]),
        }  # fmt: skip
    return out


def opcode(sass: str) -> str | None:
    """The opcode of what touches shared memory, None of anything else."""
    found = re.match(r"\s*(?:@!?U?P\w+\s+)?((?:LDS|STS|LDSM|STSM|LDGSTS|ATOMS|[HQI]GMMA)[.\w]*)", sass)
    return found[1] if found and "[RZ]" not in sass else None


def _listing(instructions: dict[str, list[tuple[int, str]]]) -> list[tuple[str, int, int]]:
    executed, passes = (
        [(count, " ".join(sass.split())) for count, sass in instructions[metric] if opcode(sass)]
        for metric in (EACH_EXECUTED, EACH_WAVEFRONTS)
    )
    return [(sass, count, taken) for (count, sass), (taken, _) in zip(executed, passes, strict=True)]
