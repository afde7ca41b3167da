"""MLA prefill, not absorbed: new tokens attend to K and V of each head, and to K's rope part in the latent cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvlab.attention.call.backends import check_arithmetic, choose_backend, on_gpu, rounded, run
from kvlab.attention.call.checks import check_paged_collection, check_traffic, finite_number, require
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.kinds import Kind, kind_of
from kvlab.attention.call.layers import layer_arrays
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.ragged import check_grid, check_starts_of_cache, keys_with_new, sequence_lengths
from kvlab.attention.features.intervals import keys_in_table, window_interval
from kvlab.attention.features.masks import resolve_mask
from kvlab.attention.features.resolve import Features, in_base, resolve_features
from kvlab.attention.features.scales import is_fp8, resolve_scale
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import dtype_of
from kvlab.staging import Traffic

from .config import MLAPrefillProblem, choose_config
from .emulator import launch as emulate
from .inputs import (
    MLAPrefillInputs,
    check_paged,
    check_paged_memory,
    check_ragged,
    check_ragged_memory,
    paged_inputs,
    ragged_inputs,
)
from .reference import reference as refer

__all__ = ["mla_prefill", "mla_prefill_paged", "mla_prefill_ragged"]

KERNEL = "kvlab.attention.mla_prefill.kernel:launch"


@PublicOperation
def mla_prefill(
    q: Any,
    k: Any,
    v: Any,
    cache: PagedKVCacheCollection,
    layer: int = 0,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Any,
) -> Any:
    """MLA of the new tokens over a cache collection, whose pages already hold their latent rows.

    cache  :class:`~kvlab.cache.PagedKVCacheCollection` for MLA (one head, no V storage); sequence b has
           ``cache.cache_length(b)`` keys and its new tokens
    layer  of the cache

    The rest, what is returned and what raises: as for :func:`mla_prefill_paged`.

    >>> import numpy as np
    >>> from kvlab.cache import PagedKVCacheCollection
    >>> blocks = np.zeros((3, 1, 1, 16, 1, 576), np.float32)  # [pages, K, layers, page_size, head, latent and rope]
    >>> cache = PagedKVCacheCollection(blocks, np.array([17]), np.array([[2, 0]]), 2, 19)
    >>> q, k, v = (np.ones(shape, np.float32) for shape in ((2, 4, 192), (19, 4, 128), (19, 4, 128)))
    >>> cu_q, cu_k = np.array([0, 2]), np.array([0, 19])
    >>> _, lse = mla_prefill(q, k, v, cache, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=0.0, return_lse=True)
    >>> np.exp(lse[:, 0]).round(3).tolist()
    [18.0, 19.0]
    """
    return mla_prefill_paged(*_from_collection(q, k, v, cache, layer, cu_seqlens_q, cu_seqlens_k), **options)


@PublicOperation
def mla_prefill_paged(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    k_starts: Any = None,
    latent_dim: int = 512,
    causal: bool | None = None,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    mask: Any = None,
    window: Any = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    rope_scale: Any = None,
    return_lse: bool = False,
    base2: bool = False,
    out: Any = None,
    kv_layout: str = "NHD",
    batch_invariant: bool = False,
    backend: str = "auto",
    arch: str = "sm_90",
    arithmetic: str = "float32",
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """MLA of the new tokens: ``softmax(scale (Q_nope K^T + Q_rope K_rope^T)) V``, K and V of each head given, the rope
    part of K read from the pages of the latent cache, where all heads share it.

    q            ``[total, H, nope + rope]``: the new tokens of all sequences; DeepSeek's models have 128 + 64
    k, v         ``[total_k, H, nope]`` and ``[total_k, H, value]`` of q's dtype (bfloat16, float16 or float32), or of
                 float8_e4m3fn beside a q of 8 or 16 bits (columns in multiples of 16 then; multiplied in q's dtype, in
                 bfloat16 for q of 8), with a contiguous last dimension: what the keys' latent rows were projected to
    kv_cache     ``[pages, page_size, D]`` or with an axis of one head (see ``kv_layout``): rows of latent and rope
                 columns, of q's dtype or float8_e4m3fn; or rope-aware rows, fp8 latents and a bfloat16 rope part (see
                 :func:`kvlab.attention.mla_store_paged`)
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the new ones among them
    cu_seqlens_q, cu_seqlens_k  integers ``[B + 1]``: where each sequence starts in q, and in k and v, and the total
    k_starts     None: k and v hold the last keys of each sequence (all of them, or those of the new tokens); or
                 integers ``[B]``, the first key that they hold: a chunk of a long prefix, to be merged with the others
                 by :func:`kvlab.attention.merge_states` (give sinks to one of the chunks only)
    latent_dim   latent columns of a cache row, in front of those of rope
    causal       query i of S is at position ``i + n - S`` of n keys and sees those up to it (aligned at the end,
                 bottom right). True unless there is a ``mask``
    scale        of the scores, ``1 / sqrt(nope + rope)`` by default
    max_seqlen_q the longest sequence of q, for a smaller grid; None is that of ``cu_seqlens_q``, on a GPU the total
    mask         None, or a :class:`~kvlab.attention.masks.Mask`, which tells alone what a query sees; with
                 ``causal=True`` or a window both must show the key
    window       None; with causal a number of keys, the query's own among them; or ``(left, right)`` keys beside that
                 of the query, None for no bound
    softcap      0, or c of ``c tanh(scores / c)``
    sinks        None, or a logit for each head ``[H]`` that takes part in the softmax without a value
    alibi_slopes None, or float32 ``[H]`` or ``[B, H]``: scores less slope times the distance
    q_scale, k_scale, v_scale  what q, k and v in float8_e4m3fn are multiplied by: a number, float32 ``[H]``, for k and
                 v also each token's and head's ``[total_k, H]``. Ignored for other dtypes
    rope_scale   of a rope part in float8_e4m3fn: a number, float32 ``[1]``, or each token's ``[pages, page_size, 1]``.
                 None: 1, or k_scale where k is not float8_e4m3fn
    return_lse   return ``(out, lse)`` with lse ``[total, H]``, float32, natural logarithm (``base2``: of base 2)
    out          where to write the output ``[total, H, value]`` of q's dtype; a new array by default. For q of
                 float8_e4m3fn bfloat16 by default, float16 and float32 if given
    kv_layout    of a cache with four axes: "NHD" ``[pages, page_size, 1, D]`` or "HND" ``[pages, 1, page_size, D]``
    batch_invariant  the same bits for a sequence alone and in any batch: so it is in any case
    backend      "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU);
                 "reference" (float64), "emulator", "triton"
    arch         the machine that is emulated: "sm_90", "sm_80" (no float8_e4m3fn), or "gfx950" (an e4m3 rope part of
                 more than 32 columns)
    arithmetic   of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products, exp2, log2,
                 division, fused operations and the order of sums as compiled, recorded to the bit for plain calls of
                 MHA. What features add goes by the same rules; on "sm_80" provisional
    check        look at the values of the integers too. None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A row without a key gives 0 and lse -inf (the sink's logit with sinks). Tiles that no row sees are not read.
    ValueError on bad arguments, before anything is written. Nothing waits for the GPU, unless a mask of one's own has
    to be evaluated, and the grid does not depend on the lengths of the sequences.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((n, 2, D)).astype(np.float32) for n, D in ((3, 96), (20, 64), (20, 64)))
    >>> kv = rng.standard_normal((4, 16, 160)).astype(np.float32)  # 128 latents and 32 for rope
    >>> table, lens = np.array([[3, 1], [0, 0]]), np.array([20, 0])
    >>> arguments = q, k, v, kv, table, lens, np.array([0, 3, 3]), np.array([0, 20, 20])
    >>> out, lse = mla_prefill_paged(*arguments, latent_dim=128, return_lse=True)
    >>> out.shape, lse.shape
    ((3, 2, 64), (3, 2))
    >>> exact = mla_prefill_paged(*arguments, latent_dim=128, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> from kvlab.memory import bfloat16, float8_e4m3fn
    >>> fp8 = q.astype(bfloat16), k.astype(float8_e4m3fn), v.astype(float8_e4m3fn), kv.astype(bfloat16), *arguments[4:]
    >>> by = {"k_scale": 0.5, "v_scale": np.full((20, 2), 2, np.float32), "latent_dim": 128}
    >>> out, exact = (mla_prefill_paged(*fp8, **by, backend=name) for name in ("emulator", "reference"))
    >>> bool(np.abs(out.astype(np.float32) - exact.astype(np.float32)).max() < 0.05)
    True
    >>> mla_prefill_paged(*arguments, latent_dim=100)
    Traceback (most recent call last):
        ...
    ValueError: kv_cache has rows of 160 float32: must be 132, or 164 bytes of float8_e4m3fn whose rope part is bfloat16
    """
    arrays = q, k, v, kv_cache, block_table, seq_lens, cu_seqlens_q, cu_seqlens_k, k_starts
    asked = {"mask": mask, "window": window, "causal": causal, "softcap": softcap, "sinks": sinks,
             "alibi_slopes": alibi_slopes, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
             "rope_scale": rope_scale}
    form = {"latent_dim": latent_dim, "kv_layout": kv_layout}
    return _run(
        _PAGED, arrays, form, asked, max_seqlen_q, backend, arch, arithmetic, scale, return_lse, base2, out, check,
        traffic,
    )


@PublicOperation
def mla_prefill_ragged(
    q: Any,
    k: Any,
    v: Any,
    k_rope: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    mask: Any = None,
    window: Any = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    rope_scale: Any = None,
    return_lse: bool = False,
    base2: bool = False,
    out: Any = None,
    backend: str = "auto",
    arch: str = "sm_90",
    arithmetic: str = "float32",
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """The same with the rope part of K in an array ``[total_k, rope]`` or ``[total_k, 1, rope]``, without a cache.

    A sequence has the keys that k, v and k_rope hold. k_rope is of q's dtype; beside k of float8_e4m3fn it may be that,
    with a rope_scale (each token's: ``[total_k, 1]``), and beside q of float8_e4m3fn bfloat16. The rest: as for
    :func:`mla_prefill_paged`.

    >>> import numpy as np
    >>> q, k, v, rope = (np.ones(shape, np.float32) for shape in ((3, 2, 96), (5, 2, 64), (5, 2, 64), (5, 32)))
    >>> starts, starts_k = np.array([0, 1, 3]), np.array([0, 2, 5])
    >>> _, lse = mla_prefill_ragged(q, k, v, rope, starts, starts_k, scale=0.0, return_lse=True)
    >>> np.exp(lse[:, 0]).round(3).tolist()
    [2.0, 2.0, 3.0]
    """
    arrays = q, k, v, k_rope, cu_seqlens_q, cu_seqlens_k
    asked = {"mask": mask, "window": window, "causal": causal, "softcap": softcap, "sinks": sinks,
             "alibi_slopes": alibi_slopes, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
             "rope_scale": rope_scale}
    return _run(
        _RAGGED, arrays, {}, asked, max_seqlen_q, backend, arch, arithmetic, scale, return_lse, base2, out, check,
        traffic,
    )


class _Form(NamedTuple):
    """A form of MLA prefill: the checks of its arrays, of their values and memory, and what makes them inputs."""

    check: Callable[..., tuple[int, int]]
    check_memory: Callable[..., None]
    inputs: Callable[..., MLAPrefillInputs]


_PAGED = _Form(check_paged, check_paged_memory, paged_inputs)
_RAGGED = _Form(check_ragged, check_ragged_memory, ragged_inputs)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Plan of all calls of one kind. features: None where they hold arrays."""

    explanation: Explanation
    problem: MLAPrefillProblem
    features: Features | None
    scale: float


def _run(
    form: _Form, arrays: tuple[Any, ...], more: dict[str, Any], asked: dict[str, Any], max_q: Any, backend: Any,
    arch: str, arithmetic: str, scale: Any, return_lse: bool, base2: bool, out: Any, check: bool | None, traffic: Any,
) -> Any:
    """The call, checked; its plan where that is asked for."""
    explains, first = isinstance(backend, _Explain), None
    backend = str(backend)

    def prepare() -> _Plan:
        nonlocal first
        batch, most = form.check(*arrays, **more, max_q=max_q, out=out)
        inputs = form.inputs(*arrays, **more, out=out, batch=batch, max_q=most)
        form.check_memory(*arrays, out=out, check=check, inputs=inputs)
        features = _features(inputs, asked, more.get("kv_layout"))
        explanation, problem = _plan(inputs, features, backend, arch)
        check_traffic(traffic)
        number = 1 / math.sqrt(problem.nope + problem.rope) if scale is None else scale
        first = inputs, features
        kept = None if features.arrays else features
        return _Plan(explanation, problem, kept, finite_number(number, "scale", "finite in float32"))

    if max_q is None and not on_gpu(arrays[0]):  # the starts tell the longest
        kind = Kind(prepare(), None)
    else:
        options = *more.values(), *asked.values(), max_q, backend, arch, scale, out, traffic
        kind = kind_of(form.check, (*arrays, *options), prepare)
    plan = kind.plan
    if first is None:
        inputs = form.inputs(*arrays, **more, out=out, batch=plan.problem.batch, max_q=plan.problem.max_q)
        form.check_memory(*arrays, out=out, check=check, inputs=inputs)
        features = plan.features
        features = _features(inputs, asked, more.get("kv_layout")) if features is None else features
    else:
        inputs, features = first
    if explains:
        check_arithmetic(plan.explanation, arithmetic)
        return plan.explanation
    result, lse = run(
        plan.explanation, KERNEL, emulate, _refer, *inputs.arrays, scale=plan.scale, features=features,
        problem=plan.problem, config=plan.explanation.config, out=inputs.out, traffic=traffic, again=kind.launches,
        arithmetic=arithmetic,
    )
    result = result if out is None else out
    return (result, in_base(lse, base2)) if return_lse else result


def _refer(*arrays: Any, scale: float, features: Features, problem: Any, config: Any, out: Any) -> Any:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*refer(*arrays, scale=scale, features=features), result_dtype(arrays[0]), out)


def _features(inputs: MLAPrefillInputs, asked: dict[str, Any], kv_layout: str | None) -> Features:
    """kv_layout: of a cache, None without one."""
    asked = dict(asked)
    mask, window, causal, by = (asked.pop(name) for name in ("mask", "window", "causal", "rope_scale"))
    heads, q, rope = int(inputs.q.shape[1]), inputs.q, inputs.k_rope[..., None, :]
    name = "rope_scale"
    if kv_layout is not None and by is None and not is_fp8(inputs.k):
        name, by = "k_scale", asked["k_scale"]
    if kv_layout == "HND" and getattr(by, "ndim", 0) == 3:
        by = by.swapaxes(1, 2)
    interval = window_interval(mask is None if causal is None else bool(causal), window)
    plan = resolve_mask(mask, interval, heads=heads, lengths=lambda: _lengths(inputs), like=q)
    features = resolve_features(q, inputs.k, inputs.v, mask=plan, batch=inputs.batch, **asked)
    rope_scale = resolve_scale(name, by, rope, 1, tuple(int(n) for n in rope.shape[:-1]))
    return replace(features, scales=replace(features.scales, rope=rope_scale))


def _plan(
    inputs: MLAPrefillInputs, features: Features, backend: str, arch: str
) -> tuple[Explanation, MLAPrefillProblem]:
    """Backend and configuration of a call, and its sizes."""
    chosen, reason = choose_backend(inputs.q, backend)
    q, heads, nope, value = inputs.q, int(inputs.q.shape[1]), int(inputs.k.shape[2]), int(inputs.v.shape[2])
    problem = MLAPrefillProblem(
        inputs.batch, inputs.max_q, heads, nope, int(q.shape[2]) - nope, value,
        max(dtype_of(q, "q").itemsize, 2), features.heavy, is_fp8(inputs.k), features.mask.bias is not None,
        inputs.table is not None,
    )
    emulated = arch if chosen == "emulator" else None
    if emulated is not None:
        rope = "k_rope" if inputs.table is None else "the rope part of kv_cache"
        arrays = {"k": inputs.k, "v": inputs.v, rope: inputs.k_rope}
        check_emulated("mla_prefill", emulated, q, arrays, {} if problem.converted else {rope: (problem.rope,)})
    if is_fp8(inputs.k_rope) or is_fp8(inputs.k):
        check_fp8_gpu(q)
    target = target_of(q, emulated)
    config = choose_config(problem, arch=target.arch, shared=target.shared, emulated=emulated is not None)
    check_grid(config.grid(problem), problem.batch, problem.max_q)
    return Explanation("mla_prefill", chosen, reason, config, config.grid(problem), emulated), problem


def _lengths(inputs: MLAPrefillInputs) -> tuple[Any, Any]:
    """New tokens and keys of each sequence, in CPU memory."""
    if inputs.table is None:
        return sequence_lengths(inputs.cu_q), sequence_lengths(inputs.cu_k)
    return sequence_lengths(inputs.cu_q), keys_in_table(inputs.seq_lens, inputs.table, int(inputs.k_rope.shape[1]))


def _from_collection(
    q: Any, k: Any, v: Any, cache: PagedKVCacheCollection, layer: int, cu_q: Any, cu_k: Any
) -> tuple[Any, ...]:
    """The array form of a call over a collection."""
    check_paged_collection(cache)
    mla = cache.kv_params.is_mla
    require(mla, f"cache stores K and V ({cache.kv_params})", "one for MLA, blocks [pages, 1, layers, ...]")
    rows = layer_arrays(cache, layer).keys
    check_starts_of_cache(cu_q, cache)
    return q, k, v, rows, cache.lookup_table, keys_with_new(cache.cache_lengths, cu_q), cu_q, cu_k


class _Explain(str):
    """The name of a backend; the call goes as far as its plan, which it returns."""

    __slots__ = ()


def _explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Function that :func:`kvlab.attention.explain` calls for ``function``: the same call, checked alike, up to its
    plan.
    """

    def plan(*args: Any, backend: str = "auto", **kwargs: Any) -> Explanation:
        result: Explanation = function(*args, backend=_Explain(backend), **kwargs)
        return result

    return plan


mla_prefill.explain = _explain(mla_prefill)
mla_prefill_paged.explain = _explain(mla_prefill_paged)
mla_prefill_ragged.explain = _explain(mla_prefill_ragged)
