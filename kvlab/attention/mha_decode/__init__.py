"""MHA decode: one to four new tokens of each sequence attend to its whole KV cache."""

from __future__ import annotations

import math
from typing import Any

from kvlab.attention.backends import choose_backend, machine, on_gpu, rounded, run
from kvlab.attention.explain import Explanation
from kvlab.attention.inputs import (
    PagedInputs,
    check_lane_copies,
    check_paged_collection,
    decode_numbers,
    lengths_with_new,
    paged_inputs,
    require,
)
from kvlab.attention.online_softmax import MASK_VALUE
from kvlab.cache import PagedKVCacheCollection
from kvlab.cache.arrays import dtype_of
from kvlab.staging import DECODE_ARCHS, Traffic

from .config import DecodeProblem, choose_config
from .emulator import launch as emulate
from .reference import reference

__all__ = ["mha_decode", "mha_decode_paged"]

KERNEL = "kvlab.attention.mha_decode.kernel:launch"
MAX_TOKENS = 4


def mha_decode(
    q: Any,
    cache: PagedKVCacheCollection,
    layer: int = 0,
    **options: Any,
) -> Any:
    """Attention of the newest tokens over a cache collection: ``softmax(scale Q K^T) V``.

    q      ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4 new tokens
    cache  :class:`~kvlab.cache.PagedKVCacheCollection` whose pages already hold the new tokens; a sequence has
           ``cache.cache_length(b) + S`` keys
    layer  of the cache
    options  those of :func:`mha_decode_paged`

    Returns and raises what :func:`mha_decode_paged` does.

    >>> import numpy as np
    >>> from kvlab.cache import PagedKVCacheCollection
    >>> blocks = np.zeros((3, 2, 1, 16, 1, 64), np.float32)  # [pages, K and V, layers, page_size, heads, D]
    >>> blocks[:, 1] = 7
    >>> table = np.array([[2, 0]])
    >>> cache = PagedKVCacheCollection(blocks, np.array([19]), table, max_seq_length=1, max_cache_length=20)
    >>> mha_decode(np.ones((1, 2, 64), np.float32), cache)[0, :, :3]
    array([[7., 7., 7.],
           [7., 7., 7.]], dtype=float32)
    """
    return mha_decode_paged(*_from_collection(q, cache, layer), **options)


def mha_decode_paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    arch: str = "sm_90",
    num_splits: int | None = None,
    mask_value: float = MASK_VALUE,
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """Attention of the newest tokens over paged K and V: ``softmax(scale Q K^T) V``.

    q            ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4; bfloat16, float16 or float32
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` of the same dtype, with any strides whose last is 1 (the halves of
                 one buffer; ``[pages, Hkv, page_size, D]`` transposed). Hq is a multiple of Hkv
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the S new tokens among them; 0 is allowed
    scale        of the scores, ``1 / sqrt(D)`` by default
    out          where to write the output (q's shape and dtype); a new array by default. It may be q itself, and shares
                 no memory with anything else
    return_lse   return ``(out, lse)`` with lse ``[B, Hq]`` or ``[B, Hq, S]``, natural log, float32
    backend      "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU);
                 "reference" (float64), "emulator", "triton"
    arch         the machine that is emulated: "sm_80", "sm_90", "gfx950"
    num_splits   programs that share the keys of a sequence; chosen by the sizes, not the lengths, if None
    mask_value   score given to masked keys, in units of log2
    check        look at the values of seq_lens and block_table; None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    New token i of S sees the keys below ``seq_len - S + 1 + i`` (causal, aligned at the end). A row without a key
    gives 0 and lse -inf. ValueError on bad arguments, before anything is written. Nothing waits for the GPU and the
    grid does not depend on the lengths, so a captured CUDA graph may be replayed with other lengths.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 4, 16, 1, 64)).astype(np.float32)
    >>> q = rng.standard_normal((2, 3, 64)).astype(np.float32)
    >>> table, lens = np.array([[3, 1], [2, 0]]), np.array([20, 0])
    >>> out, lse = mha_decode_paged(q, k, v, table, lens, return_lse=True)
    >>> out.shape, lse.shape, lse[1].tolist()
    ((2, 3, 64), (2, 3), [-inf, -inf, -inf])
    >>> exact = mha_decode_paged(q, k, v, table, lens, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> mha_decode_paged(q, k, v, table, np.array([20, 33]))
    Traceback (most recent call last):
        ...
    ValueError: seq_lens[1] is 33: must be 0 to 32, what the 2 columns of block_table hold in pages of 16
    """
    inputs = paged_inputs(q, k_cache, v_cache, block_table, seq_lens, out, max_tokens=MAX_TOKENS, check=check)
    plan = _plan(inputs, backend, arch, num_splits)
    scale, mask_value = _numbers(scale, mask_value, inputs, traffic)
    arguments = {"scale": scale, "config": plan.config, "mask_value": mask_value, "out": inputs.out}
    arrays = inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens
    result, lse = run(plan, KERNEL, emulate, _refer, *arrays, **arguments, traffic=traffic)
    if inputs.drop_tokens:
        result, lse = result[:, 0], lse[:, :, 0]
    result = result if out is None else out
    return (result, lse) if return_lse else result


def _refer(q: Any, *arrays: Any, scale: float, out: Any, **_: Any) -> tuple[Any, Any]:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*reference(q, *arrays, scale=scale), q.dtype, out)


def _from_collection(q: Any, cache: PagedKVCacheCollection, layer: int) -> tuple[Any, Any, Any, Any, Any]:
    """The array form of a call over a collection."""
    check_paged_collection(cache)
    keys, values = cache.get_key_cache(layer), cache.get_value_cache(layer)
    return q, keys.blocks, values.blocks, keys.lookup_table, lengths_with_new(keys.cache_lengths, q)


def _plan(inputs: PagedInputs, backend: str, arch: str, num_splits: int | None) -> Explanation:
    """Which backend and configuration a call gets, and why."""
    batch, tokens, q_heads, head_dim = inputs.q.shape
    page_size, kv_heads = inputs.k_cache.shape[1:3]
    chosen, reason = choose_backend(inputs.q, backend)
    if chosen == "emulator":
        _check_emulated(inputs, arch)
    itemsize = dtype_of(inputs.q, "q").itemsize
    problem = DecodeProblem(
        batch, tokens, q_heads, kv_heads, head_dim, itemsize, inputs.block_table.shape[1] * page_size
    )
    processors = machine(inputs.q.device)[1] if on_gpu(inputs.q) else 132
    emulated = arch if chosen == "emulator" else None
    config = choose_config(problem, processors=processors, num_splits=num_splits, arch=emulated or "sm_90")
    return Explanation("mha_decode", chosen, reason, config, config.grid(problem), emulated)


def _check_emulated(inputs: PagedInputs, arch: str) -> None:
    require(arch in DECODE_ARCHS, f"arch {arch!r}", f"one of {', '.join(DECODE_ARCHS)}")
    head_dim = inputs.q.shape[-1]
    fits = arch != "gfx950" or head_dim in (64, 128, 256)
    require(fits, f"head dimension {head_dim} on gfx950", "64, 128 or 256, as MAX's streaming decode")
    check_lane_copies({"q": inputs.q, "k_cache": inputs.k_cache, "v_cache": inputs.v_cache})


def _numbers(scale: Any, mask_value: Any, inputs: PagedInputs, traffic: Any) -> tuple[float, float]:
    return decode_numbers(1 / math.sqrt(inputs.q.shape[-1]) if scale is None else scale, mask_value, traffic)


def _explain_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, *, backend: str = "auto", arch: str = "sm_90",
    num_splits: int | None = None, check: bool | None = None, out: Any = None, scale: float | None = None,
    mask_value: float = MASK_VALUE, traffic: Traffic | None = None, return_lse: bool = False,
) -> Explanation:  # fmt: skip
    inputs = paged_inputs(q, k_cache, v_cache, block_table, seq_lens, out, max_tokens=MAX_TOKENS, check=check)
    plan = _plan(inputs, backend, arch, num_splits)
    _numbers(scale, mask_value, inputs, traffic)
    return plan


def _explain_collection(q: Any, cache: PagedKVCacheCollection, layer: int = 0, **options: Any) -> Explanation:
    return _explain_paged(*_from_collection(q, cache, layer), **options)


mha_decode.explain = _explain_collection  # type: ignore[attr-defined]
mha_decode_paged.explain = _explain_paged  # type: ignore[attr-defined]
