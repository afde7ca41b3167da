"""How easily a stranger finds a room: the package measured by files, parameters, repeated lines and import arrows.

    python tools/house.py            # the whole list
    python tools/house.py --most 20  # so many rows of each part

=============  ========================================================================================================
part           what it counts
=============  ========================================================================================================
lines          of kvlab/: code, docstrings, comments, blank lines; files
rooms          files of a folder itself, the largest first; at most 25
parameters     kernels above 32, other functions above 12
repeated       pairs of places that share six lines or more of one shape: the same tokens, whatever the names, numbers
               and strings. Imports, docstrings and lone brackets do not count; a shape that stands in more than eight
               places is a habit of the language. Fields of a class are alike whatever they mean (`a: int`), and so
               are rows of a table (`"a": "b"`): how many pairs are left if these count with their names, is told
               besides, and how many of those are twins of one operation, which have to be alike
names          classes of one name in two modules; files of one name that are not siblings: the operations' folders
               share the names of their files, and a picture's file has the name of what it draws
back up        imports from a lower room of a higher one, those inside functions, too. Rooms by the order of the
               contract "the arrows point one way" of pyproject.toml
features       files that name one, in kvlab/ and in tests/: what a change of it would touch
architectures  files of kvlab/ that name one: all, those outside of the rooms that know them, and of these those that
               decide by it: the name, or the beginning of names, is compared with something
=============  ========================================================================================================
"""

from __future__ import annotations

import argparse
import ast
import io
import keyword
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN, COMMON = 6, 8
"""Lines that make a repetition, and places that make a habit."""
MOST_FILES, MOST_OF_A_KERNEL, MOST_PARAMETERS = 25, 32, 12
FEATURES = ("softcap", "sinks", "alibi_slopes", "temperature", "window", "rope")
ARCHITECTURES = ("sm_80", "sm_90", "gfx942", "gfx950")
KNOW_THEM = ("kvlab/hardware/", "kvlab/attention/machines/")
PREFIX = re.compile(r"(sm_|gfx)\w*")


@dataclass(frozen=True)
class Module:
    """A file of the package, read once."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def docstrings(self) -> set[int]:
        """The numbers of the lines of all docstrings."""
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    lines |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        return lines


def modules(folder: str = "kvlab") -> list[Module]:
    """All files of a folder of the repository."""
    texts = [(path, path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Module(path, text, ast.parse(text)) for path, text in texts]


def lines(every: Iterable[Module]) -> Counter[str]:
    """Lines by kind; their sum is that of the files."""
    counts: Counter[str] = Counter()
    for module in every:
        docstrings = module.docstrings()
        for number, line in enumerate(module.text.splitlines(), 1):
            word = line.strip()
            kind = "docstrings" if number in docstrings else "blank" if not word else "code"
            counts["comments" if kind == "code" and word.startswith("#") else kind] += 1
    return counts


def rooms(every: Iterable[Module]) -> Counter[str]:
    """Files of each folder itself."""
    return Counter(str(module.path.parent.relative_to(ROOT)) for module in every)


def parameters(every: Iterable[Module]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(parameters, where) of all kernels and of all other functions, the most first."""
    kernels, others = [], []
    for module in every:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                (kernels if is_kernel else others).append((count, f"{module.name}:{node.lineno} {node.name}"))
    return sorted(kernels, reverse=True), sorted(others, reverse=True)


def _shapes(module: Module, fields: bool = False) -> Iterator[tuple[int, str]]:
    """(number, shape) of each line that counts; ``fields`` of a class and keys of a table with their names."""
    left_out, named = module.docstrings(), dict[int, str]()
    for node in ast.walk(module.tree):
        if fields and isinstance(node, ast.ClassDef):
            named |= {line.lineno: ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)}
        if fields and isinstance(node, ast.Dict):
            named |= {key.lineno: ast.unparse(key) for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    by_line: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.NAME:
            by_line[token.start[0]].append(token.string if keyword.iskeyword(token.string) else "name")
        elif token.type in (tokenize.NUMBER, tokenize.STRING, tokenize.OP):
            text = {tokenize.NUMBER: "0", tokenize.STRING: "''"}.get(token.type, token.string)
            by_line[token.start[0]].append(text)
    for number in sorted(by_line.keys() - left_out):
        shape = " ".join([*by_line[number], *([named[number]] if number in named else [])])
        if len(by_line[number]) > 2 and re.search("name|0|''", shape):
            yield number, shape


def repeated(every: Iterable[Module], fields: bool = False) -> list[tuple[int, str]]:
    """(lines, where) of the longest run that two files, or two places of one, share, the longest first."""
    files = [(module.name, list(_shapes(module, fields))) for module in every]
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for f, (_, shapes) in enumerate(files):
        for i in range(len(shapes) - RUN + 1):
            places[tuple(shape for _, shape in shapes[i : i + RUN])].append((f, i))
    starts = {
        (one, other)
        for found in places.values() if 1 < len(found) <= COMMON
        for n, one in enumerate(found) for other in found[n + 1 :]
        if one[0] != other[0] or other[1] - one[1] >= RUN
    }
    longest: dict[tuple[int, int], tuple[int, str]] = {}
    for (f, i), (g, j) in starts:
        if ((f, i - 1), (g, j - 1)) in starts:
            continue
        n = 0
        while ((f, i + n), (g, j + n)) in starts:
            n += 1
        count, here, there = n + RUN - 1, files[f][1], files[g][1]
        one = f"{files[f][0]}:{here[i][0]}-{here[i + count - 1][0]}"
        other = f"{files[g][0]}:{there[j][0]}-{there[j + count - 1][0]}"
        longest[f, g] = max(longest.get((f, g), (0, "")), (count, f"{one} ~ {other}"))
    return sorted(longest.values(), reverse=True)


def of_twins(where: str) -> bool:
    """Tells whether the two places of a pair are a kernel and its emulator."""
    (one, a), (other, b) = (place.partition(":")[0].rsplit("/", 1) for place in where.split(" ~ "))
    emulators = [name.endswith("emulator.py") for name in (a, b)]
    return one == other and sum(emulators) == 1 and len({name.startswith("hopper") for name in (a, b)}) == 1


def of_one_name(every: Iterable[Module]) -> list[str]:
    """Names that several modules give to a class of their own, and these modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in every:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return sorted(f"{name} {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def files_of_one_name(every: Iterable[Module]) -> list[str]:
    """Names of files in several rooms, and these files, siblings and pictures aside."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for module in every:
        *folders, file = module.name.removesuffix(".py").split("/")
        if not file.startswith("__") and folders[1:2] != ["viz"]:
            room = "kvlab/attention" if folders[:2] == ["kvlab", "attention"] else "/".join(folders)
            places[file].setdefault(room, module.name)
    return sorted(f"{name}.py {', '.join(where.values())}" for name, where in places.items() if len(where) > 1)


def _levels() -> dict[str, int]:
    """The height of each room, from the contract in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(c for c in settings["contracts"] if c["name"] == "the arrows point one way")
    return {layer: -height for height, layer in enumerate(contract["layers"])}


def back_up(every: Iterable[Module]) -> list[str]:
    """Imports of a higher room, wherever in the file they stand."""
    levels, found = _levels(), []

    def level(name: str) -> int | None:
        parts = name.split(".")
        rooms = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((levels[room] for room in rooms if room in levels), None)

    for module in every:
        own = module.path.relative_to(ROOT).with_suffix("").parts
        here = level(".".join(own))
        for node in ast.walk(module.tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                there = level(name)
                if here is not None and there is not None and there > here:
                    found.append(f"{module.name}:{node.lineno} {name}")
    return found


def naming(every: Iterable[Module], word: str) -> int:
    """Files in which a word stands alone."""
    return sum(re.search(rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])", module.text) is not None for module in every)


def decides(module: Module) -> bool:
    """Whether a file compares something with the name of an architecture, or asks how one begins."""
    for node in ast.walk(module.tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = list(node.args) if node.func.attr in ("startswith", "removeprefix") else []
        words = (word.value for one in asked for word in ast.walk(one) if isinstance(word, ast.Constant))
        if any(isinstance(word, str) and PREFIX.fullmatch(word) for word in words):
            return True
    return False


def _rows(rows: Iterable[object], most: int) -> None:
    for row in list(rows)[:most]:
        print(f"    {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--most", type=int, default=5, help="rows of each part")
    most = parser.parse_args().most
    every, tests = modules(), modules("tests")
    counts, folders = lines(every), rooms(every)
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    print(f"lines          {sum(counts.values())}: {kinds}; {len(every)} files")
    crowded = [(n, room) for room, n in folders.most_common() if n > MOST_FILES]
    print(f"rooms          {len(folders)}, {len(crowded)} of more than {MOST_FILES} files")
    _rows((f"{n} {room}" for n, room in crowded), most)
    kernels, others = parameters(every)
    for what, those, limit in (("kernels", kernels, MOST_OF_A_KERNEL), ("functions", others, MOST_PARAMETERS)):
        above = [f"{n} {where}" for n, where in those if n > limit]
        others_own = sum("kvlab/integrations/" in where for where in above)
        also = f"; {others_own} of them in kvlab/integrations, as others' signatures are" if others_own else ""
        print(f"parameters     {len(above)} of {len(those)} {what} above {limit}{also}")
        _rows(above, most)
    pairs = repeated(every)
    by_name = [where for _, where in repeated(every, fields=True)]
    print(f"repeated       {len(pairs)} pairs of {RUN} lines or more; {len(by_name)} where fields and rows count with "
          f"their names, {sum(map(of_twins, by_name))} of these twins")
    _rows((f"{n} lines {where}" for n, where in pairs), most)
    same, files = of_one_name(every), files_of_one_name(every)
    print(f"names          {len(same)} of several classes, {len(files)} of files that are not siblings")
    _rows([*same, *files], most)
    up = back_up(every)
    print(f"back up        {len(up)} imports")
    _rows(up, most)
    print("features       " + ", ".join(f"{word} {naming(every, word)}+{naming(tests, word)}" for word in FEATURES))
    outside = [module for module in every if not module.name.startswith(KNOW_THEM)]
    print("architectures  " + ", ".join(f"{w} {naming(every, w)}, {naming(outside, w)} outside" for w in ARCHITECTURES))
    deciding = [module.name for module in outside if decides(module)]
    print(f"               {len(deciding)} decide by one outside")
    _rows(deciding, most)


if __name__ == "__main__":
    main()
