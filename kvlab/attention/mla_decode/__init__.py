"""MLA decode, absorbed: one to four new tokens of each sequence attend to its latent cache, which is K and V in one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.call.backends import rounded, run
from kvlab.attention.call.checks import (
    check_paged_collection,
    decode_scale,
    lengths_with_new,
    require,
)
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.kinds import Kind, kind_of
from kvlab.attention.call.layers import layer_arrays
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.decode_call import decode_results, explained
from kvlab.attention.features.intervals import keys_in_table, window_interval
from kvlab.attention.features.masks import resolve_mask
from kvlab.attention.features.resolve import Features, resolve_features
from kvlab.attention.hopper.choice import choose_with_hopper
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.tiles.online_softmax import MASK_VALUE
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import element_strides
from kvlab.staging import Traffic
from kvlab.triton_support.versions import holds_wgmma_rows

from .config import MLADecodeProblem, choose_config
from .emulator import launch as emulate
from .hopper_config import SUPPORTED, HopperMLAConfig, choose_hopper, hopper_lacks
from .hopper_emulator import launch as emulate_hopper
from .inputs import MLAInputs, check_mla_arrays, check_mla_memory, mla_inputs
from .reference import reference as refer

__all__ = ["mla_decode", "mla_decode_paged"]

KERNELS = {"triton": "kvlab.attention.mla_decode.kernel:launch", "hopper": "kvlab.attention.mla_decode.hopper:launch"}


@PublicOperation
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


@PublicOperation
def mla_decode_paged(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    v_dim: int = 512,
    scale: float | None = None,
    mask: Any = None,
    window: Any = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    out: Any = None,
    return_lse: bool = False,
    base2: bool = False,
    kv_layout: str = "NHD",
    batch_invariant: bool = False,
    backend: str = "auto",
    arch: str = "sm_90",
    arithmetic: str = "float32",
    num_splits: int | None = None,
    mask_value: float = MASK_VALUE,
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """Absorbed MLA of the newest tokens over a paged latent cache: ``softmax(scale Q K^T) V``.

    A row of the cache is K of all heads, ``v_dim`` latent columns and then those of rope; its latent columns are V.

    q            ``[B, H, D]``, or ``[B, S, H, D]`` with S of 1 to 4; H of 1 to 128; bfloat16, float16 or float32, or
                 e4m3 with a cache of e4m3 (multiplied in bfloat16). The latent columns are those of the absorbed query
    kv_cache     ``[pages, page_size, D]`` or with an axis of one head (see ``kv_layout``), of q's dtype, or (with q of
                 8 or 16 bits) float8_e4m3fn; or rope-aware rows, e4m3 latents and a bfloat16 rope part (640 bytes for
                 512 + 64; see :func:`kvlab.attention.mla_store_paged`). Any strides with a contiguous last dimension;
                 D = v_dim + 16 to 128 rope columns, both multiples of 16
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the S new tokens among them; 0 is allowed
    v_dim        latent columns, 32 to 512
    scale        of the scores. It belongs to the heads before absorption, whose size the cache does not tell: the
                 default is that of DeepSeek-V2 and V3, ``1 / sqrt(128 + 64)``, for rows of 512 + 64 columns only
    mask         None: new token i of S, at position ``seq_len - S + i``, sees the keys up to its own; or a
                 :class:`~kvlab.attention.masks.Mask` in place of that
    window       None; a number of keys, the token's own among them; or ``(left, right)`` keys beside its position, None
                 for no bound. Pages outside it are not read
    softcap      0, or c of ``c tanh(scores / c)``
    sinks        None, or a logit for each head ``[H]`` that takes part in the softmax without a value
    alibi_slopes None, or float32 ``[H]`` or ``[B, H]``: scores less slope times the distance
    q_scale      of q in e4m3: a number or float32 ``[1]``
    k_scale      what e4m3 columns are multiplied by, as K and as V: a number, float32 ``[1]``, or each token's
                 ``[pages, page_size, 1]``; ignored for other caches
    out          where to write the output (``[B, H, v_dim]`` or ``[B, S, H, v_dim]``, q's dtype, bfloat16 for e4m3); a
                 new array by default
    return_lse   return ``(out, lse)`` with lse ``[B, H]`` or ``[B, S, H]``, float32, natural logarithm (``base2``: of
                 base 2)
    kv_layout    of a cache with four axes: "NHD" ``[pages, page_size, 1, D]`` or "HND" ``[pages, 1, page_size, D]``
    batch_invariant  the same bits for a sequence alone and in any batch: its keys are split by the columns of the
                 table alone
    backend      "auto": the emulator for NumPy arrays, for torch tensors the Gluon kernel for sm_90 where that can do
                 it and otherwise the Triton kernel (interpreted on the CPU); "reference" (float64), "emulator",
                 "triton"; "hopper": the Gluon kernel (its emulator where the arrays are not on a GPU), ValueError for
                 what it cannot do
    arch         the machine that is emulated: "sm_80", "sm_90" (the tiles of the compiled kernel), "gfx950" (MAX's tile
                 of 16 rows and 128 keys; 16 bits, v_dim 128, 256 or 512, 32 or 64 columns of rope)
    arithmetic   of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products, exp2, log2,
                 division, fused operations and the order of sums as compiled, recorded to the bit for plain calls of
                 MHA. What features add goes by the same rules; on "sm_80" provisional
    num_splits   programs that share the keys of a sequence; chosen by the sizes, not the lengths, if None
    mask_value   accepted for callers of MAX, a number below infinity; a masked key has weight 0 whatever it is
    check        look at the values of seq_lens and block_table; None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A row without a key gives 0 and lse -inf (the sink's logit with sinks). ValueError on bad arguments, before anything
    is written. Nothing waits for the GPU, unless a mask of one's own has to be evaluated, and the grid does not depend
    on the lengths, so a captured CUDA graph may be replayed with other lengths.

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
    asked = {"softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    asked |= {"q_scale": q_scale, "k_scale": k_scale}
    inputs, kind, arguments = _prepared(
        q, kv_cache, block_table, seq_lens, v_dim=v_dim, scale=scale, mask=mask, window=window, asked=asked, out=out,
        kv_layout=kv_layout, batch_invariant=batch_invariant, backend=backend, arch=arch, num_splits=num_splits,
        mask_value=mask_value, check=check, traffic=traffic,
    )
    plan = kind.plan.explanation
    kernel = KERNELS.get(plan.backend, "")
    emulator = emulate_hopper if isinstance(plan.config, HopperMLAConfig) else emulate
    result, lse = run(
        plan, kernel, emulator, _refer, *inputs.arrays, **arguments, traffic=traffic, again=kind.launches,
        arithmetic=arithmetic,
    )
    return decode_results(result, lse, out, drop_tokens=inputs.drop_tokens, return_lse=return_lse, base2=base2)


@dataclass(frozen=True, eq=False)
class _MLAPlan:
    """Plan of all calls of one kind. features: None where they hold arrays."""

    explanation: Explanation
    features: Features | None
    scale: float


def _prepared(
    q: Any, kv_cache: Any, block_table: Any, seq_lens: Any, *, v_dim: int, scale: Any, mask: Any, window: Any,
    asked: dict[str, Any], out: Any, kv_layout: str, batch_invariant: bool, backend: str, arch: str, num_splits: Any,
    mask_value: Any, check: bool | None, traffic: Any,
) -> tuple[MLAInputs, Kind[_MLAPlan], dict[str, Any]]:
    """A call, checked: its arrays, its kind, and the named arguments of the launch functions."""
    arrays = q, kv_cache, block_table, seq_lens, out
    first = None

    def prepare() -> _MLAPlan:
        nonlocal first
        check_mla_arrays(*arrays, v_dim=v_dim, kv_layout=kv_layout)
        inputs = mla_inputs(*arrays, v_dim=v_dim, kv_layout=kv_layout)
        features = _features(inputs, mask, window, kv_layout, asked)
        number = decode_scale(_scale(scale, v_dim, inputs.q.shape[-1] - v_dim), mask_value, traffic)
        explanation = _plan(inputs, features, number, backend, arch, num_splits, bool(batch_invariant))
        first = inputs, features
        return _MLAPlan(explanation, None if features.arrays else features, number)

    options = v_dim, scale, mask, window, kv_layout, batch_invariant, backend, arch, num_splits, mask_value, traffic
    kind = kind_of("mla_decode", (*arrays, *asked.values(), *options), prepare)
    plan = kind.plan
    if first is None:
        inputs = mla_inputs(*arrays, v_dim=v_dim, kv_layout=kv_layout)
        features = plan.features
        features = _features(inputs, mask, window, kv_layout, asked) if features is None else features
    else:
        inputs, features = first
    check_mla_memory(*arrays, inputs, check)
    arguments = {
        "scale": plan.scale, "features": features, "config": plan.explanation.config,
        "out": inputs.out,
    }
    return inputs, kind, arguments


def _features(inputs: MLAInputs, mask: Any, window: Any, kv_layout: str, asked: dict[str, Any]) -> Features:
    batch, heads, latent = inputs.q.shape[0], inputs.q.shape[2], inputs.kv_cache[:, :, None]
    interval = window_interval(mask is None or isinstance(window, int | np.integer), window)
    plan = resolve_mask(mask, interval, heads=heads, lengths=lambda: _lengths(inputs), like=inputs.q)
    if kv_layout == "HND" and getattr(asked["k_scale"], "ndim", 0) == 3:
        asked = asked | {"k_scale": asked["k_scale"].swapaxes(1, 2)}
    return resolve_features(inputs.q, latent, latent, mask=plan, batch=batch, **asked)


def _lengths(inputs: MLAInputs) -> tuple[Any, Any]:
    """New tokens and keys of each sequence, in CPU memory."""
    keys = keys_in_table(inputs.seq_lens, inputs.block_table, int(inputs.kv_cache.shape[1]))
    return np.full(len(keys), inputs.q.shape[1]), keys


def _scale(scale: Any, latent: int, rope: int) -> Any:
    known = scale is not None or (latent, rope) == (512, 64)
    require(known, f"scale None with rows of {latent} + {rope} columns", "given; only 512 + 64 has a default")
    return 1 / math.sqrt(128 + 64) if scale is None else scale


def _refer(*arrays: Any, scale: float, features: Features, out: Any, **_: Any) -> tuple[Any, Any]:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*refer(*arrays, scale=scale, features=features), result_dtype(arrays[0]), out)


def _from_collection(q: Any, cache: PagedKVCacheCollection, layer: int) -> tuple[Any, Any, Any, Any]:
    """The array form of a call over a collection."""
    check_paged_collection(cache)
    mla = cache.kv_params.is_mla
    require(mla, f"cache stores K and V ({cache.kv_params})", "one for MLA, blocks [pages, 1, layers, ...]")
    rows = layer_arrays(cache, layer).keys
    return q, rows, cache.lookup_table, lengths_with_new(cache.cache_lengths, q)


def _plan(
    inputs: MLAInputs, features: Features, scale: float, backend: str, arch: str, num_splits: int | None,
    batch_invariant: bool,
) -> Explanation:
    """Backend and configuration of a call, with the reason."""
    problem = MLADecodeProblem.of(inputs.q, inputs.kv_cache, inputs.k_rope, inputs.block_table)
    lacks = hopper_lacks(inputs, problem, features, scale)
    chosen, reason, hopper = choose_with_hopper(inputs.q, backend, lacks, None, SUPPORTED)
    emulated = chosen == "emulator"
    if hopper:
        processors = target_of(inputs.q, None).processors
        adjacent = element_strides(inputs.kv_cache)[1] == problem.latent + problem.rope
        tiles = choose_hopper(
            problem, processors=processors, num_splits=num_splits, batch_invariant=batch_invariant, adjacent=adjacent
        )
        return Explanation("mla_decode", chosen, reason, tiles, tiles.grid(), "sm_90" if emulated else None)
    if emulated:
        arrays = {"kv_cache": inputs.kv_cache, "the rope part of kv_cache": inputs.k_rope}
        check_emulated("mla_decode", arch, inputs.q, arrays, {"kv_cache": (problem.latent, problem.rope)})
    if problem.fp8:
        check_fp8_gpu(inputs.q)
    target = target_of(inputs.q, arch if emulated else None)
    config = choose_config(
        problem, processors=target.processors, num_splits=num_splits, arch=target.arch, emulated=emulated,
        heavy=features.heavy or problem.fp8, batch_invariant=batch_invariant, wgmma=holds_wgmma_rows(),
    )
    return Explanation("mla_decode", chosen, reason, config, config.grid(problem), arch if emulated else None)


_explain_paged = explained(mla_decode_paged, _prepared, ("softcap", "sinks", "alibi_slopes", "q_scale", "k_scale"))


def _explain_collection(q: Any, cache: PagedKVCacheCollection, layer: int = 0, **options: Any) -> Explanation:
    return _explain_paged(*_from_collection(q, cache, layer), **options)


mla_decode.explain = _explain_collection
mla_decode_paged.explain = _explain_paged
