"""Models of transformers with the attention of kvlab: ``attn_implementation="kvlab"``, and a cache in pages for them.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvlab")
    model.generate(ids, cache=KVLabCache(model.config, num_pages=1024))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch

try:
    import transformers
    from transformers import AttentionInterface, masking_utils
    from transformers.masking_utils import (
        AttentionMaskInterface,
        causal_mask_function,
        sliding_window_causal_mask_function,
    )
except ImportError as error:
    found = "transformers of at least 4.57 is not installed: pip install -e '.[models]', in kvlab's own folder"
    raise ImportError(found) from error

from kvlab.attention import mha_prefill
from kvlab.attention.call.options import Backend
from kvlab.common.checks import require

from .adapting import checked_tensors, in_names, lacks
from .transformers_cache import CACHE_ARGUMENT as CACHE_ARGUMENT
from .transformers_cache import KVLabCache as KVLabCache
from .transformers_states import NAME, GrowingColumns, PagedStates

Array = np.ndarray[Any, Any]
_HARMLESS = {
    "cache", "cache_position", "kwargs", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_ids", "return_dict", "use_cache",
}
"""Keywords that reach an attention function and do not change what it computes."""


def register(*, backend: Backend = "auto") -> None:
    """Make ``attn_implementation="kvlab"`` known to transformers.

    backend  of the operations, see :func:`kvlab.attention.mha_prefill`; "emulator" is faster on a CPU than Triton's
             interpreter, which "auto" takes there. A later call takes the place of an earlier one

    The models are causal or see everything, with windows, softcap, sinks, grouped heads, padding and latent attention;
    with :class:`KVLabCache`, a cache of transformers that grows, or none. NotImplementedError for what is asked and not
    done: dropout, head masks, attention weights, biases of positions, masks of one's own, several sequences in a row,
    chunks, static caches. ValueError for inputs that require grad while grad mode is on.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register(backend="emulator")
    >>> shape = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="kvlab")).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with torch.no_grad():
    ...     ours = model(ids).logits
    ...     model.set_attn_implementation("eager")
    ...     bool(torch.allclose(ours, model(ids).logits, atol=1e-5))
    True
    """
    AttentionInterface.register(NAME, partial(attention, backend=backend))
    AttentionMaskInterface.register(NAME, mask_of)


@dataclass(frozen=True)
class Visible:
    """Sight of a layer's queries, where that is not every key up to their own.

    valid   bool ``[B, keys]``: keys that exist; None for all
    causal  up to its own, or all; window  keys, the query's own among them, None for no bound
    """

    valid: Array | None
    causal: bool
    window: int | None


def mask_of(
    batch_size: int, q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: torch.Tensor | None = None,
    local_size: int | None = None, cache_position: torch.Tensor | None = None, **kwargs: Any,
) -> Visible | None:
    """Answer to transformers' mask functions, for :func:`attention`: None is plain causal. ``cache_position`` are
    the positions ``q_offset + arange(q_length)``, which older transformers give. NotImplementedError for a mask that is
    not one of those it has."""
    causal, window = True, None
    if cache_position is not None:
        mask_function = _without_packing(mask_function, batch_size, len(cache_position))
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        causal = False
    elif local_size is not None and _same(mask_function, sliding_window_causal_mask_function(local_size)):
        window = local_size
    elif mask_function is not causal_mask_function:
        raise NotImplementedError(
            f"the mask of attn_implementation={NAME!r}: must be causal, with a sliding window or without, or none; "
            "neither one of your own, nor of several sequences in a row, nor of chunks"
        )
    if causal and not isinstance(kv_length, GrowingColumns):
        tokens = int(q_offset) + q_length if cache_position is None else int(cache_position[-1]) + 1
        if tokens - kv_offset != kv_length:
            raise NotImplementedError(
                f"the cache gives {kv_length} keys of {tokens} tokens: must be a KVLabCache, or one that grows; "
                "kvlab's attention in transformers reads no static cache"
            )
    valid = None
    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + kv_length].cpu().numpy().astype(bool)
        columns = kv_offset + kv_length
        require(valid.shape[1] == kv_length, f"attention_mask has {attention_mask.shape[1]} columns", f"{columns}")
        if window is not None and window < kv_length:
            ends = np.diff(valid.astype(np.int8), prepend=0, axis=1)
            require(
                ((ends == 1).sum(1) <= 1).all(), "attention_mask of a layer with a window has a gap",
                "one run of tokens in each row, as windows count tokens",
            )
        valid = None if valid.all() else valid
    return None if causal and window is None and valid is None else Visible(valid, causal, window)


def _without_packing(mask_function: Any, batch: int, tokens: int) -> Any:
    """The mask function without the part that says, as transformers 4.57 does, that a row's tokens are one sequence."""
    packing = masking_utils.packed_sequence_mask_function(torch.zeros(batch, tokens, dtype=torch.int64))
    held = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    rest = held[0][0] if len(held) == 1 and isinstance(held[0], tuple) else None
    packed = rest is not None and _same(mask_function, masking_utils.and_masks(rest, packing))
    return rest if packed else mask_function


def _same(one: Any, other: Any) -> bool:
    """The same function, by its code and by what it holds."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        held = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
        return one.__code__ is other.__code__ and _same(*map(tuple, held))
    return type(one) is type(other) and bool(one == other)


@in_names(
    q="query", k="key", v="value", k_cache="key", v_cache="value", sinks="s_aux", scale="scaling",
    window="sliding_window",
)
def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Visible | torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None, backend: Backend = "auto", **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: ``[B, S, Hq, Dv]`` of states ``[B, H, .., D]``, and no weights.

    The window is that of the mask, else ``sliding_window``; ``s_aux`` are the logits of sinks ``[Hq]``.
    """
    _refuse(key, dropout, attention_mask, kwargs)
    checked_tensors(query=query, key=key, value=value, s_aux=s_aux)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = attention_mask if isinstance(attention_mask, Visible) else None
    window = sliding_window
    if seen is not None:
        asked = seen.window in (None, sliding_window) or sliding_window is None
        require(asked, f"sliding_window is {sliding_window}", f"{seen.window}, as the mask has it")
        window = sliding_window if seen.window is None else seen.window
        causal = causal and seen.causal
    require(causal or window is None, f"sliding_window is {window} of a layer that is not causal", "None")
    options: dict[str, Any] = {
        "scale": scaling, "window": window, "softcap": softcap or 0.0, "sinks": s_aux, "backend": backend,
    }
    valid = None if seen is None else seen.valid
    pending = key.pending if isinstance(key, PagedStates) else None
    if pending is not None:
        pending.check(module, key, value)
        step = pending.store(valid, "auto" if backend == "hopper" else backend)
        if pending.latent:
            require(causal, "is_causal is False over latent rows", "True")
            return pending.cache.attend_latent(pending, step, module, query, options), None
        return pending.cache.attend(pending, step, query, options, causal=causal), None
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    if valid is None:
        return mha_prefill(q, k, v, causal=causal, **options), None
    return _without_padding(q, k, v, valid, causal=causal, **options), None


def _without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: Array, **options: Any
) -> torch.Tensor:
    """The attention of the tokens that exist, put one sequence after the other; queries of padding get 0."""
    new = valid[:, valid.shape[1] - q.shape[1] :]
    rows, keys = (torch.as_tensor(np.flatnonzero(which)).to(q.device) for which in (new, valid))
    starts, key_starts = (
        torch.as_tensor(np.concatenate([[0], which.sum(1).cumsum()]).astype(np.int32)).to(q.device)
        for which in (new, valid)
    )
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    out.flatten(0, 1)[rows] = mha_prefill(
        q.flatten(0, 1)[rows], k.flatten(0, 1)[keys], v.flatten(0, 1)[keys], cu_seqlens_q=starts,
        cu_seqlens_k=key_starts, max_seqlen_q=int(new.sum(1).max()), **options,
    )
    return out


def _refuse(key: torch.Tensor, dropout: float, mask: Any, other: dict[str, Any]) -> None:
    """NotImplementedError for what is asked of the attention and not done, ValueError for a cache passed over."""
    lacks("kvlab drops no weights, as after model.eval()", 0.0, dropout=dropout)
    ignored = [name for name in ("cache", "past_key_values") if isinstance(other.get(name), KVLabCache)]
    if ignored and not isinstance(key, PagedStates):
        raise ValueError(f"{ignored[0]} is a KVLabCache that the model passes over: must be {CACHE_ARGUMENT}=, as "
                         f"transformers {transformers.__version__} calls it")
    given = {name: value for name, value in other.items() if name not in _HARMLESS}
    lacks(f"attn_implementation={NAME!r} has no such thing", None, False, **given)
    if not (mask is None or isinstance(mask, Visible)):
        raise NotImplementedError(
            f"attention_mask has shape {tuple(mask.shape)}: must be [B, keys], which tokens exist; "
            f"attn_implementation={NAME!r} takes no mask of queries and keys"
        )
