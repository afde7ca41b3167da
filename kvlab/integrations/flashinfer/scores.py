"""The options of FlashInfer's plans: how scores are made, and of which dtypes arrays are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from kvlab.attention.call.checks import finite_number
from kvlab.attention.features.scales import is_fp8
from kvlab.common.checks import count, flag, is_integer, require, shown
from kvlab.integrations.adapting import P, R, checked_tensors, lacks

ROTATION = "q is turned before the call, and k before or by the rope of kvlab.attention.kv_store_paged"
ITEMS = "items of one sequence are told apart by a custom_mask"
LACKING: dict[str, tuple[str, tuple[Any, ...]]] = {
    "rope_scale": (ROTATION, (None,)),
    "rope_theta": (ROTATION, (None,)),
    "use_fp16_qk_reduction": ("scores are float32", (False,)),
    "fixed_split_size": ("kvlab.attention.mha_decode_paged has batch_invariant", (None,)),
    "prefix_len_ptr": (ITEMS, (None,)),
    "token_pos_in_items_ptr": (ITEMS, (None,)),
    "token_pos_in_items_len": (ITEMS, (0,)),
    "max_item_len_ptr": (ITEMS, (None,)),
    "v_indptr": ("v lies as k does", (None,)),
    "o_indptr": ("the output lies as q does", (None,)),
    "window_right": ("no key lies behind the last", (0, -1)),
    "use_profiler": ("kernels have no profiler in them", (False,)),
    "enable_pdl": ("a launch waits for the one before it", (None, False)),
    "kv_cache_sf": ("no cache is of 4 bits", (None,)),
    "skip_softmax_threshold_scale_factor": ("every key is counted", (None,)),
    "use_fp16_softmax": ("the softmax is float32", (None, False)),
    "uses_spcompress": ("no cache is compressed", (None, False)),
    "o_scale": ("outputs are not quantised", (None,)),
    "profiler_buffer": ("kernels have no profiler in them", (None,)),
    "ckv_scale_arr": ("kvlab.attention.mla_decode_paged takes scales of tokens", (None,)),
    "jit_args": ("kernels are not made of text", (None,)),
    "jit_kwargs": ("kernels are not made of text", (None,)),
}
"""Keyword -> why kvlab lacks it, and the values that leave it out."""


class PlanOptions(TypedDict, total=False):
    """Keywords of plans, and of calls without one; those of ``LACKING`` besides."""

    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    q_data_type: Any
    kv_data_type: Any
    o_data_type: Any
    non_blocking: bool


class PrefillPlanOptions(PlanOptions, total=False):
    """Keywords of the plans of prefills."""

    head_dim_vo: int | None
    custom_mask: Tensor | None
    packed_custom_mask: Tensor | None
    causal: bool
    max_token_per_sequence: int | None
    max_sequence_kv: int | None
    disable_split_kv: bool


def lacking(known: tuple[str, ...], given: dict[str, Any]) -> None:
    """NotImplementedError for a keyword that kvlab lacks, unless its value leaves it out; TypeError for others than
    those ``known``.

    >>> lacking(("enable_pdl",), {"enable_pdl": True})
    Traceback (most recent call last):
        ...
    NotImplementedError: enable_pdl is True: must be None or False; a launch waits for the one before it
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}: must be one of {', '.join(known)}")
        why, neutral = LACKING[name]
        lacks(why, *neutral, **{name: value})


@dataclass(frozen=True, eq=False)
class Scores:
    """Options of a plan, checked. ``left``: keys before the query's own that it sees, None: all."""

    scale: float | None
    softcap: float
    left: int | None
    alibi: bool
    q_dtype: torch.dtype | None
    kv_dtype: torch.dtype | None
    o_dtype: torch.dtype | None

    @classmethod
    def of(cls, options: Any, *, causal: bool, more: tuple[str, ...] = ()) -> Scores:
        """Of the keywords ``options``. ``more``: names of ``LACKING`` that the caller's signature has.

        >>> Scores.of({"window_left": 4, "logits_soft_cap": None}, causal=True).left
        4
        """
        own = {name: value for name, value in options.items() if name in PlanOptions.__annotations__}
        lacking(("rope_scale", "rope_theta", *more), {n: v for n, v in options.items() if n not in own})
        flag("non_blocking", own.get("non_blocking", True))
        mode, cap = own.get("pos_encoding_mode", "NONE"), own.get("logits_soft_cap")
        known = mode in ("NONE", "ALIBI", "ROPE_LLAMA")
        require(known, f"pos_encoding_mode is {mode!r}", "'NONE', 'ALIBI' or 'ROPE_LLAMA'")
        lacks(ROTATION, "NONE", "ALIBI", pos_encoding_mode=mode)
        if mode == "ALIBI":
            lacks("scores are lowered by the distance of query and key, on both sides", True, causal=causal)
            lacks("slopes lower the capped scores", None, 0, logits_soft_cap=cap)
        scale, left = own.get("sm_scale"), own.get("window_left", -1)
        if scale is not None:
            finite_number(scale, "sm_scale", "a finite number")
        require(is_integer(left), f"window_left is {shown(left)}", "a number of keys, -1 for no bound")
        dtypes = (dtype_of(name, own.get(name)) for name in ("q_data_type", "kv_data_type", "o_data_type"))
        return cls(scale, cap or 0.0, None if left < 0 else int(left), mode == "ALIBI", *dtypes)

    def check_dtypes(self, **arrays: Tensor) -> None:
        """ValueError for q, or k, of another dtype than the plan's."""
        checked_tensors(**arrays)
        (name, q), *caches = arrays.items()
        planned = self.q_dtype
        require(planned is None or q.dtype == planned, f"{name} has dtype {q.dtype}", f"q_data_type, {planned}")
        planned = self.q_dtype if self.kv_dtype is None else self.kv_dtype
        for name, array in caches:
            fits = planned is None or array.dtype == planned
            require(fits, f"{name} has dtype {array.dtype}", f"kv_data_type, {planned}")

    def options(self, q: Tensor, return_lse: Any, **keywords: Any) -> dict[str, Any]:
        """Keywords of an operation: softcap and slopes of these, lse in base 2, and ``keywords``."""
        slopes = None
        if self.alibi:
            lacks("distances count from the query; an lse of others would differ", False, return_lse=return_lse)
            slopes = slopes_of_heads(int(q.shape[-2]), q.device)
        return {"softcap": self.softcap, "alibi_slopes": slopes, "return_lse": True, "base2": True, **keywords}


def dtype_of(name: str, value: Any) -> torch.dtype | None:
    """A dtype of torch, by name or itself; None of None."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    require(found is None or isinstance(found, torch.dtype), f"{name} is {value!r}", "a dtype of torch or its name")
    require(found is not None or value is None, f"{name} is {value!r}", "a dtype of torch or its name")
    return found


def slopes_of_heads(heads: int, device: Any) -> Tensor:
    """ALiBi's slopes ``[heads]``: ``2 ** (-8 i / n)`` of the n heads that are a power of two, and of the others those
    that 2 n heads would have between them.

    >>> slopes_of_heads(3, "cpu").tolist()
    [0.0625, 0.00390625, 0.25]
    """
    n = 1 << (heads.bit_length() - 1)
    one, between = torch.arange(1, n + 1, device=device), torch.arange(1, 2 * (heads - n), 2, device=device)
    return torch.exp2(torch.cat((-8 / n * one, -4 / n * between)))


def scale_factors(
    scale: float, q: Tensor, k: Tensor, v: Tensor, *, q_scale: Any, k_scale: Any, v_scale: Any
) -> tuple[dict[str, Any], Any]:
    """``(keywords, factor)``: the scores' scale with the numbers among q_scale and k_scale in it, the scales of fp8
    arrays, and what the output is to be multiplied by, None for nothing.

    >>> x = torch.zeros(1, 1, 8)
    >>> scale_factors(0.5, x, x, x, q_scale=None, k_scale=3.0, v_scale=2.0)
    ({'scale': 1.5}, 2.0)
    """
    keywords: dict[str, Any] = {}
    for name, array, by in (("q_scale", q, q_scale), ("k_scale", k, k_scale), ("v_scale", v, v_scale)):
        if isinstance(by, Tensor):
            if not is_fp8(array):
                lacks("numbers scale what is not float8_e4m3fn", **{name: by})
            checked_tensors(**{name: by})
            keywords[name] = by
        elif by is not None:
            by = finite_number(by, name, "a finite number or, for float8_e4m3fn, a tensor")
            if name != "v_scale":
                scale *= by
            elif is_fp8(v):
                keywords[name] = by
    factor = v_scale if v_scale is not None and "v_scale" not in keywords else None
    return {"scale": scale, **keywords}, factor


def finished(found: tuple[Tensor, Tensor], factor: Any, lse: Tensor | None, return_lse: Any) -> Any:
    """Results of ``run``: the output times ``factor`` and, if asked for, the lse, in the caller's tensor if given,
    which ``room_for`` lets pass.
    """
    out, own = found
    if factor is not None:
        out.mul_(factor)
    if not flag("return_lse", return_lse):
        return out
    if lse is not None:
        own = lse.copy_(own)
    return out, own


def room_for(
    out: Tensor | None, dtype: torch.dtype | None, shape: tuple[int, ...], q: Tensor, lse: Tensor | None = None,
    return_lse: Any = False,
) -> Tensor | None:
    """Tensor to write to: ``out`` of ``shape``, or one of the planned dtype; None where kvlab's own choice is that.
    ValueError for what the caller gives of another form, an ``lse`` for ``return_lse`` among it.
    """
    checked_tensors(out=out, lse=lse)
    if flag("return_lse", return_lse) and lse is not None:
        fits = tuple(lse.shape) == shape[:-1] and lse.dtype == torch.float32
        require(fits, f"lse is {lse.dtype} {tuple(lse.shape)}", f"float32 {shape[:-1]}")
    if out is not None:
        require(tuple(out.shape) == shape, f"out has shape {tuple(out.shape)}", f"{shape}")
        require(dtype is None or out.dtype == dtype, f"out has dtype {out.dtype}", f"o_data_type, {dtype}")
        return out
    return None if dtype in (None, q.dtype) else torch.empty(shape, dtype=dtype, device=q.device)


def page_of(caches: tuple[Tensor, Tensor], kv_layout: str) -> tuple[int, int]:
    """``(page_size, heads)`` of a cache."""
    _, one, two, _ = caches[0].shape if caches[0].ndim == 4 else (0, 0, 0, 0)
    return (int(one), int(two)) if kv_layout == "NHD" else (int(two), int(one))


def plans(plan: Callable[P, None]) -> Callable[P, None]:
    """Decorator of a wrapper's ``plan``: one that is refused leaves no plan."""

    @functools.wraps(plan)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        wrapper: Any = args[0]
        wrapper.planned = False
        plan(*args, **kwargs)
        wrapper.planned = True

    return call


def runs(run: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a wrapper's ``run``: ValueError where there is no plan."""

    @functools.wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        wrapper = args[0]
        require(getattr(wrapper, "planned", False), f"run of a {type(wrapper).__name__} without a plan", "after plan()")
        return run(*args, **kwargs)

    return call


def check_planned(q: Tensor, heads: int, head_dim: int, name: str = "num_qo_heads") -> None:
    """ValueError for queries of other heads than the plan's."""
    fits = q.ndim == 3 and tuple(q.shape[1:]) == (heads, head_dim)
    require(fits, f"q has shape {tuple(q.shape)}", f"[tokens, {name} = {heads}, head_dim = {head_dim}], as planned")


def checked_heads(**counts: Any) -> None:
    """ValueError for a number of heads, dims or keys that is none."""
    for name, value in counts.items():
        count(name, value, 1)
