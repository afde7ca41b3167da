"""Helpers that both twins call by one name, found from the text: their statements are compared, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvlab.mirror.source import TwinSide, read_helper


@dataclass(frozen=True)
class Module:
    """A module's text, and the file that its imports are found from."""

    source: str
    path: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.source)

    @property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def calls(self, function: str) -> dict[str, str]:
        """Functions that a function of this module calls: their names, without leading underscores and a kernel twin's
        ending, -> as written."""
        return _calls(self.source, function)

    def find(self, name: str) -> tuple[Module, str] | None:
        """Place of the definition of a function that this module calls ``name``: its module and its name there."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return self, name
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        there = self._imported(node)
                        return there.find(alias.name) if there is not None else None
        return None

    def _imported(self, node: ast.ImportFrom) -> Module | None:
        folder = Path(self.path).parent
        if node.level:
            folder = Path(*folder.parts[: len(folder.parts) - node.level + 1])
        else:
            while (folder / "__init__.py").is_file():
                folder = folder.parent
        file = folder.joinpath(*(node.module or "").split("."))
        for path in (file.with_suffix(".py"), file / "__init__.py"):
            if path.is_file():
                return Module(path.read_text(encoding="utf-8"), str(path))
        return None


def bare(name: str) -> str:
    """Name of a helper on both sides."""
    return name.lstrip("_").removesuffix("_kernel")


@lru_cache(maxsize=128)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


@lru_cache(maxsize=1024)
def _calls(source: str, function: str) -> dict[str, str]:
    found = {}
    for node in _parsed(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for part in ast.walk(node):
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                    found[bare(part.func.id)] = part.func.id
    return found


def helper_pairs(
    kernel: Module, emulator: Module, functions: tuple[str, str]
) -> Iterator[tuple[str, TwinSide, TwinSide]]:
    """(name, kernel's helper, emulator's) of all that both twins call by one name, and that those call in turn."""
    waiting = [
        (kernel, name.strip(), emulator, other.strip())
        for name in functions[0].split(",")
        for other in functions[1].split(",")
    ]
    seen: set[str] = set()
    while waiting:
        ours, function, theirs, other = waiting.pop(0)
        mine, its = ours.calls(function), theirs.calls(other)
        for name in mine:
            if name in its and name not in seen:
                found, match = ours.find(mine[name]), theirs.find(its[name])
                if found is None or match is None or (found[0].path, found[1]) == (match[0].path, match[1]):
                    continue
                seen.add(name)
                yield (
                    name,
                    read_helper(found[0].source, found[1], found[0].path),
                    read_helper(match[0].source, match[1], match[0].path),
                )
                waiting.append((found[0], found[1], match[0], match[1]))


def helpers_alone(kernel: Module, functions: str, paired: set[str]) -> tuple[str, ...]:
    """Helpers that a kernel calls and that are not ``paired``: the emulator's machine does what they do, or NumPy."""
    called = [name for function in functions.split(",") for name in kernel.calls(function.strip()).items()]
    return tuple(dict.fromkeys(one for one, name in called if one not in paired and kernel.find(name) is not None))
