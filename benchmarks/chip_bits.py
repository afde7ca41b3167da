"""Attention on an H100 or H200 beside the emulators with ``arithmetic="chip"``, bit by bit.

``record FOLDER``, on such a GPU: the outputs of the calls below, and of the functions that kernels use. ``compare
FILE``, anywhere: how many bits of each call's output and lse the emulator has otherwise, and where the first does.

The rows of a call see 1 key, 2, 3, ... one tile, several: those of one key show the scores alone (lse is the score),
those of one tile the exponentials, their sum and log2, those of several the rescaling. Outputs are kept in float32
where the kernel stores that, before anything is rounded.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvlab.attention import mha_prefill
from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode import config as decode_config
from kvlab.attention.mha_decode import hopper_config as decode_hopper
from kvlab.attention.mha_prefill import hopper_config as prefill_hopper
from kvlab.attention.mha_prefill.config import choose_config as choose_prefill
from kvlab.common.arrays import to_numpy, to_torch
from kvlab.hardware import arithmetic
from kvlab.memory import as_dtype, bfloat16, float8_e4m3fn

Array = np.ndarray[Any, Any]
HEADS, D, PAGE = (4, 2), 128, 16
LENGTHS = (1, 2, 16, 17, 64, 65, 200, 301)
ROWS = 300  # of a prefill, the first of which sees 1 key


@dataclass(frozen=True)
class Call:
    """A decode of sequences of LENGTHS, or a causal prefill of ROWS tokens; ``wide``: the output is float32."""

    operation: str
    dtype: str
    backend: str
    splits: int = 1
    wide: bool = False

    def __str__(self) -> str:
        words = [self.operation, self.backend, self.dtype]
        return "-".join(words + [f"{self.splits} splits"] * (self.splits > 1) + ["float32"] * self.wide)

    @property
    def keys(self) -> Array:
        """How many keys the rows of lse see."""
        return np.array(LENGTHS)[:, None, None] if self.operation == "decode" else np.arange(1, ROWS + 1)[:, None]

    def arrays(self) -> tuple[Array, ...]:
        """q, k, v; of a decode pages, the table, the lengths."""
        rng = np.random.default_rng(["decode", "prefill"].index(self.operation))
        dtype = float8_e4m3fn if self.dtype == "e4m3" else bfloat16
        if self.operation == "prefill":
            shapes = [(1, ROWS, h, D) for h in (HEADS[0], HEADS[1], HEADS[1])]
            return tuple(rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes)
        columns = -(-max(LENGTHS) // PAGE)
        pages = len(LENGTHS) * columns
        shapes = [(len(LENGTHS), 1, HEADS[0], D), (pages, PAGE, HEADS[1], D), (pages, PAGE, HEADS[1], D)]
        q, k, v = (rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes)
        q = q.astype(bfloat16)  # bfloat16 beside pages of e4m3, too
        table = rng.permutation(pages).reshape(len(LENGTHS), columns).astype(np.int32)
        return q, k, v, table, np.array(LENGTHS, np.int32)

    def launched(self) -> tuple[str, tuple[Array, ...], dict[str, Any]]:
        """The module that launches it, the arrays, and the named arguments: those of an H100, wherever this runs."""
        arrays, hopper = self.arrays(), self.backend == "hopper"
        home = f"kvlab.attention.mha_{self.operation}."
        if self.operation == "decode":
            problem, features = decode_config.problem_of(*arrays[:4]), Features()
            choose: Any = decode_hopper.choose_hopper if hopper else decode_config.choose_config
            config: Any = choose(problem, processors=132, num_splits=self.splits)
            return home, arrays, {"scale": D**-0.5, "config": config, "features": features}
        backend = "hopper" if hopper else "emulator"
        call = mha_prefill.planned(*arrays, causal=True, backend=backend, check=False)
        plan = call.plan
        with mock.patch.object(prefill_hopper, "FEW_KEYS", 0):  # the record is of blocks of 128 keys
            config = (
                prefill_hopper.choose_hopper(plan.problem, call.inputs) if hopper
                else choose_prefill(plan.problem, arch="sm_90")
            )
        named = {"scale": plan.scale, "problem": plan.problem, "config": config, "features": call.features}
        return home, call.arrays, named

    def output(self, arrays: tuple[Array, ...]) -> Array:
        """Where the output goes."""
        return np.zeros((*arrays[0].shape[:3], D), np.float32 if self.wide else bfloat16)

    def on_the_gpu(self) -> tuple[Array, Array]:
        """out and lse of the compiled kernel."""
        import importlib

        home, arrays, named = self.launched()
        kernel = importlib.import_module(home + ("hopper" if self.backend == "hopper" else "kernel"))
        tensors = [to_torch(x).cuda() if isinstance(x, np.ndarray) else x for x in arrays]
        out = to_torch(self.output(arrays)).cuda()
        _, lse = kernel.launch(*tensors, **named, out=out)
        return to_numpy(out.cpu()), to_numpy(lse.cpu())

    def emulated(self, name: str = "chip") -> tuple[Array, Array]:
        """out and lse of the emulator."""
        import importlib

        home, arrays, named = self.launched()
        module = importlib.import_module(home + ("hopper_emulator" if self.backend == "hopper" else "emulator"))
        out = self.output(arrays)
        with arithmetic(name):
            _, lse = module.launch(*arrays, **named, out=out)
        return out, lse

    def digest(self) -> str:
        """Of the inputs."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in self.arrays())).hexdigest()[:16]


CALLS = [
    Call(operation, dtype, backend, splits, wide)
    for operation in ("decode", "prefill")
    for dtype in ("bf16", "e4m3")
    for backend, splits, wide in (("triton", 1, True), ("triton", 1, False), ("triton", 3, False), ("hopper", 1, False))
    if operation == "decode" or splits == 1
]


def numbers() -> dict[str, Array]:
    """Arguments of the functions: all exponents, neighbours of 1, and what a softmax has."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 0x7F800000, 1 << 16, np.int64).astype(np.int32).view(np.float32)
    near = (1 + rng.uniform(-0.3, 0.5, 1 << 16)).astype(np.float32)
    sums = np.exp2(rng.uniform(0, 14, 1 << 16)).astype(np.float32)
    ends = np.array([0, np.inf, 1, 2, 0.5, 1e-40, 1e-38, 3e38, 2.0**-126, 2.0**126, 2.0**127], np.float32)
    x = np.concatenate([bits, near, sums, ends])
    y = np.concatenate([sums, bits, near, ends[::-1]])
    small = rng.uniform(-130, 20, len(x)).astype(np.float32)
    return {"x": x, "y": y, "small": small}


def functions_on_the_gpu() -> dict[str, Array]:
    """What kernels get for :func:`numbers`."""
    import function_kernels
    import torch
    import triton

    given = numbers()
    x, y, small = (torch.from_numpy(given[name]).cuda() for name in ("x", "y", "small"))
    names = ["log2", "log", "lg2_approx", "divide", "inverse", "exp2", "exp", "tanh_approx"]
    results = {name: torch.empty_like(x) for name in names}
    block = 1024
    function_kernels.each[(triton.cdiv(len(x), block),)](x, y, small, *results.values(), len(x), block)
    return {name: found.cpu().numpy() for name, found in results.items()}


def record(folder: Path) -> None:
    """Write ``chip_bits.npz`` and ``chip_functions.npz`` into ``folder``."""
    import json

    from gpu_record import facts

    found: dict[str, Any] = {}
    for call in CALLS:
        try:
            out, lse = call.on_the_gpu()
        except Exception as error:  # the other calls are worth a record without it
            print(call, "FAILED", repr(error)[:600], flush=True)
            continue
        found[f"{call} out"] = out.view(f"u{out.itemsize}")
        found[f"{call} lse"] = lse.view(np.uint32)
        print(call, call.launched()[2]["config"], call.digest(), flush=True)
    about = {"command": "python benchmarks/chip_bits.py record FOLDER", **facts()}
    about["inputs"] = {str(call): call.digest() for call in CALLS}
    about["configs"] = {str(call): repr(call.launched()[2]["config"]) for call in CALLS}
    text = json.dumps(about)
    np.savez_compressed(folder / "chip_bits.npz", about=np.array(text), **found)
    functions: dict[str, Any] = {name: x.view(np.uint32) for name, x in functions_on_the_gpu().items()}
    np.savez_compressed(folder / "chip_functions.npz", about=np.array(text), **functions)
    print(text)


def as_values(bits: Array) -> Array:
    """Recorded bits as the numbers they are."""
    return bits.view(np.float32 if bits.itemsize == 4 else as_dtype("bfloat16"))


def compare(file: Path) -> None:
    """Print, for each recorded call, what differs."""
    with np.load(file) as recorded:
        for call in CALLS:
            if f"{call} out" in recorded:
                print(call, differences(call, recorded[f"{call} out"], recorded[f"{call} lse"]), flush=True)


def differences(call: Call, out: Array, lse: Array, name: str = "chip") -> str:
    """How many bits patterns of lse and out differ from the record, and the fewest keys of a row that has one."""
    words = []
    for what, ours, theirs in zip(("lse", "out"), call.emulated(name)[::-1], (lse, out), strict=True):
        other = ours.view(theirs.dtype) != theirs
        keys = np.broadcast_to(call.keys if what == "lse" else call.keys[..., None], other.shape)
        text = f"{what}: {int(other.sum())} of {other.size}"
        if other.any():
            far = np.abs(ours.astype(np.float64) - as_values(theirs).astype(np.float64)).max()
            text += f" (from {int(keys[other].min())} keys on, up to {far:.2g})"
        words.append(text)
    return ", ".join(words)


if __name__ == "__main__":
    {"record": record, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
