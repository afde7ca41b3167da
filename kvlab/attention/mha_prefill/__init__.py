"""MHA prefill: many new tokens of each sequence attend to dense, ragged or paged keys."""

from __future__ import annotations

import math
from typing import Any

from kvlab.attention import backends
from kvlab.attention.backends import on_gpu, rounded, run
from kvlab.attention.explain import Explanation
from kvlab.attention.hopper_choice import choose_with_hopper
from kvlab.attention.inputs import check_lane_copies, check_traffic, require
from kvlab.cache.arrays import dtype_of
from kvlab.staging import Traffic

from .config import PrefillProblem, choose_config
from .emulator import launch as emulate
from .hopper_config import SUPPORTED, HopperConfig, choose_hopper, hopper_lacks, hopper_slower
from .hopper_emulator import launch as emulate_hopper
from .inputs import PrefillInputs, dense_inputs, finite, mask_bounds, paged_inputs
from .machine import PREFILL_ARCHS
from .reference import reference

__all__ = ["mha_prefill", "mha_prefill_paged"]

KERNELS = {"triton": "kvlab.attention.mha_prefill.kernel:launch", "hopper": "kvlab.attention.mha_prefill.hopper:launch"}


def mha_prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    window: Any = None,
    softcap: float = 0.0,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str = "auto",
    arch: str = "sm_90",
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """Attention of all queries: ``softmax(scale Q K^T) V``.

    q       ``[B, S, Hq, D]``, or ``[total, Hq, D]`` of sequences of any lengths one after the other; bfloat16, float16
            or float32, D a multiple of 8 from 16 to 256, any strides with a contiguous last dimension
    k, v    ``[B, n, Hkv, D]`` or ``[total_k, Hkv, D]``; Hq is a multiple of Hkv
    causal  query i of S sees the keys up to ``i + n - S`` (aligned at the end, bottom right)
    scale   of the scores, ``1 / sqrt(D)`` by default
    cu_seqlens_q, cu_seqlens_k  integers ``[B + 1]``: where each sequence starts, and the total
    max_seqlen_q  the longest sequence of q, for a smaller grid; the total if None
    window  None; with causal a number of keys, the query's own among them; or ``(left, right)`` keys beside that of the
            query (``i + n - S``), None for no bound
    softcap  0, or c of ``c tanh(scores / c)``
    sinks   None, or a logit for each query head ``[Hq]`` that takes part in the softmax without a value
    return_lse  return ``(out, lse)`` with lse ``[B, Hq, S]`` or ``[Hq, total]``, natural log, float32
    out     where to write the output (q's shape and dtype); a new array by default
    backend  "auto": the emulator for NumPy arrays, the Triton kernel for torch tensors (interpreted on the CPU), on an
             sm_90 GPU the kernel written for it where it applies;
             "reference" (float64), "emulator", "triton", "hopper" (sm_90; its emulator for arrays on no GPU)
    arch    the machine that is emulated: "sm_90", or "gfx950" (D of 64, 128 or 256)
    check   look at the values of cu_seqlens too. None: unless they are on a GPU, which would wait for it
    traffic  a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A row without a key gives 0 and lse -inf (the sink's logit with sinks). Tiles that no row sees are not read.
    ValueError on bad arguments, before anything is written. Nothing waits for the GPU, and the grid does not depend on
    the lengths of the sequences.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 5, 4, 64)).astype(np.float32)
    >>> k, v = rng.standard_normal((2, 1, 9, 2, 64)).astype(np.float32)
    >>> out, lse = mha_prefill(q, k, v, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 5, 4, 64), (1, 4, 5))
    >>> exact = mha_prefill(q, k, v, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> starts, starts_k = np.array([0, 2, 5]), np.array([0, 6, 9])
    >>> mha_prefill(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts_k).shape
    (5, 4, 64)
    >>> mha_prefill(q, k[..., :32], v)
    Traceback (most recent call last):
        ...
    ValueError: k has head dimension 32: must be that of q, 64
    """
    inputs = dense_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, sinks, out, check)
    options = {"causal": causal, "window": window, "softcap": softcap, "backend": backend, "arch": arch, "scale": scale}
    return _run(inputs, _plan(inputs, **options), return_lse, out, traffic)


def mha_prefill_paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    window: Any = None,
    softcap: float = 0.0,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str = "auto",
    arch: str = "sm_90",
    check: bool | None = None,
    traffic: Traffic | None = None,
) -> Any:
    """Attention of the new tokens over a paged cache that already holds them: chunked prefill, prefix hits.

    q            ``[total, Hq, D]``: the new tokens of all sequences
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` of q's dtype, any strides with a contiguous last dimension
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the new ones among them
    cu_seqlens_q  integers ``[B + 1]``: where each sequence's new tokens start in q, and the total
    check        look at the values of seq_lens, block_table and cu_seqlens_q too; None: unless they are on a GPU

    The rest, what is returned and what raises: as for :func:`mha_prefill`.

    >>> import numpy as np
    >>> cache = np.ones((4, 16, 1, 64), np.float32)
    >>> q = np.ones((3, 2, 64), np.float32)
    >>> table, lens, starts = np.array([[3, 1], [0, 0]]), np.array([20, 0]), np.array([0, 3, 3])
    >>> out, lse = mha_prefill_paged(q, cache, cache, table, lens, starts, scale=0.0, return_lse=True)
    >>> out[:, 0, 0].tolist(), np.exp(lse[0]).round(3).tolist()
    ([1.0, 1.0, 1.0], [18.0, 19.0, 20.0])
    """
    arrays = q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q
    inputs = paged_inputs(*arrays, max_seqlen_q, sinks, out, check)
    options = {"causal": causal, "window": window, "softcap": softcap, "backend": backend, "arch": arch, "scale": scale}
    return _run(inputs, _plan(inputs, **options), return_lse, out, traffic)


def _run(
    inputs: PrefillInputs, plan: tuple[Explanation, PrefillProblem, float], return_lse: bool, out: Any,
    traffic: Traffic | None,
) -> Any:  # fmt: skip
    explanation, problem, scale = plan
    check_traffic(traffic)
    arguments = {"scale": scale, "problem": problem, "config": explanation.config, "out": inputs.out}
    kernel = KERNELS.get(explanation.backend, "")
    emulator = emulate_hopper if isinstance(explanation.config, HopperConfig) else emulate
    result, lse = run(explanation, kernel, emulator, _refer, *inputs.arrays, **arguments, traffic=traffic)
    if inputs.ragged:
        result, lse = result[0], lse[0]
    result = result if out is None else out
    return (result, lse) if return_lse else result


def _refer(*arrays: Any, scale: float, problem: PrefillProblem, config: Any, out: Any) -> Any:
    """The reference, rounded to the dtypes of the operation."""
    exact = reference(*arrays, scale=scale, left=problem.left, right=problem.right, softcap=problem.softcap)
    return rounded(*exact, arrays[0].dtype, out)


def _plan(
    inputs: PrefillInputs, *, causal: bool, window: Any, softcap: float, backend: str, arch: str, scale: float | None
) -> tuple[Explanation, PrefillProblem, float]:
    scale = finite("scale", 1 / math.sqrt(inputs.q.shape[-1]) if scale is None else scale)
    left, right = mask_bounds(bool(causal), window)
    require(finite("softcap", softcap) >= 0, f"softcap {softcap}", "0 or more")
    _, _, q_heads, head_dim = inputs.q.shape
    itemsize = dtype_of(inputs.q, "q").itemsize
    problem = PrefillProblem(
        inputs.batch, inputs.max_q, q_heads, inputs.k.shape[2], head_dim, itemsize, left, right, float(softcap),
        inputs.ragged,
    )  # fmt: skip
    lacks, slower = hopper_lacks(inputs, scale), hopper_slower(problem)
    chosen, reason, hopper = choose_with_hopper(inputs.q, backend, lacks, slower, SUPPORTED)
    if hopper:
        tiles, where = choose_hopper(problem, inputs), "sm_90" if chosen == "emulator" else None
        return Explanation("mha_prefill", chosen, reason, tiles, tiles.grid(problem), where), problem, scale
    if chosen == "emulator":
        _check_emulated(inputs, arch)
    emulated = arch if chosen == "emulator" else None
    target = _device_arch(inputs.q.device) if on_gpu(inputs.q) else emulated or "sm_90"
    config = choose_config(problem, arch=target)
    return Explanation("mha_prefill", chosen, reason, config, config.grid(problem), emulated), problem, scale


def _check_emulated(inputs: PrefillInputs, arch: str) -> None:
    require(arch in PREFILL_ARCHS, f"arch {arch!r}", f"one of {', '.join(PREFILL_ARCHS)}")
    head_dim = inputs.q.shape[-1]
    if arch == "gfx950":
        require(head_dim in (64, 128, 256), f"head dimension {head_dim} on gfx950", "64, 128 or 256, as MAX's prefill")
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    check_lane_copies({name: array for name, array in arrays.items() if 0 not in array.shape})


def _device_arch(device: Any) -> str:
    """The architecture of a GPU, as the configurations name it: "sm_80" for all of NVIDIA's before Hopper."""
    arch, _ = backends.machine(device)
    return "sm_80" if arch.startswith("sm_") and int(arch[3:]) < 90 else arch


def _explain_dense(
    q: Any, k: Any, v: Any, *, causal: bool = True, window: Any = None, softcap: float = 0.0, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, max_seqlen_q: int | None = None, sinks: Any = None, out: Any = None,
    backend: str = "auto", arch: str = "sm_90", check: bool | None = None, scale: float | None = None, **_: Any,
) -> Explanation:  # fmt: skip
    inputs = dense_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, sinks, out, check)
    return _plan(inputs, causal=causal, window=window, softcap=softcap, backend=backend, arch=arch, scale=scale)[0]


def _explain_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any, *, causal: bool = True,
    window: Any = None, softcap: float = 0.0, max_seqlen_q: int | None = None, sinks: Any = None, out: Any = None,
    backend: str = "auto", arch: str = "sm_90", check: bool | None = None, scale: float | None = None, **_: Any,
) -> Explanation:  # fmt: skip
    arrays = q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q
    inputs = paged_inputs(*arrays, max_seqlen_q, sinks, out, check)
    return _plan(inputs, causal=causal, window=window, softcap=softcap, backend=backend, arch=arch, scale=scale)[0]


mha_prefill.explain = _explain_dense  # type: ignore[attr-defined]
mha_prefill_paged.explain = _explain_paged  # type: ignore[attr-defined]
