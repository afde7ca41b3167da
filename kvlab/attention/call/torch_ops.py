"""Operators of torch, ``torch.ops.kvlab``: what torch.compile, torch.export and fake tensors see of a call.

Importing this module registers an operator for each public operation, and for one with ``out`` the overload ``.out``.
Schemas follow from the signatures and operands of the operations: what an argument is (an array, a number, a window, a
mask, angles, a collection) says which values of a schema carry it. The implementation is the operation itself, the fake
one the shape of its result. Operators of attention give ``(out, lse)``, ``.out`` the lse.

A call that is traced goes through its operator (:func:`through`). What no operator carries breaks the graph and runs as
it is; where there is no graph to break, it is a ValueError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvlab.attention.call.operation import PUBLIC, PublicOperation
from kvlab.attention.call.results import results
from kvlab.attention.features import masks
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.features.rope import Rope
from kvlab.cache import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection

Values: TypeAlias = "dict[str, Any]"
"""Values of a schema by name. None: the default of the operation."""

REFUSAL = (
    "arguments of kvlab.attention.{} in a graph of torch: must be tensors (that need no gradient), numbers, names, "
    "masks of kvlab.attention.masks, a Rope or a collection over tensors; a mask of one's own, plan, traffic and "
    "NumPy arrays are for calls outside of it, as with fullgraph=False"
)
MISPLACES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Tells whether inductor may write what does not begin its storage to another place, as that of torch 2.11 does."""
MISPLACED = (
    "{} of kvlab.attention.{} in a graph of torch before 2.13: must begin its storage, as not kv[1] does, or the call "
    "be outside of the graph, as with fullgraph=False"
)
WORDS = {
    "int": "SymInt", "float": "float", "bool": "bool", "str": "str", "Backend": "str", "PortableBackend": "str",
    "Arch": "str", "KVLayout": "str", "Arithmetic": "str",
}
"""Annotation of a plain argument -> its type in a schema."""
WINDOW = "int | tuple[int | None, int | None]"
TYPES: dict[str, tuple[type, ...]] = {"SymInt": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}
PARTS: dict[type, tuple[str, ...]] = {
    masks.NullMask: (), masks.CausalMask: (), masks.SlidingWindowCausalMask: ("window",),
    masks.SlidingWindowNonCausalMask: ("window",), masks.BandMask: ("left", "right"), masks.ChunkedMask: ("chunk",),
    masks.ChunkedCausalMask: ("chunk",), masks.CausalPaddingMask: ("valid_lengths",),
    masks.MaterializedMask: ("array",), masks.AndMask: ("a", "b"), masks.OrMask: ("a", "b"),
}
"""Masks that are carried, and what they are made of: numbers, an array, or two masks."""
SIDES = PARTS[masks.BandMask]
"""Parts that may be None: no bound, carried as further than any key."""


@dataclass(frozen=True)
class Plain:
    """An argument that is a value of the schema itself.

    Subclasses tell of other arguments: ``fields``, names and types of their values; ``carried``, the values of an
    argument, None where they cannot tell it; ``restored``, the argument again.
    """

    name: str
    type: str = "Tensor"

    @property
    def needed(self) -> tuple[str, ...]:
        """The fields without which there is no such argument."""
        return (self.name,)

    @property
    def fields(self) -> dict[str, str]:
        return {self.name: self.type}

    def carried(self, value: Any) -> Values | None:
        return {self.name: value} if type(value) in TYPES[self.type] else None

    def restored(self, values: Values) -> Any:
        return values.get(self.name)


class Array(Plain):
    """A tensor."""

    def carried(self, value: Any) -> Values | None:
        return {self.name: value} if is_carried(value) else None


class ArrayOrNumber(Plain):
    """A tensor or a number."""

    @property
    def fields(self) -> dict[str, str]:
        return {self.name: "Tensor", f"{self.name}_number": "float"}

    def carried(self, value: Any) -> Values | None:
        if type(value) in TYPES["float"]:
            return {f"{self.name}_number": value}
        return {self.name: value} if is_carried(value) else None

    def restored(self, values: Values) -> Any:
        array, number = (values.get(name) for name in self.fields)
        return number if array is None else array


class WindowSides(Plain):
    """A number of keys, or a pair. None on a side of it is further than any key."""

    def carried(self, value: Any) -> Values | None:
        sides = value if type(value) in (tuple, list) and len(value) == 2 else (value,)
        if not all(type(side) is int or (side is None and len(sides) == 2) for side in sides):
            return None
        return {self.name: [UNLIMITED if side is None else side for side in sides]}

    def restored(self, values: Values) -> Any:
        sides = values.get(self.name)
        return sides if sides is None else sides[0] if len(sides) == 1 else tuple(sides)


class MaskParts(Plain):
    """A mask: the classes that it is made of, the outer ones first, and their numbers and arrays in this order."""

    @property
    def fields(self) -> dict[str, str]:
        return {self.name: "str", f"{self.name}_numbers": "SymInt[]", f"{self.name}_arrays": "Tensor[]"}

    def carried(self, value: Any) -> Values | None:
        words: list[str] = []
        numbers: list[int] = []
        arrays: list[Any] = []
        known = self.gather(value, words, numbers, arrays)
        return dict(zip(self.fields, (" ".join(words), numbers, arrays), strict=True)) if known else None

    def gather(self, value: Any, words: list[str], numbers: list[int], arrays: list[Any]) -> bool:
        """Add what ``value`` is made of. False for another mask, and for other parts."""
        if type(value) not in PARTS or getattr(value, "start", None) is not None:
            return False
        words.append(type(value).__name__)
        for part in PARTS[type(value)]:
            inner = getattr(value, part)
            inner = UNLIMITED if inner is None and part in SIDES else inner
            if type(inner) is int:
                numbers.append(inner)
            elif is_carried(inner):
                arrays.append(inner)
            elif not self.gather(inner, words, numbers, arrays):
                return False
        return True

    def restored(self, values: Values) -> Any:
        words, numbers, arrays = (values.get(name) for name in self.fields)
        if words is None:
            return None
        names, by_name = iter(words.split()), {mask.__name__: mask for mask in PARTS}
        left = {"window": iter(numbers or ()), "array": iter(arrays or ())}
        left |= dict.fromkeys(("chunk", *SIDES), left["window"]) | {"valid_lengths": left["array"]}

        def build() -> Any:
            mask = by_name[next(names)]
            return mask(*(next(left[part]) if part in left else build() for part in PARTS[mask]))

        return build()


class Angles(Plain):
    """A Rope, field by field."""

    @property
    def fields(self) -> dict[str, str]:
        types = {"cos": "Tensor", "sin": "Tensor", "interleaved": "bool", "first": "SymInt"}
        return {f"{self.name}_{part}": kind for part, kind in types.items()}

    def carried(self, value: Any) -> Values | None:
        if type(value) is not Rope or not (is_carried(value.cos) and is_carried(value.sin)):
            return None
        return dict(zip(self.fields, (value.cos, value.sin, value.interleaved, value.first), strict=True))

    def restored(self, values: Values) -> Any:
        cos, sin, interleaved, first = (values.get(name) for name in self.fields)
        return None if cos is None else Rope(cos, sin, bool(interleaved), first)


class Collection(Plain):
    """A collection: the arguments of its constructor, of which ``kv_params`` follow from the blocks. A continuous one
    has no number of pages.
    """

    @property
    def needed(self) -> tuple[str, ...]:
        return ContinuousBatchingKVCacheCollection._arrays

    @property
    def fields(self) -> dict[str, str]:
        types = dict.fromkeys(PagedKVCacheCollection._arrays, "Tensor")
        types |= dict.fromkeys(PagedKVCacheCollection._settings, "SymInt") | {"strict": "bool"}
        return {name: kind for name, kind in types.items() if name != "kv_params"}

    def carried(self, value: Any) -> Values | None:
        if type(value) not in (PagedKVCacheCollection, ContinuousBatchingKVCacheCollection):
            return None
        found = {name: getattr(value, name, None) for name in self.fields}
        arrays = [found[name] for name, kind in self.fields.items() if kind == "Tensor" and found[name] is not None]
        return found if all(is_carried(array) for array in arrays) else None

    def restored(self, values: Values) -> Any:
        found = {name: values[name] for name in self.fields if values.get(name) is not None}
        return (PagedKVCacheCollection if "total_num_pages" in found else ContinuousBatchingKVCacheCollection)(**found)


class Nothing(Plain):
    """An argument that no schema carries."""

    @property
    def fields(self) -> dict[str, str]:
        return {}

    def carried(self, value: Any) -> Values | None:
        return None


def is_carried(value: Any) -> bool:
    """True for a tensor through which no gradient would have to flow."""
    return isinstance(value, torch.Tensor) and not (value.requires_grad and torch.is_grad_enabled())


def part_of(parameter: inspect.Parameter) -> Plain:
    """The way in which an argument is carried, by its annotation.

    >>> part_of(PUBLIC["mha_decode_paged"].__signature__.parameters["k_scale"]).fields
    {'k_scale': 'Tensor', 'k_scale_number': 'float'}
    """
    name, words = parameter.name, str(parameter.annotation).removesuffix(" | None")
    if words in WORDS:
        return Plain(name, WORDS[words])
    if words == WINDOW:
        return WindowSides(name, "SymInt[]")
    classes = {"Array": Array, "Array | float": ArrayOrNumber, "Mask": MaskParts, "Rope": Angles}
    return classes.get(words, Collection if "Collection" in words else Nothing)(name)


class Operator:
    """The operators of an operation: ``functional``, which gives new results, and ``writing``, which writes ``out``."""

    def __init__(self, operation: PublicOperation[Any, Any]) -> None:
        self.operation, self.name = operation, operation.__name__
        parameters = operation.__signature__.parameters
        self.defaults = {name: one.default for name, one in parameters.items()}
        self.may_be_none = {name for name, one in parameters.items() if str(one.annotation).endswith("| None")}
        self.parts = {
            name: part_of(one) for name, one in parameters.items() if name not in ("out", "return_lse")
        }
        self.order = tuple(name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY)
        self.required = tuple(name for name, default in self.defaults.items() if default is inspect.Parameter.empty)
        self.attends = "out" in parameters
        self.outside = torch.compiler.disable(self.run, reason=REFUSAL.format(self.name))
        self.names: dict[str, list[str]] = {}
        self.functional = self.defined("", self.run_functional, self.fake_functional)
        self.writing: Any = self.defined(".out", self.run_writing, self.fake_writing) if self.attends else None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The call as it is."""
        return self.operation.made(*args, **kwargs).run()

    def schema(self, overload: str) -> tuple[list[str], list[str], str]:
        """Names of the values that an operator takes, arrays that a call needs first; of those it writes; its schema.
        Arrays that a call may write have no default: torch 2.11 looks for each among the arguments.
        """
        needed, optional, written = {}, {}, ["out"] * bool(overload)
        for name, part in self.parts.items():
            for field, kind in part.fields.items():
                if field in self.operation.call_type.writes:
                    kind = f"Tensor({chr(ord('a') + len(written))}!)"
                    written.append(field)
                if self.defaults[name] is inspect.Parameter.empty and field in part.needed:
                    needed[field] = f"{kind}{'?' * (name in self.may_be_none)} {field}"
                elif field in written:
                    needed[field] = f"{kind}? {field}"
                else:
                    optional[field] = f"{kind}? {field}=None"
        if overload:
            needed["out"] = "Tensor(a!) out"
        gives = "Tensor" if overload else "(Tensor, Tensor)" if self.attends else "()"
        values = needed | optional
        return list(values), written, f"({', '.join(values.values())}) -> {gives}"

    def in_order(self, overload: str, values: Values) -> list[Any]:
        """Values as an operator's arguments by position."""
        return [values.get(name) for name in self.names[overload]]

    def defined(self, overload: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        """An operator, which calls ``run`` and ``fake`` with values by name, those that are not None."""
        names, written, schema = self.schema(overload)
        self.names[overload] = names

        def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                values = dict(zip(names, args, strict=False)) | kwargs
                return function({name: value for name, value in values.items() if value is not None})

            return call

        name = f"kvlab::{self.name}{overload}"
        made = torch.library.custom_op(name, by_name(run), mutates_args=written, schema=schema)

        def in_place(values: Values) -> Any:
            beside = [name for name in written if MISPLACES and name in values and values[name].storage_offset()]
            if beside:
                raise NotImplementedError(MISPLACED.format(", ".join(beside), self.name))
            return fake(values)

        made.register_fake(by_name(in_place))
        return getattr(getattr(torch.ops.kvlab, self.name), overload[1:] or "default")

    def restored(self, values: Values) -> Values:
        """The arguments of a call."""
        found = {name: part.restored(values) for name, part in self.parts.items()}
        empty = inspect.Parameter.empty
        return {name: value for name, value in found.items() if value is not None or self.defaults[name] is empty}

    def run_functional(self, values: Values) -> Any:
        """The call; results contiguous, as the fake ones are."""
        if not self.attends:
            return self.run(**self.restored(values))
        out, lse = self.run(**self.restored(values), return_lse=True)
        return out.contiguous(), lse.contiguous()

    def run_writing(self, values: Values) -> Any:
        """The call into ``out``: the lse."""
        return self.run(**self.restored(values), out=values["out"], return_lse=True)[1].contiguous()

    def fake_functional(self, values: Values) -> Any:
        """Results of the call's shape."""
        if not self.attends:
            return None
        pages = {"v_cache": values["blocks"]} if "blocks" in values and "v" not in values else {}
        call = self.operation.call_type(**(values | pages))
        return results(values[self.order[0]], None, call.result_shape())

    def fake_writing(self, values: Values) -> Any:
        """An lse for ``out``."""
        return results(values["out"], values["out"], values["out"].shape)[1]

    def carried(self, args: tuple[Any, ...], kwargs: Values) -> Values | None:
        """The values of a call's arguments, but for ``out`` and ``return_lse``. None for a call that has no such."""
        if len(args) > len(self.order):
            return None
        values: Values = {}
        given: list[str] = []
        for name, value in (*zip(self.order, args, strict=False), *kwargs.items()):
            if name not in self.defaults or name in given:
                return None
            given.append(name)
            if name not in self.parts:
                continue
            default = self.defaults[name]
            if value is None and (default is None or name in self.may_be_none):
                values |= {} if default is None else {name: None}
                continue
            found = self.parts[name].carried(value)
            if found is None:
                return None
            values |= found
        return values if all(name in given for name in self.required) else None


def through(operation: PublicOperation[Any, Any], args: tuple[Any, ...], kwargs: Values) -> Any:
    """The call of an operation that is traced: by its operator, or outside of the graph."""
    operator = OPERATORS[operation.__name__]
    values, out = operator.carried(args, kwargs), kwargs.get("out")
    return_lse = kwargs.get("return_lse", operator.defaults.get("return_lse", False))
    if values is None or type(return_lse) is not bool or not (out is None or is_carried(out)):
        if torch.compiler.is_dynamo_compiling():
            return operator.outside(*args, **kwargs)
        raise ValueError(REFUSAL.format(operation.__name__))
    if not operator.attends:
        return operator.functional(*operator.in_order("", values))
    if out is None:
        out, lse = operator.functional(*operator.in_order("", values))
    else:
        lse = operator.writing(*operator.in_order(".out", values | {"out": out}))
    return (out, lse) if return_lse else out


OPERATORS = {name: Operator(operation) for name, operation in PUBLIC.items()}
"""The operators by the names of their operations."""
