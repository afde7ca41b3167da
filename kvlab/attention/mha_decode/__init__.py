"""MHA decode: one to four new tokens of each sequence attend to its whole KV cache."""

from __future__ import annotations

import functools
from typing import Any

from kvlab.attention.call.backends import rounded, run
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.decode_call import DecodeCall, call_of_collection, decode_results, explained, prepared
from kvlab.attention.features.resolve import Features
from kvlab.attention.hopper.choice import choose_with_hopper
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.tiles.online_softmax import MASK_VALUE
from kvlab.cache import PagedKVCacheCollection
from kvlab.staging import Traffic

from .config import choose_config, problem_of
from .emulator import launch as emulate
from .hopper_config import SUPPORTED, HopperDecodeConfig, choose_hopper, hopper_declined, hopper_lacks
from .hopper_emulator import launch as emulate_hopper
from .reference import reference as refer

__all__ = ["mha_decode", "mha_decode_paged"]

KERNELS = {"triton": "kvlab.attention.mha_decode.kernel:launch", "hopper": "kvlab.attention.mha_decode.hopper:launch"}


@PublicOperation
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
    return mha_decode_paged(*call_of_collection(q, cache, layer), **options)


@PublicOperation
def mha_decode_paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    mask: Any = None,
    window: Any = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    base2: bool = False,
    out: Any = None,
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
    """Attention of the newest tokens over paged K and V: ``softmax(scale Q K^T) V``.

    q            ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4; bfloat16, float16 or float32; e4m3 with K and V
                 of e4m3. D and Dv are multiples of 8 (of 16 with e4m3) from 16 to 576
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` and ``[.., Dv]`` of q's dtype, or of float8_e4m3fn with q of 16
                 bits; any strides whose last is 1 (the halves of one buffer). Hq is a multiple of Hkv
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end, or before what a window shows, are not read
    seq_lens     integers ``[B]``: keys of each sequence, the S new tokens among them; 0 is allowed
    scale        of the scores, ``1 / sqrt(D)`` by default
    mask         None: new token i of S sees the keys below ``seq_len - S + 1 + i`` (causal, aligned at the end); or a
                 mask of :mod:`kvlab.attention.masks`
    window       with mask None or besides it: a number of keys, the query's own among them, or ``(left, right)``
    softcap      0, or c of ``c tanh(scores / c)``
    sinks        None, or a logit for each query head ``[Hq]`` that takes part in the softmax without a value; counted
                 once whatever the splits
    alibi_slopes  float32 ``[Hq]`` or ``[B, Hq]``: slope times the distance of query and key is subtracted from scores
    q_scale, k_scale, v_scale  of e4m3 arrays: a number, float32 ``[Hkv]``, or, for K and V, of each token and head
                 ``[pages, page_size, Hkv]``; the true K is ``k_cache * k_scale``. Ignored for other dtypes
    return_lse   return ``(out, lse)`` with lse ``[B, Hq]`` or ``[B, S, Hq]``, natural log (base2: that of 2), float32
    out          where to write the output ``[.., Hq, Dv]`` of q's dtype (bfloat16 for e4m3); a new array by default. It
                 may be q itself, and shares no memory with anything else
    kv_layout    "NHD", or "HND": pages (and scales of tokens) have the heads before the tokens of a page
    batch_invariant  the splits depend on the columns of the table alone: the same bits for a sequence in any batch, on
                 any device of one architecture
    backend      "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU), on
                 sm_90 the Gluon kernel for what it can do; "reference" (float64), "emulator", "triton"; "hopper": the
                 Gluon kernel (its emulator where the arrays are not on a GPU), ValueError for what it cannot do
    arch         the machine that is emulated: "sm_80", "sm_90"; "gfx950" with D = Dv of 64, 128, 256 or 512 (MAX's
                 decode through KVBuffer). e4m3 needs sm_90 or gfx950 (and D of 128, 256 or 512); a GPU, sm_89 or later
    arithmetic   of the emulator: "float32", NumPy's; or "chip", an H100's and slower: sums of products, exp2, log2,
                 division, fused operations and the order of sums as compiled, recorded to the bit for plain calls of
                 MHA. What features add goes by the same rules; on "sm_80" provisional
    num_splits   programs that share the keys of a sequence; chosen by the sizes, not the lengths, if None
    mask_value   accepted for callers of MAX, a number below infinity; a masked key has weight 0 whatever it is
    check        look at the values of seq_lens and block_table; None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    Scores are, in this order, scaled, capped, lowered by ALiBi and masked. A row without a key gives 0 and lse -inf
    (the sink's logit with sinks). ValueError on bad arguments, before anything is written. Nothing waits for the GPU
    (but for a mask of one's own, which is materialised) and the grid does not depend on the lengths, so a captured CUDA
    graph may be replayed with other lengths.

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
    >>> k[3], v[3] = np.nan, np.nan  # a window reads the pages that it sees
    >>> bool(np.isfinite(mha_decode_paged(q, k, v, table, lens, window=4)).all())
    True
    >>> mha_decode_paged(q, k, v, table, np.array([20, 33]))
    Traceback (most recent call last):
        ...
    ValueError: seq_lens[1] is 33: must be 0 to 32, what the 2 columns of block_table hold in pages of 16
    """
    asked = {"mask": mask, "window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
             "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call, kind, arguments = prepared(
        _plan, q, k_cache, v_cache, block_table, seq_lens, asked=asked, scale=scale, out=out, kv_layout=kv_layout,
        batch_invariant=batch_invariant, backend=backend, arch=arch, num_splits=num_splits, mask_value=mask_value,
        check=check, traffic=traffic,
    )
    plan = kind.plan.explanation
    emulator = emulate_hopper if isinstance(plan.config, HopperDecodeConfig) else emulate
    kernel = KERNELS.get(plan.backend, "")
    result, lse = run(
        plan, kernel, emulator, _refer, *call.arrays, **arguments, traffic=traffic, again=kind.launches,
        arithmetic=arithmetic,
    )
    return decode_results(result, lse, out, drop_tokens=call.drop_tokens, return_lse=return_lse, base2=base2)


def _refer(q: Any, *arrays: Any, scale: float, features: Features, out: Any, **_: Any) -> tuple[Any, Any]:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*refer(q, *arrays, scale=scale, features=features), result_dtype(q), out)


def _plan(call: DecodeCall, backend: str, arch: str, num_splits: int | None, batch_invariant: bool) -> Explanation:
    """Backend and configuration of a call, with the reason."""
    problem = problem_of(*call.arrays[:4])
    lacks = hopper_lacks(*call.arrays[:3], problem, call.features)
    chosen, reason, hopper = choose_with_hopper(call.q, backend, lacks, hopper_declined(problem), SUPPORTED)
    if hopper:
        processors = target_of(call.q, None).processors
        tiles = choose_hopper(
            problem, call.features, processors=processors, num_splits=num_splits, batch_invariant=batch_invariant
        )
        machine = "sm_90" if chosen == "emulator" else None
        return Explanation("mha_decode", chosen, reason, tiles, tiles.grid(), machine)
    if chosen == "emulator":
        arrays = {"k_cache": call.k_cache, "v_cache": call.v_cache}
        depths = int(call.q.shape[-1]), int(call.v_cache.shape[-1])
        check_emulated("mha_decode", arch, call.q, arrays, {"k_cache": depths})
    emulated = arch if chosen == "emulator" else None
    if problem.pairs:
        check_fp8_gpu(call.q)
    target = target_of(call.q, emulated)
    config = choose_config(
        problem, processors=target.processors, num_splits=num_splits, arch=target.arch, shared=target.shared,
        heavy=call.features.heavy, biased=call.features.mask.bias is not None, batch_invariant=batch_invariant,
    )
    return Explanation("mha_decode", chosen, reason, config, config.grid(problem), emulated)


_explain_paged = explained(mha_decode_paged, functools.partial(prepared, _plan))


def _explain_collection(q: Any, cache: PagedKVCacheCollection, layer: int = 0, **options: Any) -> Explanation:
    return _explain_paged(*call_of_collection(q, cache, layer), **options)


mha_decode.explain = _explain_collection
mha_decode_paged.explain = _explain_paged
