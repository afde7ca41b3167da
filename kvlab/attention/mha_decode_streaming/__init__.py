"""Streaming MHA decode: MAX's decode with one shared-memory buffer, K and V strip by strip."""

from __future__ import annotations

import functools
from typing import Any

from kvlab.attention.call.backends import choose_backend, rounded, run
from kvlab.attention.call.checks import require
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.decode_call import DecodeCall, call_of_collection, decode_results, explained, prepared
from kvlab.attention.features.resolve import Features
from kvlab.attention.machines import check_emulated
from kvlab.attention.machines.gpu import check_fp8_gpu, target_of
from kvlab.attention.mha_decode.config import problem_of
from kvlab.attention.tiles.online_softmax import MASK_VALUE
from kvlab.cache import PagedKVCacheCollection
from kvlab.staging import Traffic

from .config import choose_config
from .emulator import launch as emulate
from .reference import reference as refer

__all__ = ["mha_decode_streaming", "mha_decode_streaming_paged"]

KERNEL = "kvlab.attention.mha_decode_streaming.kernel:launch"
DEPTHS = (64, 128, 256, 512)


@PublicOperation
def mha_decode_streaming(q: Any, cache: PagedKVCacheCollection, layer: int = 0, **options: Any) -> Any:
    """Attention of the newest tokens over a cache collection, strip by strip: ``softmax(scale Q K^T) V``.

    q, cache, layer as in :func:`~kvlab.attention.mha_decode`; options, what is returned and what raises: as for
    :func:`mha_decode_streaming_paged`.

    >>> import numpy as np
    >>> blocks = np.zeros((3, 2, 1, 16, 1, 64), np.float32)  # [pages, K and V, layers, page_size, heads, D]
    >>> blocks[:, 1] = 7
    >>> table = np.array([[2, 0]])
    >>> cache = PagedKVCacheCollection(blocks, np.array([19]), table, max_seq_length=1, max_cache_length=20)
    >>> mha_decode_streaming(np.ones((1, 2, 64), np.float32), cache)[0, :, :3]
    array([[7., 7., 7.],
           [7., 7., 7.]], dtype=float32)
    """
    return mha_decode_streaming_paged(*call_of_collection(q, cache, layer), **options)


@PublicOperation
def mha_decode_streaming_paged(
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
    arch: str = "gfx950",
    arithmetic: str = "float32",
    num_splits: int | None = None,
    mask_value: float = MASK_VALUE,
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """Computes :func:`~kvlab.attention.mha_decode_paged` by MAX's streaming decode: shared memory holds one strip of K
    (32 columns of a tile) and one of V (32 keys), however deep the heads are, and nothing is fetched ahead.

    q            ``[B, Hq, D]``, or ``[B, S, Hq, D]`` with S of 1 to 4; bfloat16, float16 or float32; e4m3 with K and V
                 of e4m3. D of 64, 128, 256 or 512
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` of q's dtype, or of float8_e4m3fn with q of 16 bits; converted to
                 16 bits in registers, and so is q of e4m3. A GPU, sm_89 or later, gfx942 or gfx950, has that
    arch         the machine that is emulated: "gfx950"
    arithmetic   of the emulator: "float32"; that of this chip is not known

    The other arguments, the results and the errors are those of :func:`~kvlab.attention.mha_decode_paged`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 4, 16, 1, 64)).astype(np.float32)
    >>> q = rng.standard_normal((2, 3, 64)).astype(np.float32)
    >>> table, lens = np.array([[3, 1], [2, 0]]), np.array([20, 0])
    >>> out = mha_decode_streaming_paged(q, k, v, table, lens)
    >>> exact = mha_decode_streaming_paged(q, k, v, table, lens, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> mha_decode_streaming_paged(q[..., :32], k[..., :32], v[..., :32], table, lens)
    Traceback (most recent call last):
        ...
    ValueError: head dimensions 32 and 32: must be both 64, 128, 256 or 512
    """
    asked = {"mask": mask, "window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
             "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call, kind, arguments = prepared(
        _plan, q, k_cache, v_cache, block_table, seq_lens, asked=asked, scale=scale, out=out, kv_layout=kv_layout,
        batch_invariant=batch_invariant, backend=backend, arch=arch, num_splits=num_splits, mask_value=mask_value,
        check=check, traffic=traffic,
    )
    plan, again = kind.plan.explanation, kind.launches
    result, lse = run(
        plan, KERNEL, emulate, _refer, *call.arrays, **arguments, traffic=traffic, again=again, arithmetic=arithmetic
    )
    return decode_results(result, lse, out, drop_tokens=call.drop_tokens, return_lse=return_lse, base2=base2)


def _refer(q: Any, *arrays: Any, scale: float, features: Features, out: Any, **_: Any) -> tuple[Any, Any]:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*refer(q, *arrays, scale=scale, features=features), result_dtype(q), out)


def _check_rows(call: DecodeCall) -> None:
    """ValueError for rows that the strips do not divide."""
    depths = int(call.q.shape[-1]), int(call.v_cache.shape[-1])
    fits = depths[0] == depths[1] and depths[0] in DEPTHS
    require(fits, f"head dimensions {depths[0]} and {depths[1]}", "both 64, 128, 256 or 512")


def _plan(call: DecodeCall, backend: str, arch: str, num_splits: int | None, batch_invariant: bool) -> Explanation:
    """Backend and configuration of a call, with the reason."""
    _check_rows(call)
    chosen, reason = choose_backend(call.q, backend)
    problem = problem_of(*call.arrays[:4])
    if chosen == "emulator":
        arrays = {"k_cache": call.k_cache, "v_cache": call.v_cache}
        check_emulated("mha_decode_streaming", arch, call.q, arrays)
    emulated = arch if chosen == "emulator" else None
    if problem.pairs:
        check_fp8_gpu(call.q)
    target = target_of(call.q, emulated)
    config = choose_config(
        problem, processors=target.processors, num_splits=num_splits, arch=target.arch, batch_invariant=batch_invariant
    )
    return Explanation("mha_decode_streaming", chosen, reason, config, config.grid(problem), emulated)


_explain_paged = explained(mha_decode_streaming_paged, functools.partial(prepared, _plan))


def _explain_collection(q: Any, cache: PagedKVCacheCollection, layer: int = 0, **options: Any) -> Explanation:
    return _explain_paged(*call_of_collection(q, cache, layer), **options)


mha_decode_streaming.explain = _explain_collection
mha_decode_streaming_paged.explain = _explain_paged
