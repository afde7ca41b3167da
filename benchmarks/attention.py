"""Every attention operation beside PyTorch's scaled_dot_product_attention, on the GPU or, without one, on the CPU.

    python benchmarks/attention.py [--output benchmarks/results/attention_h100.json]

Prints one JSON line an operation. On a GPU ``of_torch`` is how often as fast as PyTorch the kernel is (medians of one
run; PyTorch gets contiguous K and V, repeated for its heads beforehand), ``difference`` the largest one from PyTorch's
output, and ``host_ms`` what a call takes on the host, of PyTorch and of each backend. Without a GPU the kernel is
interpreted, which says nothing of its speed; then ``error`` is the largest difference from the float64 reference on the
same numbers, ``emulator_error`` and ``torch_error`` likewise, and ``emulator_of_interpreter`` how often as fast as the
interpreted kernel the emulator is.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_record
import numpy as np
import torch
import triton

from kvlab import attention
from kvlab.attention import explain, merge_states
from kvlab.common.arrays import to_numpy, to_torch

GPU = torch.cuda.is_available()
PAGE = 16
Case = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[], Any]]


def random(rng: np.random.Generator, *shape: int) -> Any:
    """bfloat16 numbers on the device that is measured."""
    tensor = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(torch.bfloat16)
    return tensor.cuda() if GPU else tensor


def integers(values: Any) -> Any:
    tensor = torch.as_tensor(np.asarray(values, np.int32))
    return tensor.cuda() if GPU else tensor


def sdpa(q: Any, k: Any, v: Any, **options: Any) -> Callable[[], Any]:
    """PyTorch on q ``[B, S, Hq, D]`` and k, v ``[B, n, Hkv, D]``, their heads repeated; out as q."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def pages(rng: np.random.Generator, rows: Any) -> tuple[Any, Any]:
    """``[B, n, ..]`` cut into pages dealt at random, and their table."""
    batch, n = rows.shape[:2]
    table = rng.permutation(batch * n // PAGE).reshape(batch, -1).astype(np.int32)
    pool = torch.empty((batch * n // PAGE, PAGE, *rows.shape[2:]), dtype=rows.dtype, device=rows.device)
    pool[torch.as_tensor(table.reshape(-1), device=rows.device).long()] = rows.reshape(-1, PAGE, *rows.shape[2:])
    return pool, integers(table)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """(name, operation, its arguments, its options, PyTorch's way): small on a CPU."""
    B, n, Hq, Hkv, D = (16, 4096, 32, 8, 128) if GPU else (2, 256, 4, 2, 64)
    q, k, v = random(rng, B, n, Hq, D), random(rng, B, n, Hkv, D), random(rng, B, n, Hkv, D)
    lens = integers([n] * B)
    yield "mha_prefill", attention.mha_prefill, (q, k, v), {}, sdpa(q, k, v, is_causal=True)
    new = random(rng, B, 1, Hq, D)
    k_pages, table = pages(rng, k)
    v_pages = torch.empty_like(k_pages)
    v_pages[table.reshape(-1).long()] = v.reshape(-1, PAGE, Hkv, D)
    for name in ("mha_decode_paged", "mha_decode_streaming_paged"):
        yield name, getattr(attention, name), (new, k_pages, v_pages, table, lens), {}, sdpa(new, k, v)
    del q, k, v

    H = 16 if GPU else 2
    rows = random(rng, B, n, 576)
    latents, table = pages(rng, rows)
    q = random(rng, B, 1, H, 576)
    options = {"scale": 192**-0.5}
    plain = sdpa(q, rows[:, :, None], rows[:, :, None, :512], scale=192**-0.5)
    yield "mla_decode_paged", attention.mla_decode_paged, (q, latents, table, lens), options, plain

    q = random(rng, B * n, H, 192)
    k, v = random(rng, B * n, H, 128), random(rng, B * n, H, 128)
    starts = integers(np.arange(B + 1) * n)
    whole = torch.cat([k.reshape(B, n, H, 128), rows[:, :, None, 512:].expand(B, n, H, 64)], dim=-1)
    plain = sdpa(q.reshape(B, n, H, 192), whole, v.reshape(B, n, H, 128), is_causal=True)
    arguments = q, k, v, latents, table, lens, starts, starts
    yield "mla_prefill_paged", attention.mla_prefill_paged, arguments, {}, plain


def seconds(run: Callable[[], Any]) -> float:
    """Median time of a call: of many on a GPU, of three after one to warm up on a CPU."""
    if GPU:
        return gpu_record.call_milliseconds(run) / 1e3
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def error(out: Any, exact: Any) -> float:
    out, exact = (to_numpy(x.cpu()).astype(np.float64).reshape(-1) for x in (out, exact))
    return float(np.abs(out - exact).max())


def measure(name: str, operation: Any, arguments: Any, options: Any, plain: Callable[[], Any]) -> dict[str, Any]:
    """The line of one operation."""
    out = operation(*arguments, **options)
    line: dict[str, Any] = {"operation": name, "shapes": [list(a.shape) for a in arguments]}
    if GPU:
        ours, torchs = seconds(lambda: operation(*arguments, **options)), seconds(plain)
        line |= {"difference": error(out, plain()), "ms": ours * 1e3, "of_torch": torchs / ours}
        return line | {"host_ms": on_host(operation, arguments, options, plain)}
    wide = [a.float() if a.is_floating_point() else a for a in arguments]
    exact = operation(*wide, **options, backend="reference")
    arrays = [to_numpy(a) for a in arguments]
    emulated = operation(*arrays, **options, backend="emulator")
    line |= {"error": error(out, exact), "emulator_error": error(to_torch(emulated), exact)}
    line["torch_error"] = error(plain(), exact)
    interpreter = seconds(lambda: operation(*arguments, **options))
    emulator = seconds(lambda: operation(*arrays, **options, backend="emulator"))
    return line | {"emulator_of_interpreter": interpreter / emulator}


def on_host(operation: Any, arguments: Any, options: Any, plain: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the host that a call takes, of each backend that takes it."""
    took = {"torch": gpu_record.host_milliseconds(plain)}
    for backend in ("triton", "hopper"):
        try:
            explain(operation, *arguments, **options, backend=backend)
        except ValueError:  # there is no such kernel, or not for this call
            continue
        call = functools.partial(operation, *arguments, **options, backend=backend)
        call()
        took[backend] = gpu_record.host_milliseconds(call)
    return took


def storing(rng: np.random.Generator) -> dict[str, Any]:
    """What stores take on the host, beside PyTorch's ``index_put_`` of K and V."""
    T, H, D = 64, 8, 128
    k, v, cache = random(rng, T, H, D), random(rng, T, H, D), random(rng, 2, 64, PAGE, H, D)
    slots = integers(rng.permutation(64 * PAGE)[:T]).long()
    flat = cache.view(2, 64 * PAGE, H, D)

    def plain() -> None:
        flat[0][slots], flat[1][slots] = k, v

    arguments = k, v, cache[0], cache[1], slots
    attention.kv_store_paged(*arguments)
    written = flat[:, slots]
    flat.zero_()
    plain()
    line: dict[str, Any] = {"operation": "kv_store_paged", "shapes": [list(a.shape) for a in arguments]}
    line["difference"] = error(written, flat[:, slots])
    return line | ({"host_ms": on_host(attention.kv_store_paged, arguments, {}, plain)} if GPU else {})


def merging(rng: np.random.Generator) -> dict[str, Any]:
    """``merge_states`` beside the same sums in PyTorch."""
    rows, D = (64 * 32, 128) if GPU else (64, 64)
    parts = torch.from_numpy(rng.standard_normal((8, rows, 1, D), dtype=np.float32))
    lse = torch.from_numpy(rng.standard_normal((8, rows, 1), dtype=np.float32))
    parts, lse = (x.cuda() if GPU else x for x in (parts, lse))

    def plain() -> Any:
        return (torch.softmax(lse, 0)[..., None] * parts).sum(0)

    line = {"operation": "merge_states", "shapes": [list(parts.shape), list(lse.shape)]}
    line["difference"] = error(merge_states(parts, lse)[0], plain())
    if GPU:
        line["of_torch"] = seconds(plain) / seconds(lambda: merge_states(parts, lse))
        line["host_ms"] = on_host(merge_states, (parts, lse), {}, plain)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the record goes")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    lines = []
    for case in cases(rng):
        lines.append(measure(*case))
        print(json.dumps(lines[-1]), flush=True)
    for more in (merging, storing):
        lines.append(more(rng))
        print(json.dumps(lines[-1]), flush=True)
    if options.output:
        here = {"machine": platform.machine(), "torch": torch.__version__, "triton": triton.__version__}
        head = gpu_record.facts() if GPU else here
        record = {"command": "python benchmarks/attention.py", **head, "operations": lines}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
