"""Decode the captured steps: a paged cache that grows token by token, and every sibling on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.attention import explain, mha_decode
from kvlab.attention.call.options import Arch
from kvlab.attention.mha_decode.config import DecodeConfig
from kvlab.attention.mha_decode.reference import reference
from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
from kvlab.common.arrays import to_torch
from kvlab.data import Capture
from kvlab.mirror import Lockstep, lockstep
from kvlab.staging import Traffic

Array = np.ndarray[Any, Any]
ARCHS: tuple[Arch, ...] = ("sm_90", "gfx950")


@dataclass(frozen=True)
class Step:
    """Results of one decode step of one layer.

    config     tile sizes, the same for the kernel and the emulator of sm_90
    errors     largest difference from the float64 reference: an emulated architecture, "triton", "gpu", "model"
    allowed    the largest error that storage in this dtype excuses: 1e-5 for float32, otherwise twice PyTorch's own
    traffic    what each emulated architecture moved
    lockstep   the runs of the kernel and its emulator side by side, an architecture each; gfx950 in step 0 only
    notes      why a column is empty
    """

    layer: int
    step: int
    keys: int
    config: DecodeConfig
    errors: dict[str, float]
    allowed: float
    traffic: dict[str, Traffic]
    lockstep: dict[str, Lockstep]
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Tells whether every sibling is within what is allowed and no step differs in lockstep."""
        within = all(self.errors[name] <= self.allowed for name in self.errors if name != "model")
        return within and self.difference == "none"

    @property
    def difference(self) -> str:
        """The first step that differs in lockstep, or "none"."""
        for arch, run in self.lockstep.items():
            if (first := run.first_difference) is not None:
                return f"{arch} {first.twin}.{first.step}: {first.output}"
        return "none"


def paged_cache(capture: Capture, page_size: int, seed: int = 0) -> PagedKVCacheCollection:
    """A pool with room for the whole capture and some pages of others, in shuffled order, that holds the prompt.

    Every slot that no token has filled is NaN.
    """
    pages = -(-capture.tokens // page_size)
    pool = PagedKVCacheCollection.allocate(
        KVCacheStaticParams(capture.kv_heads, capture.head_dim), num_pages=pages + max(4, pages // 4),
        page_size=page_size, num_layers=len(capture.layers), batch_size=1, max_length=capture.tokens,
        dtype=capture.dtype,
    )
    order = np.random.default_rng(seed).permutation(pages + max(4, pages // 4))
    pool.lookup_table[0, :pages] = order[:pages]
    grow(pool, capture, 0, capture.prompt_tokens)
    return pool


def grow(pool: PagedKVCacheCollection, capture: Capture, start: int, stop: int) -> None:
    """Store K and V of the tokens ``start`` to ``stop`` of every layer."""
    token, head = np.arange(start, stop)[:, None], np.arange(capture.kv_heads)
    for layer in range(len(capture.layers)):
        pool.get_key_cache(layer).store(0, head, token, 0, capture.k[layer, start:stop])
        pool.get_value_cache(layer).store(0, head, token, 0, capture.v[layer, start:stop])


def decode(capture: Capture, pool: PagedKVCacheCollection) -> Iterator[Step]:
    """Decode step after step, layer after layer; the token of a step is stored before it attends."""
    for step in range(capture.decode_steps):
        token = capture.prompt_tokens + step
        grow(pool, capture, token, token + 1)
        at = pool.with_lengths(np.array([token], np.uint32), max_seq_length=1)
        for layer in range(len(capture.layers)):
            yield _decode_layer(capture, at, layer, step, token)


def _decode_layer(capture: Capture, pool: PagedKVCacheCollection, layer: int, step: int, token: int) -> Step:
    q = capture.q[layer, token][None]  # [1, Hq, D]
    keys, values = pool.get_key_cache(layer), pool.get_value_cache(layer)
    arrays = {
        "q": q[:, None],
        "k_cache": keys.blocks,
        "v_cache": values.blocks,
        "block_table": pool.lookup_table,
        "seq_lens": np.array([token + 1], np.int32),
    }
    exact = reference(*arrays.values(), scale=capture.scale)[0][:, 0]
    errors: dict[str, float] = {}
    traffic: dict[str, Traffic] = {}
    notes: dict[str, str] = {}
    configs: dict[str, Any] = {}
    for arch in ARCHS:
        try:
            configs[arch] = explain(mha_decode, q, pool, layer, backend="emulator", arch=arch).config
        except ValueError as reason:  # this machine's data path does not take the capture's sizes
            notes[arch] = str(reason)
            continue
        traffic[arch] = Traffic()
        out = mha_decode(q, pool, layer, scale=capture.scale, backend="emulator", arch=arch, traffic=traffic[arch])
        errors[arch] = _distance(out, exact)
    config: Any = explain(mha_decode, q, pool, layer).config
    case = {**arrays, "scale": capture.scale}
    runs: dict[str, Lockstep] = {
        arch: lockstep("mha_decode", {**case, "config": configs[arch]}, emulator={"arch": arch})
        for arch in (ARCHS if step == 0 else ARCHS[:1])
        if arch in configs
    }
    errors["triton"] = _distance(mha_decode(q, pool, layer, scale=capture.scale, backend="triton"), exact)
    if gpu_name():
        out = mha_decode(to_torch(q).cuda(), pool.to("cuda"), layer, scale=capture.scale)
        errors["gpu"] = _distance(out.float().cpu().numpy(), exact)
    if capture.o is not None:
        errors["model"] = _distance(capture.o[layer, token][None], exact)
    allowed = 1e-5 if q.dtype.itemsize == 4 else 2 * _distance(_plain(capture, layer, token), exact) + 1e-5
    return Step(capture.layers[layer], step, token + 1, config, errors, allowed, traffic, runs, notes)


def _plain(capture: Capture, layer: int, token: int) -> Array:
    """``softmax(q k^T scale) v`` by PyTorch in the storage dtype: the yardstick of what rounding costs."""
    q, k, v = (
        to_torch(a) for a in (capture.q[layer, token], capture.k[layer, : token + 1], capture.v[layer, : token + 1])
    )
    k, v = (a.repeat_interleave(capture.group, dim=1) for a in (k, v))  # [keys, Hq, D]
    scores = (q[:, None] @ k.permute(1, 2, 0)) * capture.scale  # [Hq, 1, keys]
    out: Array = (scores.softmax(-1) @ v.transpose(0, 1)).float().numpy().swapaxes(0, 1)
    return out


def _distance(out: Any, exact: Array) -> float:
    return float(np.abs(np.asarray(out, np.float64) - np.asarray(exact, np.float64)).max())


def gpu_name() -> str | None:
    """The GPU that compiled kernels run on, if there is one."""
    if not importlib.util.find_spec("torch"):
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
