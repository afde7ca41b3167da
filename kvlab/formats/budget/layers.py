"""Layers of a model: what each of them keeps of a token, and what it keeps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvlab.common.checks import require, shown

from .config import ModelConfig

KINDS = {
    "full_attention": "full", "attention": "full", "indexed_attention": "full", "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding", "chunked_attention": "chunked", "linear_attention": "linear", "mamba": "linear",
    "mamba2": "linear", "conv": "conv", "hybrid": "hybrid", "mlp": "none", "moe": "none",
}
"""Kinds of layers by the words of ``layer_types`` and ``layers_block_type``."""
LETTERS = {"M": "linear", "*": "full", "-": "none", "E": "none"}
"""The same by the letters of ``hybrid_override_pattern``."""
ALL_SLIDING = ("", "mistral", "ministral", "mixtral", "starcoder2", "phi3", "phimoe")
"""Types of models whose layers all have the window, where nothing else is said."""
ATTENTION = ("full", "sliding", "chunked", "hybrid")


class Rows(NamedTuple):
    """Row of a token in an attention layer: K and V of ``heads``, or one row of MLA.

    kind      ``"full"``, ``"sliding"``, ``"chunked"``, ``"mla"``, ``"indexer"``; ``"mtp ..."`` where a layer predicts
              further tokens
    k_dim     elements of a head's K; of MLA the latents
    v_dim     of its V; of MLA the rope part; 0 for the keys of an indexer
    keeps     newest tokens that it keeps; None: all of them

    >>> from kvlab.formats import kv_budget
    >>> kv_budget("deepseek-v3").layers[0].rows
    (Rows(kind='mla', heads=1, k_dim=512, v_dim=64, keeps=None),)
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    keeps: int | None = None


class State(NamedTuple):
    """State of a sequence in a recurrent layer, whatever its length: that of each head, and the inputs that the layer's
    convolution still needs.

    heads      of the recurrent state; ``head`` elements each
    channels   of the convolution, and ``group`` elements for B and for C of each of ``groups``
    columns    inputs of a channel that are kept: the convolution's width less 1

    >>> from kvlab.formats import kv_budget
    >>> kv_budget("jamba-v0.1").layers[0].state
    State(kind='mamba', heads=8192, head=16, channels=8192, groups=0, group=0, columns=3)
    """

    kind: str
    heads: int
    head: int
    channels: int
    groups: int
    group: int
    columns: int


class Layer(NamedTuple):
    """Layer of a model. shared: the layer whose K and V it reads, None where it has its own or none."""

    number: int
    kind: str
    rows: tuple[Rows, ...] = ()
    state: State | None = None
    shared: int | None = None


def _listed(words: Any, name: str, table: dict[Any, str]) -> list[str]:
    known = isinstance(words, Sequence) and len(words) > 0
    require(known, f"{name} is {shown(words)}", "a list with the kind of each layer")
    for at, word in enumerate(words):
        found = isinstance(word, str | int) and word in table
        require(found, f"{name}[{at}] is {shown(word)}", f"one of {', '.join(map(str, table))}")
    return [table[word] for word in words]


def kinds_of(config: ModelConfig) -> list[str]:
    """The kind of each layer, from the field that says it. ValueError that names the field, for a kind that is unknown,
    for a list of another length than ``num_hidden_layers``, and where no field says which layers recur or slide.

    >>> kinds_of(ModelConfig({"num_hidden_layers": 4, "sliding_window": 64, "sliding_window_pattern": 2}))
    ['sliding', 'full', 'sliding', 'full']
    """
    for name, table in (
        ("layer_types", KINDS), ("layers_block_type", KINDS), ("block_types", KINDS),
        ("hybrid_override_pattern", LETTERS), ("attn_type_list", {0: "linear", 1: "full"}),
    ):
        if config.get(name) is not None:
            kinds = _listed(config.get(name), name, table)
            layers = config.number("num_hidden_layers", len(kinds))
            require(len(kinds) == layers, f"{name} has {len(kinds)} layers", f"{layers}, as num_hidden_layers says")
            return kinds
    every = range(config.layers)
    if config.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return ["linear" for _ in every]
    if config.model_type == "falcon_h1":
        return ["hybrid" for _ in every]
    if config.model_type in ("", "jamba") and config.get("attn_layer_period") is not None:
        period, offset = config.number("attn_layer_period"), config.number("attn_layer_offset", least=0)
        return ["full" if i % period == offset else "linear" for i in every]
    for name, other in (("attn_layer_indices", "linear"), ("full_attn_idxs", "conv")):
        if config.get(name) is not None:
            chosen = config.listed(name)
            return ["full" if i in chosen else other for i in every]
    if config.get("full_attention_interval") is not None:
        interval = config.number("full_attention_interval")
        return ["linear" if (i + 1) % interval else "full" for i in every]
    if config.model_type == "minimax":
        return ["linear" if i % 2 else "full" for i in every]
    told = config.recurrent()
    require(told is None, f"layer_types is missing and {told} is given", f"given for {config.name}")
    if config.get("attention_chunk_size") is not None:
        interval = config.number("no_rope_layer_interval", 4)
        rotary = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in every]
        kinds = _listed(rotary, "no_rope_layers", {0: "full", 1: "chunked"})
        require(len(kinds) == len(every), f"no_rope_layers has {len(kinds)} layers", f"{len(every)}")
        return kinds
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ["full" for _ in every]
    return _windows(config, every)


def _windows(config: ModelConfig, every: range) -> list[str]:
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        letters = _listed(pattern, "sliding_window_pattern", {"L": "sliding", "G": "full"})
        return [letters[i % len(letters)] for i in every]
    if pattern is not None:
        period = config.number("sliding_window_pattern")
        return ["sliding" if (i + 1) % period else "full" for i in every]
    if config.get("use_sliding_window"):
        first = config.number("max_window_layers", 0, least=0)
        return ["sliding" if i >= first else "full" for i in every]
    what = f"layer_types is missing and sliding_window is {shown(config.get('sliding_window'))}"
    require(config.model_type in ALL_SLIDING, what, f"given for {config.name}")
    return ["sliding" for _ in every]


def heads_of(config: ModelConfig) -> tuple[int, int, int]:
    """KV heads, elements of a K and of a V."""
    queries = config.number("num_attention_heads")
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    heads = 1 if one else config.number("num_key_value_heads", queries)
    require(queries % heads == 0, f"num_key_value_heads is {heads}", f"a divisor of {queries} query heads")
    if config.get("head_dim") is None:
        hidden = config.number("hidden_size")
        require(hidden % queries == 0, f"head_dim is missing and hidden_size is {hidden}", f"a multiple of {queries}")
        return heads, hidden // queries, hidden // queries
    dim = config.number("head_dim")
    return heads, dim, config.number("v_head_dim", dim)


def _rows(config: ModelConfig, kind: str, name: str = "") -> tuple[Rows, ...]:
    """What an attention layer keeps of a token."""
    if config.get("kv_lora_rank") is not None:
        row = Rows(name + "mla", 1, config.number("kv_lora_rank"), config.number("qk_rope_head_dim"))
        keys = config.get("index_head_dim")
        return (row,) if keys is None else (row, Rows(name + "indexer", 1, config.number("index_head_dim"), 0))
    heads, k_dim, v_dim = heads_of(config)
    keeps = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.get(kind)
    if kind == "full" and config.get("global_head_dim") is not None:
        k_dim = v_dim = config.number("global_head_dim")
        if config.get("attention_k_eq_v"):
            heads = config.number("num_global_key_value_heads", heads)
    kind = "full" if kind == "hybrid" else kind
    return (Rows(name + kind, heads, k_dim, v_dim, None if keeps is None else config.number(keeps)),)


def _state(config: ModelConfig, where: str) -> State:
    """What a recurrent layer keeps of a sequence: gated delta, Mamba, Mamba2, or the lightning attention of MiniMax."""
    if config.get("linear_num_value_heads") is not None:
        keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
        k_dim, v_dim = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
        columns = config.number("linear_conv_kernel_dim") - 1
        return State("gated delta", values, k_dim * v_dim, 2 * keys * k_dim + values * v_dim, 0, 0, columns)
    if config.model_type.startswith("minimax"):
        dim = heads_of(config)[1]
        return State("lightning", config.number("num_attention_heads"), dim * dim, 0, 0, 0, 0)
    named = [config.named(name) for name in ("mamba_state", "mamba_heads")]
    what = f"{where} is recurrent and linear_num_value_heads and mamba_d_state are missing"
    require(named[0][1] is not None, what, "beside one of them")
    state, columns = config.number("mamba_state"), config.number("mamba_conv") - 1
    if named[1][1] is None:
        inner = config.number("mamba_expand", 2) * config.number("hidden_size")
        return State("mamba", inner, state, inner, 0, 0, columns)
    heads = config.number("mamba_heads")
    if config.get("mamba_head_dim") not in (None, "auto"):
        size = config.number("mamba_head_dim")
    else:
        wide = "mamba_d_ssm" if config.get("mamba_d_ssm") is not None else "hidden_size"
        times = config.number("mamba_expand", 2) if wide == "hidden_size" else 1
        size, rest = divmod(times * config.number(wide), heads)
        require(rest == 0, f"{named[1][0]} is {heads}", f"a divisor of {times} * {wide}")
    return State("mamba2", heads, size * state, heads * size, config.number("mamba_groups", 1), state, columns)


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """The layers of a model, those that predict further tokens (MTP) at the end. ValueError for a kind that is unknown
    and for shared layers before which none of their kind has a cache.

    >>> [layer.shared for layer in layers_of(ModelConfig({"num_hidden_layers": 4, "num_attention_heads": 2,
    ...     "head_dim": 8, "num_kv_shared_layers": 1}))]
    [None, None, None, 2]
    """
    kinds = kinds_of(config)
    sharing = config.number("num_kv_shared_layers", 0, least=0)
    own = len(kinds) - sharing
    require(own > 0, f"num_kv_shared_layers is {sharing}", f"below the {len(kinds)} layers")
    layers: list[Layer] = []
    made: dict[str, Layer] = {}
    for index, kind in enumerate(kinds):
        if index >= own and kind in ATTENTION:
            source = max((i for i in range(own) if kinds[i] == kind), default=None)
            what = f"num_kv_shared_layers is {sharing}, layer {index} is a {kind} one"
            require(source is not None, what, "after a layer of that kind with a cache")
            layers.append(Layer(index, kind, shared=source))
            continue
        if kind not in made:
            rows = _rows(config, kind) if kind in ATTENTION else ()
            state = _state(config, f"layer {index}") if kind in ("linear", "hybrid") else None
            if kind == "conv":
                hidden = config.number("hidden_size")
                state = State("conv", 0, 0, hidden, 0, 0, config.number("conv_L_cache") - 1)
            made[kind] = Layer(index, kind, rows, state)
        layers.append(made[kind]._replace(number=index))
    ahead = config.number("num_nextn_predict_layers", 0, least=0)
    require(ahead <= 64, f"num_nextn_predict_layers is {ahead}", "at most 64")
    layers += [Layer(len(kinds) + i, "mtp", _rows(config, "full", "mtp ")) for i in range(ahead)]
    return tuple(layers)
