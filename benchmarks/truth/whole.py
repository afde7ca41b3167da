"""Whole kernels: the attention kernels on small problems, for the counters and for the emulator."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from kvlab import attention
from kvlab.attention.call import kinds
from kvlab.attention.mha_prefill import hopper_config
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.staging import Traffic

from . import profiler, records

__all__ = ["BACKENDS", "COUNTERS", "KERNELS", "Kernel", "listing", "opcode", "play", "record"]

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
    "gmma_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_gmma.sum",
    "shared_wavefronts_loads": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_wavefronts_stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1_read_sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",
    "tma_read_sectors": "l1tex__m_xbar2l1tex_read_sectors_pipe_tma.sum",
    "coalesced_sectors": "lrc__request_sectors_op_read_coalescing_achieved_type_hardware.sum",
    "l1_written_sectors": "l1tex__m_l1tex2xbar_write_sectors.sum",
    "tma_written_sectors": "l1tex__m_l1tex2xbar_write_sectors_pipe_tma.sum",
    "bank_writes": "l1tex__data_bank_writes.sum",
    "bank_reads": "l1tex__data_bank_reads.sum",
}

DECODE = {"batch": 2, "q_heads": 16, "kv_heads": 4, "head_dim": 128, "keys": 2048, "page": 64}
PREFILL = {"batch": 1, "tokens": 1024, "q_heads": 8, "kv_heads": 8, "head_dim": 128}
PREFILL_HOPPER = {**PREFILL, "tokens": 512}
MLA = {"batch": 2, "q_heads": 128, "latent": 512, "rope": 64, "keys": 1024, "page": 64}
MLA_16 = {**MLA, "q_heads": 16, "page": 16}


def decode_inputs() -> tuple[Any, ...]:
    """q, k, v, table, lengths of :data:`DECODE`: bfloat16, pages in random order."""
    rng = np.random.default_rng(0)
    B, Hq, Hkv, D, n, page = DECODE.values()
    pages = B * n // page
    q = rng.standard_normal((B, 1, Hq, D), np.float32).astype(bfloat16)
    k, v = (rng.standard_normal((pages, page, Hkv, D), np.float32).astype(bfloat16) for _ in range(2))
    table = rng.permutation(pages).reshape(B, -1).astype(np.int32)
    return q, k, v, table, np.full(B, n, np.int32)


def fp8_inputs() -> tuple[Any, ...]:
    """Those of :func:`decode_inputs`, k and v e4m3."""
    q, k, v, *rest = decode_inputs()
    return q, k.astype(float8_e4m3fn), v.astype(float8_e4m3fn), *rest


def prefill_inputs(problem: dict[str, int] = PREFILL) -> tuple[Any, ...]:
    """q, k, v: bfloat16."""
    rng = np.random.default_rng(1)
    B, S, Hq, Hkv, D = problem.values()
    return tuple(rng.standard_normal((B, S, heads, D), np.float32).astype(bfloat16) for heads in (Hq, Hkv, Hkv))


def mla_inputs(problem: dict[str, int]) -> tuple[Any, ...]:
    """q, latent rows, table, lengths: bfloat16, pages in random order."""
    rng = np.random.default_rng(2)
    B, H, latent, rope, n, page = problem.values()
    pages = B * n // page
    q = rng.standard_normal((B, 1, H, latent + rope), np.float32).astype(bfloat16)
    rows = rng.standard_normal((pages, page, latent + rope), np.float32).astype(bfloat16)
    return q, rows, rng.permutation(pages).reshape(B, -1).astype(np.int32), np.full(B, n, np.int32)


@contextmanager
def recorded_blocks() -> Iterator[None]:
    """Blocks of 128 keys, of which the record is, in prefills that have blocks of 64."""
    with mock.patch.object(hopper_config, "FEW_KEYS", 0), mock.patch.object(kinds, "_kinds", {}):
        yield


@dataclass(frozen=True)
class Kernel:
    """A call of an operation on a fixed problem, by the kernel of ``backend``: "triton" or "hopper"."""

    problem: dict[str, int]
    inputs: Callable[[], tuple[Any, ...]]
    operation: str
    options: dict[str, Any] = field(default_factory=dict)
    backend: str = "triton"

    def launch(self) -> None:
        """On the GPU."""
        from kvlab.common.arrays import to_torch

        operation = getattr(attention, self.operation)
        with recorded_blocks():
            operation(*(to_torch(x).cuda() for x in self.inputs()), **self.options, backend=self.backend)

    def emulate(self, traffic: Traffic) -> None:
        """By the kernel's twin, which counts what it moves."""
        backend = "emulator" if self.backend == "triton" else self.backend  # NumPy arrays go to its emulator
        with recorded_blocks():
            getattr(attention, self.operation)(*self.inputs(), **self.options, backend=backend, traffic=traffic)


ONE_SPLIT = {"num_splits": 1}
KERNELS = {
    "decode": Kernel(DECODE, decode_inputs, "mha_decode_paged", ONE_SPLIT),
    "prefill": Kernel(PREFILL, prefill_inputs, "mha_prefill", {"causal": True}),
    "decode fp8": Kernel(DECODE, fp8_inputs, "mha_decode_paged", ONE_SPLIT),
    "decode streaming": Kernel(DECODE, decode_inputs, "mha_decode_streaming_paged", ONE_SPLIT),
    "mla decode": Kernel(MLA, functools.partial(mla_inputs, MLA), "mla_decode_paged", ONE_SPLIT),
    "mla decode, 16 heads": Kernel(MLA_16, functools.partial(mla_inputs, MLA_16), "mla_decode_paged", ONE_SPLIT),
    "prefill hopper": Kernel(
        PREFILL_HOPPER, functools.partial(prefill_inputs, PREFILL_HOPPER), "mha_prefill", {"causal": True}, "hopper"
    ),
    "mla decode hopper": Kernel(MLA, functools.partial(mla_inputs, MLA), "mla_decode_paged", ONE_SPLIT, "hopper"),
    "decode hopper": Kernel(DECODE, decode_inputs, "mha_decode_paged", ONE_SPLIT, "hopper"),
}
BACKENDS = ("triton", "hopper")


def play(backend: str) -> None:
    """Launch the kernels of a backend, for the profiler."""
    import torch

    for kernel in KERNELS.values():
        if kernel.backend == backend:
            kernel.launch()
    torch.cuda.synchronize()


def record(step: records.Steps) -> dict[str, Any]:
    """All kernels; those of a backend in one run under the profiler."""
    found = {backend: step(backend, functools.partial(_count, backend)) for backend in BACKENDS}
    return {name: found[kernel.backend][name] for name, kernel in KERNELS.items()}


def _count(backend: str) -> dict[str, Any]:
    """Counters of each kernel with cold caches, and every instruction that touches shared memory, in the order of the
    code: its SASS, how often a warp executed it, and its wavefronts in all.
    """
    metrics = [WAVEFRONTS, EXECUTED, *COUNTERS.values()]
    rows = profiler.profile(backend, metrics, "-k", "attend", by_instruction=[EACH_WAVEFRONTS, EACH_EXECUTED])
    names = [name for name, kernel in KERNELS.items() if kernel.backend == backend]
    return {
        name: {
            "code_bytes": SASS_BYTES * len(row["instructions"][EACH_EXECUTED]),
            "problem": KERNELS[name].problem, "counters": {key: row[metric] for key, metric in COUNTERS.items()},
            "listing": listing(row["instructions"]),
        }
        for name, row in zip(names, rows, strict=True)
    }


def opcode(sass: str) -> str | None:
    """The opcode of what touches shared memory (a copy by TMA among it), None of anything else."""
    found = re.match(r"\s*(?:@!?U?P\w+\s+)?((?:LDS|STS|LDSM|STSM|LDGSTS|ATOMS|[HQI]GMMA|UTMALDG|UTMASTG)[.\w]*)", sass)
    return found[1] if found and "[RZ]" not in sass else None


def listing(instructions: dict[str, list[tuple[int, int, str]]]) -> list[tuple[str, int, int]]:
    """SASS, executed, wavefronts of each instruction with an :func:`opcode`, and of any other that takes wavefronts."""
    passes = {place: taken for place, taken, _ in instructions[EACH_WAVEFRONTS]}
    executed = [(" ".join(sass.split()), count, passes.get(at, 0)) for at, count, sass in instructions[EACH_EXECUTED]]
    return [one for one in executed if opcode(one[0]) or one[2]]
