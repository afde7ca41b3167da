"""Whole launches of every kernel in ``kvlab.attention``: its forms on small inputs, in the PTX machine and in an X-ray.

An input is so long that each access to shared memory is made: loops that are pipelined take more trips than stages.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mla_prefill_cases
import numpy as np
import pytest
import torch
from caught import as_tensors
from decode_cases import Case as Decode
from feature_cases import FeatureCase
from four_bit_cases import FourBits
from four_bit_stores import FourBitStore
from listed_cases import Listed
from mla_cases import FULL
from mla_cases import Case as Latent
from mla_prefill_cases import Case as Expanded
from prefill_cases import Case as Prefill
from queried_values import queried
from shared_passes import Copies, copies
from store_cases import Store
from triton.runtime.jit import JITFunction, KernelInterface

from kvlab import attention
from kvlab.attention.call.backends import function_at
from kvlab.simt import KernelRun, run
from kvlab.triton_support.compile import options_of
from kvlab.triton_support.versions import gluon_lacks
from kvlab.xray import XRay, xray

Make = Callable[[str], Callable[[], Any]]
BOTH, HOPPER = ("sm_80", "sm_90"), ("sm_90",)
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Row:
    """A form of kernels. make : the launch of all of its kernels, for a target; kernels : of which folders and files
    these are, joins and lists aside; slow : it takes long."""

    make: Make
    kernels: str
    targets: tuple[str, ...] = BOTH
    slow: bool = False

    @property
    def gluon(self) -> bool:
        """Whether a kernel of it is one for Hopper."""
        return "hopper" in self.kernels


@dataclass
class Launched:
    """A launch of a kernel: where it is from, its run, the copies that it made, and its X-ray."""

    kernel: str
    ran: KernelRun
    copies: Copies
    found: XRay


def name_of(kernel: Any) -> str:
    """``mha_decode.kernel.attend``"""
    return f"{kernel.fn.__module__.removeprefix('kvlab.attention.')}.{kernel.fn.__name__}"


def every_kernel() -> set[str]:
    """The kernels that no other one calls: those that are launched."""
    found: dict[int, Any] = {}
    for module in pkgutil.walk_packages(attention.__path__, "kvlab.attention."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                found[id(value)] = value
    called = {id(one.fn.__globals__.get(name)) for one in found.values() for name in one.fn.__code__.co_names}
    return {name_of(one) for number, one in found.items() if number not in called}


def launched(row: Row, target: str) -> list[Launched]:
    """All launches of a row, one after the other, each run in the PTX machine and X-rayed."""
    if row.gluon and gluon_lacks():
        pytest.skip(f"Hopper's kernels are not used with {gluon_lacks()}")
    done: list[Launched] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
            before = {"launch_before": lambda: None} if arguments.get("launch_pdl") else {}
            with copies() as made:
                ran = run(kernel, grid, target=target, arithmetic="float32", **before, **arguments)
            options = {name: arguments.pop(name) for name in options_of(target) if name in arguments}
            done.append(Launched(name_of(kernel), ran, made, xray(kernel, arguments, target, **options)))

        return launch

    go = row.make(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(int(target[3:]), 10))
        patch.setattr("kvlab.attention.mha_decode.hopper.arrivals", lambda count, _: torch.zeros(count).int())
        patch.setattr("kvlab.attention.mha_prefill.hopper.machine", lambda _: (target, 2))
        go()
    return done


def launch_of(call: Any, *arrays: Any) -> Callable[[], Any]:
    """The launch of the kernels of a call that was planned for the emulator; ``arrays`` in place of its own."""
    path = call.plan.sibling.replace("hopper_emulator", "hopper").replace("emulator", "kernel")
    named = {name: as_tensors(value) for name, value in call.named().items()}
    return functools.partial(function_at(path), *map(as_tensors, arrays or call.arrays), **named)


def planned(operation: Any, *arrays: Any, target: str, backend: str = "emulator", **options: Any) -> Any:
    """The call, planned for a target."""
    emulated = {"arch": target} if backend == "emulator" else {}
    return operation.planned(*arrays, backend=backend, **emulated, **options)


def decode(case: Decode | FeatureCase, operation: str = "mha_decode_paged", **more: Any) -> Make:
    def make(target: str) -> Any:
        x = case.build()
        options = getattr(x, "options", {}) | {"num_splits": case.splits} | more
        if operation == "mha_decode_streaming_paged":  # whose configuration is one for all
            return launch_of(getattr(attention, operation).planned(*x.arrays, backend="emulator", **options))
        return launch_of(planned(getattr(attention, operation), *x.arrays, target=target, **options))
    return make


def streaming(case: Decode | FeatureCase) -> Make:
    return decode(case, "mha_decode_streaming_paged")


def four_bits(kind: str, listed: bool = False) -> Make:
    def make(target: str) -> Any:
        (q, *arrays), options = FourBits(kind, (300, 40)).build()
        if listed:
            starts = np.arange(len(q) + 1, dtype=np.int32)
            return launch_of(planned(attention.attend_paged, q[:, 0], *arrays, starts, target=target, **options))
        return launch_of(planned(attention.mha_decode_paged, q, *arrays, target=target, num_splits=1, **options))
    return make


def prefill(case: Prefill, **backend: str) -> Make:
    return lambda target: launch_of(case.build().plan(**backend or {"backend": "emulator", "arch": target}))


def paged(*lens: tuple[int, int], **sizes: Any) -> Prefill:
    return Prefill(lens, form="paged", **sizes)


def attend(case: Prefill) -> Make:
    def make(target: str) -> Any:
        _, arrays, options = case.build().arguments()
        options = {name: value for name, value in options.items() if value is not None}
        return launch_of(planned(attention.attend_paged, *arrays, target=target, **options))
    return make


def queries_of_v(case: Prefill, D: int) -> Make:
    """A step whose V is the columns of K behind ``D``."""
    def make(target: str) -> Any:
        arrays, qv = queried(case.build(), D)
        return launch_of(planned(attention.attend_paged, *arrays, target=target, qv=qv))
    return make


def latent(case: Latent, **more: Any) -> Make:
    def make(target: str) -> Any:
        x = case.build()
        options = x.options | {"num_splits": case.splits} | more
        return launch_of(planned(attention.mla_decode_paged, *x.arrays, target=target, **options))
    return make


def slots(case: Latent, topk: int, **more: Any) -> Make:
    def make(target: str) -> Any:
        listed = Listed(case, topk)
        x, options = listed.x, {"indices": listed.indices, "num_splits": case.splits} | more
        call = planned(attention.mla_decode_paged, listed.q, x.kv, target=target, **x.options, **options)
        q, kv, *rest = call.arrays
        whole = x.rows if more else kv  # Hopper's finds the rope columns of a row behind its latents
        return launch_of(call, q, whole, *rest)
    return make


def expanded(case: Expanded, plan: bool = False) -> Make:
    def make(target: str) -> Any:
        x, calls = case.build(), []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mla_prefill_paged", "mla_prefill_ragged"):
                operation = getattr(attention, name)
                patch.setattr(mla_prefill_cases, name, lambda *a, op=operation, **o: calls.append(op.planned(*a, **o)))
            given: dict[str, Any] = {}
            if plan:
                nope, rope, value = case.columns
                given["plan"] = attention.plan(
                    x.seq_lens, (x.cu_q, len(x.q)), q_heads=case.H, kv_heads=case.H, head_dim=(max(nope, value), rope),
                    programs=3 * case.H)
            x.call(backend="emulator", arch=target, **given)
        return launch_of(*calls)
    return make


def store(case: Store | FourBitStore) -> Make:
    def make(target: str) -> Any:
        x: Any = case.build()
        arrays, more = x if isinstance(x, tuple) else ((x.k, x.v, x.k_cache, x.v_cache, x.slots), x.more)
        return launch_of(attention.kv_store_paged.planned(*arrays, backend="emulator", **more))
    return make


def merged(parts: int, D: int, dtype: Any = np.float32) -> Make:
    def make(target: str) -> Any:
        outs = np.random.default_rng(0).standard_normal((parts, 2, 3, 4, D)).astype(dtype)
        return launch_of(attention.merge_states.planned(outs, np.zeros(outs.shape[:-1], "f4"), backend="emulator"))
    return make


def converted(one: str, other: str, in_place: bool = False, **sizes: int) -> Make:
    def make(target: str) -> Any:
        from kvlab.attention.strided_copy import kernel
        from kvlab.attention.strided_copy.config import choose_tile, unit_of
        from kvlab.formats import convert, known_format

        plan = convert(known_format(one, **sizes), known_format(other, **sizes))
        nbytes = [plan.source.nbytes, plan.target.nbytes]
        source, target_ = (np.zeros(n, np.uint8) for n in nbytes)

        def go() -> None:
            for strided in plan.strided:
                config = choose_tile(strided, unit_of(strided, 8, nbytes), 8, **{"in_place": True} if in_place else {})
                assert config is not None
                ends = (as_tensors(x.view(f"i{config.unit}")) for x in (source, source if in_place else target_))
                kernel.launch(*ends, config=config, table=as_tensors(config.table))
        return go
    return make


LISTS = "schedule.kernel.work_list attend_paged.kernel.join"
WALK = f"attend_paged.kernel.walk {LISTS}"
LATENT_WALK = f"attend_paged.latent.kernel.walk {LISTS}"
DECODE, PREFILL = "mha_decode.kernel.attend", "mha_prefill.kernel.attend"
STREAMING, STORE = "mha_decode_streaming.kernel.attend", "kv_store.kernel.append"
MLA, EXPANDED = "mla_decode.kernel.attend", "mla_prefill.kernel.attend"
MERGE, MOVE = "merge_states.kernel.merge", "strided_copy.kernel.move"
HOPPERS = {name: f"{name}.hopper.attend" for name in ("mha_decode", "mha_prefill", "mla_decode")}
BY_HOPPER = {"backend": "hopper"}
STEP = (70, 300), (2, 20), (0, 17), (1, 600)
SIZES = {"pages": 2, "heads": 2, "dim": 64}
PAIR = (300, 300), (40, 430)

ROWS: dict[str, Row] = {
    "decode": Row(decode(Decode((600, 3), heads=(8, 2), D=128, splits=2)), f"{DECODE} {MERGE}"),
    "decode of float32": Row(decode(Decode((600, 3), dtype="fp32", splits=1)), DECODE, slow=True),
    "decode with features": Row(
        decode(FeatureCase((500, 17), mask="bias", softcap=3.0, sinks=True, alibi="head", S=3, splits=1)), DECODE,
        slow=True),
    "decode of e4m3, scales of tokens": Row(
        decode(FeatureCase((900, 3), D=128, kv=FP8, scales="token", sinks=True, splits=1)), DECODE, HOPPER),
    "decode all of e4m3": Row(
        decode(FeatureCase((900, 3), D=256, kv=FP8, scales="head", dtype=FP8, S=2, splits=1)), DECODE, HOPPER,
        slow=True),
    "decode, deep": Row(decode(FeatureCase((300, 3), D=576, Dv=512, splits=1)), DECODE, slow=True),
    "decode of NVFP4, scales in fours": Row(four_bits("words"), DECODE),
    "decode over minima": Row(four_bits("halves"), DECODE, slow=True),
    "decode of Hopper": Row(
        decode(FeatureCase((150, 0, 17), heads=(6, 3), D=128, kv="fp8", scales="head", splits=2), **BY_HOPPER),
        HOPPERS["mha_decode"], HOPPER, slow=True),
    "streaming": Row(streaming(Decode((500, 3), D=128, splits=1)), STREAMING, slow=True),
    "streaming with features": Row(
        streaming(FeatureCase((500, 17), mask="bias", softcap=3.0, sinks=True, alibi="head", S=3, splits=2)),
        f"{STREAMING} {MERGE}", slow=True),
    "streaming of e4m3": Row(
        streaming(FeatureCase((500, 3), D=128, kv=FP8, dtype=FP8, scales="head", splits=1)), STREAMING, HOPPER),
    "prefill over pages": Row(prefill(paged(*PAIR, D=128)), PREFILL, slow=True),
    "prefill, ragged": Row(
        prefill(Prefill(PAIR, form="ragged", softcap=15.0, sinks=True)), PREFILL, slow=True),
    "prefill, masked": Row(prefill(Prefill(((70, 300),), mask="striped", alibi="sequence")), PREFILL, slow=True),
    "prefill, windowed": Row(prefill(Prefill(((70, 300),), window=140, temperature=True)), PREFILL),
    "prefill, wide": Row(prefill(Prefill(((70, 300),), D=192, DV=128)), PREFILL, slow=True),
    "prefill of e4m3": Row(prefill(paged(*PAIR, D=128, dtype="fp8", scales="head")), PREFILL, HOPPER, slow=True),
    "prefill over e4m3": Row(prefill(paged(*PAIR, D=128, kv="fp8", scales="token")), PREFILL, HOPPER, slow=True),
    "prefill of Hopper": Row(
        prefill(Prefill(((300, 300),), heads=(2, 1), D=128), **BY_HOPPER), HOPPERS["mha_prefill"], HOPPER, slow=True),
    "prefill of Hopper, 80 columns": Row(
        prefill(Prefill(((300, 300),), heads=(2, 1), D=80), **BY_HOPPER), HOPPERS["mha_prefill"], HOPPER, slow=True),
    "prefill of Hopper over pages, capped": Row(
        prefill(paged((400, 500), (3, 90), heads=(4, 2), D=128, page=16, softcap=20.0), **BY_HOPPER),
        HOPPERS["mha_prefill"], HOPPER, slow=True),
    "prefill of Hopper over e4m3": Row(
        prefill(paged((150, 300), (3, 90), heads=(6, 2), D=128, page=16, kv="fp8", scales="head"), **BY_HOPPER),
        HOPPERS["mha_prefill"], HOPPER, slow=True),
    "prefill of Hopper, e4m3": Row(
        prefill(Prefill(((300, 300),), heads=(2, 1), D=128, dtype="fp8", scales="head"), **BY_HOPPER),
        HOPPERS["mha_prefill"], HOPPER, slow=True),
    "MLA decode": Row(latent(Latent((300, 3), H=16, columns=FULL, splits=1)), MLA, slow=True),
    "MLA decode of e4m3": Row(
        latent(Latent((300, 70), H=3, row="rope-aware", k_scale="token", dtype="fp16", splits=1)), MLA, HOPPER),
    "MLA decode of scaled rows": Row(
        latent(Latent((300, 70), H=3, row="scaled", columns=FULL, sinks=True, splits=1)), MLA, HOPPER, slow=True),
    "sparse MLA": Row(slots(Latent((90, 70, 40), H=5, page=5, splits=2), 150), f"{MLA} {MERGE}", slow=True),
    "MLA decode of Hopper": Row(
        latent(Latent((193, 2, 63), H=5, columns=FULL, splits=2, dtype="fp16"), **BY_HOPPER),
        f"{HOPPERS['mla_decode']} {MERGE}", HOPPER, slow=True),
    "sparse MLA of Hopper": Row(
        slots(Latent((90, 70, 40), H=5, columns=FULL, page=5, splits=1), 150, **BY_HOPPER), HOPPERS["mla_decode"],
        HOPPER, slow=True),
    "MLA decode over a list": Row(
        latent(Latent((300, 3, 65), H=16, columns=FULL), balanced=True), LATENT_WALK, slow=True),
    "sparse MLA of Hopper, rows of 656 bytes": Row(
        slots(Latent((90, 70, 40), H=5, row="scaled", columns=FULL, page=5, splits=1), 150, **BY_HOPPER),
        HOPPERS["mla_decode"], HOPPER, slow=True),
    "MLA prefill": Row(expanded(Expanded(PAIR)), EXPANDED, slow=True),
    "MLA prefill of float16 over e4m3": Row(
        expanded(Expanded(PAIR, dtype="fp16", kv="fp8", scales="head", row="")), EXPANDED, HOPPER, slow=True),
    "MLA prefill of e4m3": Row(
        expanded(Expanded(PAIR, dtype="fp8", row="fp8", scales="number")), EXPANDED, HOPPER, slow=True),
    "MLA prefill over a list": Row(
        expanded(Expanded(PAIR), plan=True), "attend_paged.expanded.kernel.walk attend_paged.kernel.join", HOPPER,
        slow=True),
    "a step": Row(attend(paged(*STEP, heads=(8, 2), D=128)), WALK, slow=True),
    "a step over e4m3": Row(attend(paged(*STEP, heads=(8, 2), D=128, kv="fp8", scales="head")), WALK, HOPPER,
                              slow=True),
    "a step with features": Row(
        attend(paged(*STEP, heads=(8, 2), softcap=2.0, sinks=True, window=300)), WALK, slow=True),
    "a step with queries of V": Row(
        queries_of_v(paged((1, 300), (3, 290), heads=(16, 1), D=576, DV=512), 64), WALK, HOPPER, slow=True),
    "a step over NVFP4": Row(four_bits("e2m1", listed=True), WALK, slow=True),
    "decode of Hopper over a list": Row(
        decode(Decode((300, 3, 65), heads=(8, 2), D=128), balanced=True, **BY_HOPPER),
        f"attend_paged.hopper.walk {LISTS}", HOPPER, slow=True),
    "store": Row(store(Store(tokens=40, rope=64)), STORE),
    "store of e4m3": Row(store(Store(cache="fp8", scale="own", granularity=32, D=(128, 64))), STORE, HOPPER),
    "store of NVFP4": Row(store(FourBitStore("words", (128, 64))), STORE, slow=True),
    "store over minima": Row(store(FourBitStore("uint4")), STORE, slow=True),
    "merge": Row(merged(40, 64, np.float16), MERGE),
    "conversion": Row(converted("vllm.x_split", "flash_attention.paged", **SIZES), MOVE),
    "conversion in place": Row(converted("vllm.blocks_first", "vllm.hnd", in_place=True, **SIZES), MOVE),
    "conversion over a table": Row(converted("mla.584", "mla.584", pages=3, page_size=8), MOVE),
}
