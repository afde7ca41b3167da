"""Budget of a model's cache: what a page, a layer and a request take, and how many tokens fit a card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvlab.common.checks import count, flag, require, shown
from kvlab.common.drawn import Drawn
from kvlab.common.text_table import text_columns

from .config import ModelConfig, read_config
from .groups import KVGroup, aligned, groups_of, uniform
from .layers import Layer, layers_of
from .weights import Weights, weight_bytes, weights_of

STATE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
_UNITS = {"": 1, "B": 1, **{f"{k}B": 1000**n for n, k in enumerate("KMGT", 1)},
          **{f"{k}iB": 1024**n for n, k in enumerate("KMGT", 1)}}
LONGEST = 1 << 40
"""Tokens beyond which a request is not looked at."""


def read_bytes(name: str, value: Any) -> int:
    """Bytes from a number or from a text with a unit. ValueError for anything else.

    >>> read_bytes("memory", "80GB"), read_bytes("memory", "1.5 GiB")
    (80000000000, 1610612736)
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*([KMGT]?i?B?)\s*", value)
        accepted = f"a number of bytes, with {', '.join(unit for unit in _UNITS if unit)} or nothing behind it"
        require(found is not None and found[2] in _UNITS, f"{name} is {shown(value)}", accepted)
        assert found is not None
        value = int(float(found[1]) * _UNITS[found[2]])
    return count(name, value, 0, 56)


class KVRequest(NamedTuple):
    """Bytes that a request holds on one rank.

    data      elements and scales of its tokens, and its states
    unfilled  slots of its pages without a token that counts: behind the last, and before a window
    padding   bytes of its pages that hold nothing: alignment, and pages of one size for all groups

    >>> from kvlab.formats import kv_budget
    >>> kv_budget("llama-3.1-8b").request(1000)
    KVRequest(tokens=1000, data=131072000, unfilled=1048576, padding=0)
    """

    tokens: int
    data: int
    unfilled: int
    padding: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.data + self.unfilled + self.padding

    @property
    def waste(self) -> float:
        """Share of the bytes that hold nothing of the request."""
        return (self.unfilled + self.padding) / self.nbytes if self.nbytes else 0.0


class LayerBytes(NamedTuple):
    """Bytes of a layer on one rank: of a token, of a page of tokens, and of its state.

    shared    layer whose K and V it reads; None where it reads its own

    >>> from kvlab.formats import kv_budget
    >>> kv_budget("jamba-v0.1").per_layer[4], kv_budget("gemma-3n-e4b").per_layer[34]
    (LayerBytes(layer=4, kind='full', token=4096, page=65536, state=0, shared=None),
     LayerBytes(layer=34, kind='full', token=0, page=0, state=0, shared=19))
    """

    layer: int
    kind: str
    token: int
    page: int
    state: int
    shared: int | None


class CardFit(NamedTuple):
    """Requests that fit beside the weights of a card.

    weights   bytes of the weights on one rank
    room      bytes left for the cache: memory * utilisation - weights; below 0 where the weights do not fit
    tokens    of each request
    requests  that many fit at once
    longest   tokens of the longest request that fits alone; None where its bytes do not grow

    >>> from kvlab.formats import kv_budget
    >>> kv_budget("llama-3.1-8b").fit("80GB", tokens=8192)
    CardFit(weights=16060522496, room=55939477504, tokens=8192, requests=52, longest=426784)
    """

    weights: int
    room: int
    tokens: int
    requests: int
    longest: int | None


@dataclass(frozen=True, eq=False)
class KVBudget(Drawn):
    """Budget of a model's cache on one of ``degree`` ranks; :func:`kv_budget` makes it.

    layers     what each layer keeps, of the whole model
    groups     layers that keep the same, on one rank
    notes      what is not counted, in words

    >>> from kvlab.formats import kv_budget
    >>> budget = kv_budget("gpt-oss-20b", page_size=64)
    >>> budget
    KVBudget(gpt-oss-20b: 12 x sliding, 12 x full; 49152 bytes of a token)
    >>> budget.bytes_per_token, budget.growing_bytes_per_token
    (49152, 24576)
    """

    name: str
    kv_dtype: str
    degree: int
    layers: tuple[Layer, ...]
    groups: tuple[KVGroup, ...]
    notes: tuple[str, ...]
    config: ModelConfig

    def __repr__(self) -> str:
        words = ", ".join(f"{len(group.layers)} x {group.kind}" for group in self.groups)
        return f"KVBudget({self.name}: {words}; {self.bytes_per_token} bytes of a token)"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers, as long as no window has left it behind."""
        return sum(len(group.layers) * group.token_bytes for group in self.groups)

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes that a further token adds to a long request: those of the groups without a window."""
        return sum(len(group.layers) * group.token_bytes for group in self.groups if group.span is None)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request whatever its length: states of its recurrent layers."""
        return sum(len(group.layers) * group.page_data for group in self.groups if not group.page_tokens)

    @property
    def per_layer(self) -> tuple[LayerBytes, ...]:
        """Bytes of each layer, in the order of :attr:`layers`."""
        out = []
        for layer in self.layers:
            mine = [group for group in self.groups if layer.number in group.layers]
            kinds = "+".join(group.kind for group in mine) or layer.kind
            pages = sum(group.page_bytes for group in mine if group.page_tokens)
            states = sum(group.page_bytes for group in mine if not group.page_tokens)
            tokens = sum(group.token_bytes for group in mine)
            out.append(LayerBytes(layer.number, kinds, tokens, pages, states, layer.shared))
        return tuple(out)

    def request(self, tokens: int, group: KVGroup | None = None) -> KVRequest:
        """Bytes that a request of ``tokens`` holds, in all groups or in one. ValueError unless at least 0."""
        tokens = count("tokens", tokens, 0)
        data = pages = whole = 0
        for one in self.groups if group is None else (group,):
            data, whole = data + one.data(tokens), whole + one.nbytes(tokens)
            pages += one.pages(tokens) * one.page_data * len(one.layers)
        return KVRequest(tokens, data, pages - data, whole - pages)

    @cached_property
    def weights(self) -> Weights:
        """An estimate of the model's parameters, on all ranks; ValueError that names a field which is missing."""
        counted = self.layers if any(group.kind.startswith("mtp") for group in self.groups) else tuple(
            layer for layer in self.layers if layer.kind != "mtp"
        )
        return weights_of(self.config, counted)

    def fit(
        self, memory: int | str, tokens: int, *, utilisation: float = 0.9, weights: int | str | None = None
    ) -> CardFit:
        """Requests of ``tokens`` that fit a card of ``memory`` bytes (``"80GB"``) beside the weights.

        utilisation   share of the memory that weights and cache may take, above 0 and at most 1
        weights       bytes of the weights on one rank; None: estimated, a share of 1 / ``degree`` of them

        ValueError for numbers out of range, and for weights that cannot be estimated.
        """
        tokens = count("tokens", tokens, 1)
        number = isinstance(utilisation, int | float) and not isinstance(utilisation, bool)
        require(number and 0 < utilisation <= 1, f"utilisation is {shown(utilisation)}", "above 0 and at most 1")
        if weights is None:
            held = -(-weight_bytes(self.config, self.weights) // self.degree)
        else:
            held = read_bytes("weights", weights)
        room = int(read_bytes("memory", memory) * utilisation) - held
        one = self.request(tokens).nbytes
        return CardFit(held, room, tokens, max(room, 0) // one if one else 0, self._longest(room))

    def _longest(self, room: int) -> int | None:
        if not self.growing_bytes_per_token and self.request(LONGEST).nbytes <= room:
            return None
        low, high = 0, LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.request(middle).nbytes <= room else (low, middle)
        return low

    def report(self, tokens: int = 8192) -> str:
        """A table of the groups, a request of ``tokens`` and its waste in words.

        >>> from kvlab.formats import kv_budget
        >>> print(kv_budget("gemma-3n-e4b").report(4096))
        Gemma-3n-E4B, bf16: bytes on one rank, a request of 4096 tokens
        kind     layers  of a token  page: tokens  bytes  padding    holds  pages     bytes  waste
        sliding      16        2048            16  32768        0      512     33  17301504   3.0 %
        full          4        2048            16  32768        0  all 4096    256  33554432   0.0 %
        all          20       40960                                               50855936   1.0 %
        layers that read the K and V of others: 20 to 34
        """
        tokens = count("tokens", tokens, 0)
        rank = "one rank" if self.degree == 1 else f"each of {self.degree} ranks"
        head = "kind, layers, of a token, page: tokens, bytes, padding, holds, pages, bytes, waste"
        rows = [tuple(head.split(", "))]
        for group in self.groups:
            one = self.request(tokens, group)
            state = not group.page_tokens
            held = "a state" if state else f"all {tokens}" if group.span is None else str(min(tokens, group.span))
            rows.append((
                group.kind, str(len(group.layers)), "" if state else str(group.token_bytes),
                "" if state else str(group.page_tokens), str(group.page_bytes),
                str(group.page_bytes - group.page_data), held, str(group.pages(tokens)), str(one.nbytes),
                f"{one.waste:.1%}".replace("%", " %"),
            ))
        every = self.request(tokens)
        layers = len({index for group in self.groups for index in group.layers})
        waste = f"{every.waste:.1%}".replace("%", " %")
        rows.append(("all", str(layers), str(self.bytes_per_token), "", "", "", "", "", str(every.nbytes), waste))
        return "\n".join([
            f"{self.name}, {self.kv_dtype}: bytes on {rank}, a request of {tokens} tokens",
            *text_columns(rows, left=[0]), *self.notes,
        ])


def _notes(
    layers: tuple[Layer, ...], counted: tuple[Layer, ...], groups: list[KVGroup], degree: int
) -> tuple[str, ...]:
    """What a reader of the numbers should know, in words."""
    notes = []
    shared = [layer.number for layer in layers if layer.shared is not None]
    if shared:
        notes.append(f"layers that read the K and V of others: {shared[0]} to {shared[-1]}")
    if len(counted) < len(layers):
        notes.append(f"layers that predict further tokens (MTP), not counted: {len(layers) - len(counted)}")
    for group in groups:
        if group.replicas > 1:
            notes.append(f"{group.kind}: {group.replicas} of {degree} ranks hold the same")
    return tuple(notes)


def kv_budget(
    config: Any, *, kv_dtype: str = "auto", page_size: int = 16, degree: int = 1, state_dtype: str | None = None,
    align: int = 1, uniform_pages: bool = False, step_tokens: int = 1, mtp: bool = False,
) -> KVBudget:
    """Exact bytes of a model's cache, by layer, group of layers, page and request.

    config          a Hugging Face configuration: a dict, its object, a file or its folder, or a name of ``MODELS``
    kv_dtype        ``"auto"`` (the model's), ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp8"``, ``"fp8_e5m2"``,
                    ``"fp8_per_token_head"``, ``"int8_per_token_head"``, ``"int4"``, ``"nvfp4"``, ``"fp8_ds_mla"``
    page_size       tokens of a page
    degree          of tensor parallelism: KV heads are dealt out, or replicated where there are fewer
    state_dtype     of recurrent states; None: the field ``mamba_ssm_cache_dtype``, else the model's
    align           bytes of which pages and states take a multiple
    uniform_pages   pages of one number of bytes for all groups, as in a pool that all share
    step_tokens     tokens of a step, which a window holds beside what they see: 1 in decode, a chunk in prefill
    mtp             count the layers of ``num_nextn_predict_layers`` too

    ValueError that names the field or the argument: a kind of layer that is unknown, an encoder beside the decoder,
    sizes that do not divide, a type that the layers have no rows for.

    >>> kv_budget("deepseek-v3", kv_dtype="fp8_ds_mla", page_size=64).bytes_per_token == 61 * 656
    True
    >>> kv_budget({"num_hidden_layers": 1, "layer_types": ["retention"]})
    Traceback (most recent call last):
        ...
    ValueError: layer_types[0] is 'retention': must be one of full_attention, attention, indexed_attention,
    deepseek_sparse_attention, sliding_attention, chunked_attention, linear_attention, mamba, mamba2, conv, hybrid,
    mlp, moe
    """
    page_size, degree = count("page_size", page_size, 1, 16), count("degree", degree, 1, 16)
    align, step_tokens = count("align", align, 1, 40), count("step_tokens", step_tokens, 1, 40)
    every, with_mtp = flag("uniform_pages", uniform_pages), flag("mtp", mtp)
    fields = read_config(config)
    layers = layers_of(fields)
    counted = layers if with_mtp else tuple(layer for layer in layers if layer.kind != "mtp")
    kv_dtype = fields.dtype if kv_dtype == "auto" else kv_dtype
    named = state_dtype or fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype") or fields.dtype
    known = isinstance(named, str) and named in STATE_BYTES
    require(known, f"state_dtype is {shown(named)}", f"one of {', '.join(STATE_BYTES)}")
    sizes = (STATE_BYTES[named], STATE_BYTES[fields.dtype])
    groups = groups_of(counted, kv_dtype, page_size, degree, step_tokens, sizes)
    groups = [aligned(group, align) for group in (uniform(groups) if every else groups)]
    notes = _notes(layers, counted, groups, degree)
    return KVBudget(fields.name, kv_dtype, degree, layers, tuple(groups), notes, fields)
