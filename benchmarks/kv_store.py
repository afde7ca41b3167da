"""KV store on a GPU: correctness and bandwidth, recorded as JSON.

    python benchmarks/kv_store.py --output benchmarks/results/kv_store.json

K and V of T tokens of 8 heads of 128, bfloat16, to shuffled slots of pages of 16, as they are and as float8_e4m3fn; K
rotated; scales computed for each head and token. Results are compared with the emulator's, byte for byte. Times are
medians of CUDA-graph replays over inputs and caches that rotate, so that the L2 cache does not hold them (64 tokens:
it does, that is launch latency). GB/s counts every byte once: k, v, what is written, the slots, the angles of each
token (no two share a position). `copy_gbps` is what a plain copy of as many bytes reaches in the same run: quote the
ratio. `--sweep` times other tile sizes as well. `index_copy` is torch's own way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gpu_record
import torch

from kvlab.attention import Rope, explain, kv_store_paged
from kvlab.attention.kv_store.config import CosSin, StoreTables
from kvlab.attention.kv_store.kernel import launch

HEADS, D, PAGE = 8, 128, 16
L2_BYTES = 50 << 20
CHECKED = 4096
"""Tokens whose bytes are compared: the emulator takes a second for as many."""


@dataclasses.dataclass
class Call:
    """One store: its tensors, and what it moves."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    more: dict[str, Any]

    @property
    def positional(self) -> tuple[torch.Tensor, ...]:
        return self.k, self.v, self.k_cache, self.v_cache, self.slots

    @property
    def moved(self) -> int:
        """Bytes read and written once."""
        stored = self.k_cache.element_size() + self.k.element_size()
        own = getattr(self.more.get("k_scale"), "ndim", 0) == 4
        scales = 2 * 4 * len(self.k) * HEADS if own else 0
        angles = len(self.k) * (2 * 4 * D // 2 + 8) if "rope" in self.more else 0  # cos, sin, the position
        return 2 * self.k.numel() * stored + 8 * len(self.slots) + scales + angles

    def cpu(self) -> Call:
        def move(x: Any) -> Any:
            if isinstance(x, Rope):
                return Rope(x.cos.cpu(), x.sin.cpu(), x.interleaved)
            return x.cpu() if isinstance(x, torch.Tensor) else x

        return Call(*map(move, self.positional), {name: move(x) for name, x in self.more.items()})


def make(tokens: int, kind: str, seed: int) -> Call:
    """Random K and V, slots of a shuffled pool twice as large as needed."""
    g = torch.Generator("cuda").manual_seed(seed)
    pages = 2 * -(-tokens // PAGE)
    dtype = torch.float8_e4m3fn if kind.startswith("fp8") else torch.bfloat16
    k, v = torch.randn(2, tokens, HEADS, D, generator=g, device="cuda").bfloat16()
    cache = torch.zeros(2, pages, PAGE, HEADS, D, device="cuda").to(dtype)
    order = torch.randperm(pages, generator=g, device="cuda")
    token = torch.arange(tokens, device="cuda")
    more: dict[str, Any] = {}
    if kind == "fp8":
        more = {"k_scale": torch.ones(1, device="cuda"), "v_scale": torch.ones(1, device="cuda")}
    elif kind == "fp8-own":
        more = {name: torch.zeros(pages, PAGE, HEADS, 1, device="cuda") for name in ("k_scale", "v_scale")}
    elif kind.startswith("rope"):
        angle = torch.arange(8192, device="cuda")[:, None] * 1e4 ** (-torch.arange(0, D, 2, device="cuda") / D)
        more = {"rope": Rope(angle.cos(), angle.sin(), kind == "rope-interleaved"), "positions": token}
    return Call(k, v, cache[0], cache[1], order[token // PAGE] * PAGE + token % PAGE, more)


def milliseconds(runs: list[Callable[[], None]]) -> float:
    """Of one of ``runs``, which take turns inside one captured graph."""
    for run in runs:
        run()
    rounds = max(1, 200 // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / (rounds * len(runs)))
    return sorted(times)[len(times) // 2]


def wrong_bytes(call: Call) -> int:
    """Bytes of the caches and scales that differ from what the emulator stores; where there are more than CHECKED
    tokens, of the slots of the first of them."""
    here = call.cpu()
    if cut := len(here.k) > CHECKED:
        here.k, here.v, here.slots = here.k[:CHECKED], here.v[:CHECKED], here.slots[:CHECKED]
    kv_store_paged(*call.positional, **call.more)
    kv_store_paged(*here.positional, **here.more, backend="emulator")
    pairs = [(call.k_cache, here.k_cache), (call.v_cache, here.v_cache)]
    if call.more.get("k_scale") is not None and call.more["k_scale"].ndim == 4:
        pairs += [(call.more[name], here.more[name]) for name in ("k_scale", "v_scale")]
    found = 0
    for one, other in pairs:
        a, b = (x.cpu().view(torch.uint8).flatten(0, 1) for x in (one, other))
        a, b = (a[here.slots], b[here.slots]) if cut else (a, b)
        found += int((a != b).sum())
    return found


def measure(tokens: int, kind: str, sweep: bool) -> dict[str, Any]:
    first = make(tokens, kind, 0)
    copies = 1 if tokens <= 64 else 1 + 2 * L2_BYTES // first.moved
    calls = [first, *(make(tokens, kind, seed) for seed in range(1, copies))]
    wrong = wrong_bytes(first)
    ms = milliseconds([lambda c=c: kv_store_paged(*c.positional, **c.more) for c in calls])
    half = first.moved // 2
    buffers = [torch.zeros(2, half, dtype=torch.uint8, device="cuda") for _ in calls]
    copy = milliseconds([lambda b=b: b[0].copy_(b[1]) for b in buffers])
    config = explain(kv_store_paged, *first.positional, **first.more).config
    result = {
        "shape": f"T{tokens}-H{HEADS}-D{D}-page{PAGE}-{kind}", "wrong_bytes": wrong, "us": round(ms * 1e3, 3),
        "gbps": first.moved / ms / 1e6, "copy_us": round(copy * 1e3, 3), "copy_gbps": first.moved / copy / 1e6,
        "of_copy": copy / ms, "config": dataclasses.asdict(config),
    }
    if kind == "copy":
        flat = [[x.flatten(0, 1) for x in (c.k_cache, c.v_cache)] for c in calls]
        result["index_copy_us"] = 1e3 * milliseconds(
            [lambda c=c, f=f: (f[0].index_copy_(0, c.slots, c.k), f[1].index_copy_(0, c.slots, c.v)) for c, f in
             zip(calls, flat, strict=True)]
        )
    if sweep:
        result["sweep"] = _sweep(calls)
    return result


def _sweep(calls: list[Call]) -> list[dict[str, Any]]:
    rows = []
    for elements in (512, 1024, 2048, 4096, 8192):
        for warps in (1, 2, 4, 8):
            runs = []
            for call in calls:
                planned = kv_store_paged.planned(*call.positional, **call.more)
                x, chosen = planned.inputs, planned.plan.explanation.config
                k, v = (dataclasses.replace(s, BR=max(1, elements // s.BG)) for s in (chosen.k, chosen.v))
                programs = -(-len(call.k) * HEADS * k.blocks // k.BR)
                config = dataclasses.replace(chosen, k=k, v=v, programs=programs, num_warps=warps)
                tables, more = StoreTables(x.where, positions=x.positions), {"cos_sin": CosSin(x.cos, x.sin)}
                more |= {name: getattr(x, name) for name in ("k_scale", "v_scale")}
                runs.append(
                    lambda x=x, tables=tables, config=config, more=more: launch(
                        x.k, x.v, x.k_cache, x.v_cache, tables, config=config, pages=x.pages, **more
                    )
                )
            rows.append({"elements": elements, "warps": warps, "us": round(1e3 * milliseconds(runs), 3)})
    return rows


def measurements(sweep: bool) -> dict[str, Any]:
    return {
        "stores": [
            measure(tokens, kind, sweep)
            for tokens in (64, 4096, 65536)
            for kind in ("copy", "fp8", "fp8-own", "rope", "rope-interleaved")
            if tokens <= 4096 or kind in ("copy", "fp8")
        ],
    }


if __name__ == "__main__":
    gpu_record.run("benchmarks/kv_store.py", __doc__, measurements)
