"""The five public documents of MAX's KV buffers against kvlab, name by name.

    python tools/max_documents.py

prints how many of the structs, traits, aliases, fields, parameters, methods, arguments and types that the documents
name are in kvlab under that name, which are of Mojo alone, with the reason, and which follow compiled MAX 26.7 instead
of the document. The exit status is 1 if a name is none of these.

``tests/data/max_documents.txt`` has the documents' declarations, ``tests/data/max_documents.toml`` a row for each name:
``at``, its place, ``a.b.c`` a member and ``a.b(c)`` a keyword; or ``mojo_only``, why there is none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.cache import ContinuousBatchingKVCache, PagedKVCache
from kvlab.memory import invalid
from kvlab.staging import DecodeStreamingKVBuffer, KVBuffer, KVBufferParams

DATA = Path(__file__).parents[1] / "tests" / "data"
VALUES = {
    "True": True, "False": False, "None": None, "0": 0, "1": 1, "Int(0)": 0, "Int(1)": 1, "Int(4)": 4,
    "TensorMapSwizzle.SWIZZLE_NONE": "SWIZZLE_NONE", "TensorMapL2Promotion.NONE": "NONE", "DType.invalid": invalid,
    "": inspect.Parameter.empty,
}


@dataclass(frozen=True, order=True)
class Name:
    """A name where it stands: ``of`` is its method or alias, empty for what belongs to the document itself. ``default``
    is the document's text, empty without one."""

    document: str
    kind: str
    of: str
    name: str
    default: str = ""

    def __str__(self) -> str:
        where = ".".join(part for part in (self.document, self.of) if part)
        default = f" = {self.default}" if self.default else ""
        return f"{where}: {self.kind} {self.name}{default}"


# What the documents name.


def names(text: str) -> set[Name]:
    """All names of the declarations, and all that stand in types, formulas and sentences."""
    found: set[Name] = set()
    known: set[str] = set()
    document = ""
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        word, rest = line.split(" ", 1)
        if word == "document":
            document, kind = re.fullmatch(r"(\w+) \((\w+)\)", rest).groups()  # type: ignore[union-attr]
            found.add(Name(document, kind, "", document))
        elif word in ("sentences", "implements"):
            kind = "trait" if word == "implements" else "sentence"
            found |= {Name(document, kind, "", name) for name in rest.split(", ")}
        elif word == "field":
            found.add(Name(document, "field", "", rest.split(":")[0]))
        else:
            found |= set(_declared(document, line))
        known |= {name for name in re.findall(r"\b_?[A-Za-z]\w*", line) if name not in _WORDS}
    plain = {entry.name for entry in found}
    return found | {Name("types", "type", "", name) for name in known - plain}


_WORDS = {
    "document", "sentences", "implements", "field", "struct", "comptime", "def", "static", "module", "trait", "out",
    "mut", "self", "deinit", "if", "else", "mul", "True", "False", "None",
}


def _declared(document: str, line: str) -> Iterator[Name]:
    """A struct's parameters, a compile-time member, an alias with parameters, or a method with all that it takes."""
    head = re.match(r"(static )?(struct|comptime|def) (\w+)", line)
    assert head is not None, line
    word, name = head[2], head[3]
    parameters, rest = _bracket(line[head.end() :], "[]")
    if word == "struct":
        yield from (Name(document, "parameter", "", *p) for p in _split(parameters))
        return
    if word == "comptime" and not parameters:
        yield Name(document, "comptime", "", name, rest.partition("= ")[2] if re.fullmatch(_LITERAL, rest) else "")
        return
    yield Name(document, "alias" if word == "comptime" else "method", "", name)
    yield from (Name(document, "parameter", name, *p) for p in _split(parameters))
    if word == "def":
        yield from (Name(document, "argument", name, *p) for p in _split(_bracket(rest, "()")[0]))


_LITERAL = r" = (False|Int\(\d\)|DType\.invalid)"


def _bracket(text: str, pair: str) -> tuple[str, str]:
    """What stands in the brackets that ``text`` begins with, and what follows them."""
    if not text.startswith(pair[0]):
        return "", text
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == pair[0]) - (letter == pair[1])
        if not depth:
            return text[1:at], text[at + 1 :]
    raise ValueError(text)


def _split(inside: str) -> Iterator[tuple[str, str]]:
    """Name and default of each of ``a: T, b: T = x``."""
    depth, piece = 0, ""
    for letter in inside + ",":
        depth += (letter in "[(") - (letter in ")]")
        if letter != "," or depth:
            piece += letter
            continue
        entry = re.match(r"(?:out |mut |deinit )?(\w+): (.*)", piece.strip())
        if entry is not None and entry[1] != "self":
            yield entry[1], _default(entry[2])
        piece = ""


def _default(declared: str) -> str:
    """The default of ``T = x``; a ``=`` inside brackets is a type's."""
    depth = 0
    for at, letter in enumerate(declared):
        depth += (letter in "[(") - (letter in ")]")
        if letter == "=" and not depth:
            return declared[at + 1 :].strip()
    return ""


# Where they are.


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: Name
    at: str = ""
    own: str = ""
    mojo_only: str = ""
    follows: str = ""


def table() -> list[Row]:
    """The rows of ``max_documents.toml``."""
    with (DATA / "max_documents.toml").open("rb") as file:
        rows = tomllib.load(file)["names"]
    out = []
    for row in rows:
        what = {key: row.pop(key) for key in ("document", "kind", "of", "name", "default") if key in row}
        out.append(Row(Name(**{"of": "", **what}), **row))
    return out


def wrong(row: Row) -> str | None:
    """What differs from the document at the place of the row; None where all is as it says."""
    if row.mojo_only:
        return "has a place, too" if row.at else None
    for at in [row.at, *implemented(row.at)]:
        path, _, keyword = at.partition("(")
        keyword = keyword.rstrip(")")
        try:
            thing = find(path)
        except (AttributeError, ImportError) as error:
            return f"{at}: {error}"
        documented = VALUES.get(row.name.default)  # None: worked out from other arguments
        if row.name.kind == "comptime" and row.name.default and at != row.at and thing != documented:
            return f"{at} is {thing!r}, in the document {row.name.default}"
        if (keyword or path.rpartition(".")[2]) != row.name.name:
            return f"{at} has another name"
        if keyword:
            taken = inspect.signature(thing).parameters.get(keyword)
            if taken is None or taken.kind not in (taken.POSITIONAL_OR_KEYWORD, taken.KEYWORD_ONLY):
                return f"{path} takes no keyword {keyword}"
            own = VALUES[row.own] if row.own else documented
            if taken.default not in (documented, own):
                return f"{at} has default {taken.default!r}, the document {row.name.default or 'none'!r}"
    return None


def implemented(at: str) -> list[str]:
    """The same member of both caches, for a member of the trait."""
    trait = "kvlab.cache.KVCacheT"
    caches = ("PagedKVCache", "ContinuousBatchingKVCache")
    return [at.replace(trait, f"kvlab.cache.{cache}") for cache in caches] if at.startswith(f"{trait}.") else []


def find(path: str) -> Any:
    """What ``path`` names: a module, an attribute, or one of an instance."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for done, name in enumerate(parts[end:], end):
            thing = _instances().get(".".join(parts[:done]), thing)
            if name not in getattr(thing, "__annotations__", ()):  # a protocol only declares its fields
                thing = getattr(thing, name)
        return thing
    raise ImportError(f"no module {parts[0]}")


@functools.cache
def _instances() -> dict[str, Any]:
    """One of each class whose members are those of its instances."""
    cache = PagedKVCache(np.zeros((1, 128, 1, 64), np.float16), [0], [[0]], 1, 1)
    params = KVBufferParams("fp16", (16, 16, 32), None, 128, 32, 32, 256, 64, 1, transpose=True)
    whole = KVBuffer(params, cache, 0, 0, end=1)
    return {
        "kvlab.staging.KVBuffer": whole, "kvlab.staging.KVMmaOp": whole.kv_mma_op, "kvlab.cache.PagedKVCache": cache,
        "kvlab.staging.DecodeStreamingKVBuffer": DecodeStreamingKVBuffer(params, cache, 0, 0, num_keys=1),
        "kvlab.cache.ContinuousBatchingKVCache": ContinuousBatchingKVCache(cache.blocks, [0], [0], 1, 1),
    }


def main() -> int:
    """Print the audit."""
    warnings.simplefilter("ignore")
    rows = table()
    missing = sorted(names((DATA / "max_documents.txt").read_text()) - {row.name for row in rows})
    differs = [(row, found) for row in rows if (found := wrong(row)) is not None]
    bad = {row.name for row, _ in differs}
    mojo = [row for row in rows if row.mojo_only]
    follows = [row for row in rows if row.follows and row.name not in bad]
    exact = len(rows) - len(mojo) - len(follows) - len(bad - {row.name for row in mojo})
    print(f"{len(rows)} names: {exact} exact, {len(mojo)} of Mojo alone, {len(follows)} as MAX 26.7 compiles them")
    for title, lines in (
        ("Missing in the table", [str(name) for name in missing]),
        ("Differs", [f"{row.name} -- {found}" for row, found in differs]),
        ("Mojo only", [f"{row.name} -- {row.mojo_only}" for row in mojo]),
        ("Follows MAX 26.7", [f"{row.name} -- {row.follows}" for row in follows]),
    ):
        if lines:
            print(f"\n{title}\n  " + "\n  ".join(lines))
    return 1 if missing or differs else 0


if __name__ == "__main__":
    sys.exit(main())
