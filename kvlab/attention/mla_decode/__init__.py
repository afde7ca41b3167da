"""MLA decode, absorbed: one to four new tokens of each sequence attend to its latent cache, which is K and V in one."""

from __future__ import annotations

import math
from typing import Any

from kvlab.attention.backends import choose_backend, machine, on_gpu, rounded, run
from kvlab.attention.explain import Explanation
from kvlab.attention.inputs import check_lane_copies, check_paged_collection, decode_numbers, lengths_with_new, require
from kvlab.attention.online_softmax import MASK_VALUE
from kvlab.cache import PagedKVCacheCollection
from kvlab.cache.arrays import dtype_of
from kvlab.staging import MLA_ARCHS, Traffic

from .config import MLADecodeProblem, choose_config
from .emulator import launch as emulate
from .inputs import MLAInputs, mla_inputs
from .reference import reference

__all__ = ["mla_decode", "mla_decode_paged"]

KERNEL = "kvlab.attention.mla_decode.kernel:launch"


def mla_decode(
    q: Any,
    cache: PagedKVCacheCollection,
    layer: int = 0,
    **options: Any,
) -> Any:
    """Absorbed MLA of the newest tokens over a cache collection: ``softmax(scale Q K^T) V``, V the latent part of K.

    q      ``[B, H, D]``, or ``[B, S, H, D]`` with S of 1 to 4 new tokens
    cache  :class:`~kvlab.cache.PagedKVCacheCollection` for MLA (one head, no V storage) whose pages already hold the
           new tokens; a sequence has ``cache.cache_length(b) + S`` keys
    layer  of the cache
    options  those of :func:`mla_decode_paged`

    Returns and raises what :func:`mla_decode_paged` does.

    >>> import numpy as np
    >>> from kvlab.cache import PagedKVCacheCollection
    >>> blocks = np.full((3, 1, 1, 16, 1, 576), 7, np.float32)  # [pages, K, layers, page_size, head, latent and rope]
    >>> table = np.array([[2, 0]])
    >>> cache = PagedKVCacheCollection(blocks, np.array([19]), table, max_seq_length=1, max_cache_length=20)
    >>> out = mla_decode(np.ones((1, 2, 576), np.float32), cache)
    >>> out.shape, out[0, :, :3].tolist()
    ((1, 2, 512), [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]])
    """
    return mla_decode_paged(*_from_collection(q, cache, layer), **options)


def mla_decode_paged(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    v_dim: int = 512,
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
    """Absorbed MLA of the newest tokens over a paged latent cache: ``softmax(scale Q K^T) V``.

    A row of the cache is K of all heads, ``v_dim`` latent columns and then those of rope; its latent columns are V.

    q            ``[B, H, D]``, or ``[B, S, H, D]`` with S of 1 to 4; H of 1 to 128; bfloat16, float16 or float32. The
                 latent columns are those of the absorbed query
    kv_cache     ``[pages, page_size, D]`` or ``[pages, page_size, 1, D]`` of the same dtype, any strides with a
                 contiguous last dimension; D = v_dim + 16 to 128 rope columns, both multiples of 16
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the S new tokens among them; 0 is allowed
    v_dim        latent columns, 32 to 512
    scale        of the scores. It belongs to the heads before absorption, whose size the cache does not tell: the
                 default is that of DeepSeek-V2 and V3, ``1 / sqrt(128 + 64)``, for rows of 512 + 64 columns only
    out          where to write the output (``[B, H, v_dim]`` or ``[B, S, H, v_dim]``, q's dtype), memory of its own;
                 new by default
    return_lse   return ``(out, lse)`` with lse ``[B, H]`` or ``[B, H, S]``, natural log, float32
    backend      "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU);
                 "reference" (float64), "emulator", "triton"
    arch         the machine that is emulated: "sm_80", "sm_90", "gfx950" (16 bits, v_dim 128, 256 or 512, 32 or 64
                 columns of rope). Tiles of 16 rows, also where the compiled kernel takes 32
    num_splits   programs that share the keys of a sequence; chosen by the sizes, not the lengths, if None
    mask_value   score given to masked keys, in units of log2
    check        look at the values of seq_lens and block_table; None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    New token i of S sees the keys below ``seq_len - S + 1 + i`` (causal, aligned at the end). A row without a key
    gives 0 and lse -inf. ValueError on bad arguments, before anything is written. Nothing waits for the GPU and the
    grid does not depend on the lengths, so a captured CUDA graph may be replayed with other lengths.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> kv = rng.standard_normal((4, 16, 160)).astype(np.float32)
    >>> q = rng.standard_normal((2, 3, 160)).astype(np.float32)
    >>> table, lens = np.array([[3, 1], [2, 0]]), np.array([20, 0])
    >>> out, lse = mla_decode_paged(q, kv, table, lens, v_dim=128, scale=0.1, return_lse=True)
    >>> out.shape, lse.shape, lse[1].tolist()
    ((2, 3, 128), (2, 3), [-inf, -inf, -inf])
    >>> exact = mla_decode_paged(q, kv, table, lens, v_dim=128, scale=0.1, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> mla_decode_paged(q, kv, table, lens, v_dim=128)
    Traceback (most recent call last):
        ...
    ValueError: scale None with rows of 128 + 32 columns: must be given; only 512 + 64 has a default
    """
    inputs = mla_inputs(q, kv_cache, block_table, seq_lens, out, v_dim=v_dim, check=check)
    plan = _plan(inputs, backend, arch, num_splits)
    scale, mask_value = decode_numbers(_scale(scale, v_dim, inputs.q.shape[-1] - v_dim), mask_value, traffic)
    arguments = {"v_dim": v_dim, "scale": scale, "config": plan.config, "mask_value": mask_value, "out": inputs.out}
    arrays = inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens
    result, lse = run(plan, KERNEL, emulate, _refer, *arrays, **arguments, traffic=traffic)
    if inputs.drop_tokens:
        result, lse = result[:, 0], lse[:, :, 0]
    result = result if out is None else out
    return (result, lse) if return_lse else result


def _scale(scale: Any, latent: int, rope: int) -> Any:
    known = scale is not None or (latent, rope) == (512, 64)
    require(known, f"scale None with rows of {latent} + {rope} columns", "given; only 512 + 64 has a default")
    return 1 / math.sqrt(128 + 64) if scale is None else scale


def _refer(q: Any, *arrays: Any, v_dim: int, scale: float, out: Any, **_: Any) -> tuple[Any, Any]:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*reference(q, *arrays, v_dim=v_dim, scale=scale), q.dtype, out)


def _from_collection(q: Any, cache: PagedKVCacheCollection, layer: int) -> tuple[Any, Any, Any, Any]:
    """The array form of a call over a collection."""
    check_paged_collection(cache)
    mla = cache.kv_params.is_mla
    require(mla, f"cache stores K and V ({cache.kv_params})", "one for MLA, blocks [pages, 1, layers, ...]")
    rows = cache.get_key_cache(layer)
    return q, rows.blocks, rows.lookup_table, lengths_with_new(rows.cache_lengths, q)


def _plan(inputs: MLAInputs, backend: str, arch: str, num_splits: int | None) -> Explanation:
    """Which backend and configuration a call gets, and why."""
    batch, tokens, heads, D = inputs.q.shape
    chosen, reason = choose_backend(inputs.q, backend)
    emulated = chosen == "emulator"
    if emulated:
        _check_emulated(inputs, arch)
    itemsize = dtype_of(inputs.q, "q").itemsize
    max_keys = inputs.block_table.shape[1] * inputs.kv_cache.shape[1]
    problem = MLADecodeProblem(batch, tokens, heads, inputs.v_dim, D - inputs.v_dim, itemsize, max_keys)
    target, processors = machine(inputs.q.device) if on_gpu(inputs.q) else (arch if emulated else "sm_90", 132)
    config = choose_config(problem, processors=processors, num_splits=num_splits, arch=target, emulated=emulated)
    return Explanation("mla_decode", chosen, reason, config, config.grid(problem), arch if emulated else None)


def _check_emulated(inputs: MLAInputs, arch: str) -> None:
    require(arch in MLA_ARCHS, f"arch {arch!r}", f"one of {', '.join(MLA_ARCHS)}")
    latent, rope, dtype = inputs.v_dim, inputs.q.shape[-1] - inputs.v_dim, dtype_of(inputs.q, "q")
    fits = latent in (128, 256, 512) and rope in (32, 64) and dtype.itemsize == 2
    require(
        arch != "gfx950" or fits,
        f"{latent} + {rope} columns of {dtype} on gfx950",
        "128, 256 or 512 + 32 or 64 of 16 bits; a tile of 128 keys in float32 does not fit into LDS; sm_80 and sm_90 "
        "take the others",
    )
    check_lane_copies({"q": inputs.q, "kv_cache": inputs.kv_cache})


def _explain_paged(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, *, v_dim: int = 512, backend: str = "auto",
    arch: str = "sm_90", num_splits: int | None = None, check: bool | None = None, out: Any = None, **_: Any,
) -> Explanation:  # fmt: skip
    inputs = mla_inputs(q, kv_cache, block_table, seq_lens, out, v_dim=v_dim, check=check)
    return _plan(inputs, backend, arch, num_splits)


def _explain_collection(q: Any, cache: PagedKVCacheCollection, layer: int = 0, **options: Any) -> Explanation:
    return _explain_paged(*_from_collection(q, cache, layer), **options)


mla_decode.explain = _explain_collection  # type: ignore[attr-defined]
mla_decode_paged.explain = _explain_paged  # type: ignore[attr-defined]
