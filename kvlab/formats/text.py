"""Text of a format: axes from the outermost to the innermost, groups of fields, element types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.common.checks import require, shown

from .field import AXES, REPLICA, Field, Piece
from .stored import stored_of

TOKEN = re.compile(
    r"\s*(\(|\)(?:%{0})?|,|\||pad:{0}|\+{0}|-?[a-z]+(?:/{0})?:{0}(?:@{0})?|[a-z]+(?:_[a-z]+)?\.[a-z]\w*)".replace(
        "{0}", r"\d{1,15}(?!\d)"
    ), re.ASCII
)
AXIS = re.compile(r"(-?)([a-z]+)(?:/(\d+))?:(\d+)(?:@(\d+))?")
KINDS = ("scale", "min")
MOST_TOKENS, MOST_BYTES = 300, 1 << 56


@dataclass(frozen=True)
class Node:
    """Part of a format: an axis over a node, a group of nodes, a padding, or a leaf (a field)."""

    kind: str
    name: str = ""
    numbers: tuple[int, ...] = ()
    inner: tuple[Node, ...] = ()

    def __str__(self) -> str:
        if self.kind == "axis":
            sign, divisor, size, stride = self.numbers
            part = f"/{divisor}" if divisor > 1 else ""
            apart = f"@{stride}" if stride else ""
            return f"{'-' * (sign < 0)}{self.name}{part}:{size}{apart} {self.inner[0]}"
        if self.kind == "group":
            between = " | " if self.name == "|" else ", "
            return f"({between.join(map(str, self.inner))}){f'%{self.numbers[0]}' if self.numbers[0] > 1 else ''}"
        if self.kind == "offset":
            return f"+{self.numbers[0]} {self.inner[0]}"
        return f"pad:{self.numbers[0]}" if self.kind == "pad" else self.name


def parse(text: str) -> Node:
    """The tree of a text; ValueError that shows the place where it cannot be read."""
    tokens: list[str] = []
    at = 0
    while at < len(text.rstrip()):
        found = TOKEN.match(text, at)
        require(
            found, f"text cannot be read from {shown(text[at : at + 24])}",
            'axes "name/divisor:size", groups "(a, b)", leaves "k.bf16", "pad:bytes"',
        )
        assert found is not None
        tokens.append(found[1])
        at = found.end()
    require(len(tokens) <= MOST_TOKENS, f"text has {len(tokens)} words", f"at most {MOST_TOKENS}")
    stream = iter([*tokens, ""])
    node, rest = _item(next(stream), stream)
    require(rest == "", f"text goes on with {shown(rest)} after its end", "one item, or a group of several")
    return node


def _item(token: str, stream: Iterator[str]) -> tuple[Node, str]:
    """An item that begins with ``token``, and the token after it."""
    if token == "(":
        members: list[Node] = []
        signs: set[str] = set()
        rest = ""
        while not rest.startswith(")"):
            member, rest = _item(next(stream, ""), stream)
            members.append(member)
            signs |= {rest} - {rest if rest.startswith(")") else ""}
            require(rest[:1] in {",", "|", ")"} and rest, f"text has {shown(rest)} in a group", '"," or "|" or ")"')
        require(len(signs) < 2, 'text has "," and "|" in one group', "one of them")
        align = int(rest.partition("%")[2] or 1)
        require(align > 0, "text aligns a group with %0", "%1 or more bytes")
        return Node("group", signs.pop() if signs else ",", (align,), tuple(members)), next(stream, "")
    if token.startswith("+"):
        inner, rest = _item(next(stream, ""), stream)
        return Node("offset", "", (int(token[1:]),), (inner,)), rest
    if token.startswith("pad:"):
        return Node("pad", "", (int(token[4:]),)), next(stream, "")
    if "." in token:
        name, _, stored = token.partition(".")
        stored_of(stored)
        kind = name.partition("_")[2]
        require(kind in ("", *KINDS), f"field is {shown(name)}", f"a name alone, or with _{' or _'.join(KINDS)}")
        return Node("leaf", token), next(stream, "")
    found = AXIS.fullmatch(token)
    require(found, f"text has {shown(token)} where an item begins", "an axis, a group, a leaf, or pad")
    assert found is not None
    sign, axis, divisor, size, stride = found.groups()
    accepted = (*AXES, "kv", REPLICA)
    require(axis in accepted, f"axis is {shown(axis)}", f"one of {', '.join(accepted)}")
    numbers = (-1 if sign else 1, int(divisor or 1), int(size), int(stride or 0))
    require(min(numbers[1:3]) > 0, f"axis {token} has no index", "sizes and divisors from 1")
    inner, rest = _item(next(stream, ""), stream)
    return Node("axis", axis, numbers, (inner,)), rest


def place(node: Node) -> tuple[list[Field], int]:
    """The fields of a tree, and its size in bits."""
    if node.kind == "leaf":
        name, _, stored = node.name.partition(".")
        return [Field(name, stored, 0, ())], stored_of(stored).bits
    if node.kind == "pad":
        return [], 8 * node.numbers[0]
    if node.kind == "offset":
        fields, bits = place(node.inner[0])
        return [field.moved(8 * node.numbers[0]) for field in fields], bits + 8 * node.numbers[0]
    if node.kind == "group":
        out: list[Field] = []
        end = 0
        for member in node.inner:
            fields, bits = place(member)
            require(bits % 8 == 0, f"member {str(member)!r} of a group has {bits} bits", "whole bytes")
            out += [field.moved(0 if node.name == "|" else end) for field in fields]
            end = max(end, bits) if node.name == "|" else end + bits
        unit = 8 * node.numbers[0]
        return out, -(-end // unit) * unit
    sign, divisor, size, apart = node.numbers
    fields, bits = place(node.inner[0])
    stride = 8 * apart or bits
    start = (size - 1) * stride if sign < 0 else 0
    span = (size - 1) * stride + bits if apart else size * stride
    if node.name != "kv":
        return [field.moved(start, Piece(node.name, divisor, size, sign * stride)) for field in fields], span
    require(size == 2 and divisor == 1, f"axis kv/{divisor}:{size}", "kv:2")
    for field in fields:
        require(
            field.name.partition("_")[0] not in {"k", "v"}, f"field {field.name} lies under an axis kv",
            'a name for both: "kv", "scale", "min"',
        )
    pair = (("k", start), ("v", start + sign * stride))
    return [
        Field(one if f.name == "kv" else f"{one}_{f.name}", f.stored, f.base + at, f.pieces)
        for one, at in pair for f in fields
    ], span


def resized(node: Node, axis: str, extent: int, above: int = 0) -> Node:
    """The tree with another extent of an axis: its coarsest piece of each field changes."""
    inner = node.inner
    if node.kind == "axis" and node.name == axis:
        sign, divisor, _, stride = node.numbers
        below = max((n.numbers[1] for n in _walk(inner[0]) if n.kind == "axis" and n.name == axis), default=0)
        if divisor > max(above, below):
            require(
                extent % divisor == 0 and extent > 0, f"{axis} is {extent}",
                f"a multiple of {divisor} from {divisor}, as the format has {axis}/{divisor}",
            )
            return Node("axis", axis, (sign, divisor, extent // divisor, stride), inner)
        above = max(above, divisor)
    return Node(node.kind, node.name, node.numbers, tuple(resized(one, axis, extent, above) for one in inner))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for inner in node.inner:
        yield from _walk(inner)
