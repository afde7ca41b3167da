"""``kvlab explain`` and ``kvlab lockstep``: calls of operations whose arrays are described on the command line."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.markup import escape

from kvlab import attention
from kvlab.attention import explain
from kvlab.attention.call.operation import PublicOperation
from kvlab.command.answers import Answer, check_output
from kvlab.common.checks import require
from kvlab.memory import as_dtype
from kvlab.replay import load, load_flashinfer, lockstep_case, replay
from kvlab.triton_support.child import search_path
from kvlab.viz import save

_ARRAY = re.compile(r"(\d+(?:x\d+)*):([A-Za-z]\w*)(?:=(\S+))?")
_PAGED = "k_cache=6x16x2x64:bf16 v_cache=6x16x2x64:bf16 block_table=2x3:i32=range seq_lens=2:i32=40"
EXAMPLES = {
    "mha_decode_paged": f"q=2x8x64:bf16 {_PAGED}",
    "mha_decode_streaming_paged": f"q=2x8x64:bf16 {_PAGED}",
    "mha_prefill": "q=1x48x4x64:bf16 k=1x48x2x64:bf16 v=1x48x2x64:bf16 causal=True",
    "mha_prefill_paged": f"q=48x8x64:bf16 {_PAGED} cu_seqlens_q=3:i32=0,20,48 causal=True",
    "attend_paged": f"q=48x8x64:bf16 {_PAGED} cu_seqlens_q=3:i32=0,20,48 causal=True",
    "mla_decode_paged": "q=2x8x80:bf16 kv_cache=6x16x80:bf16 block_table=2x3:i32=range "
                        "seq_lens=2:i32=40 v_dim=64 scale=0.1",
    "merge_states": "outs=4x6x8x64:f32 lses=4x6x8:f32",
    "kv_store_paged": "k=6x2x64:bf16 v=6x2x64:bf16 k_cache=4x16x2x64:bf16 v_cache=4x16x2x64:bf16 "
                      "slot_mapping=6:i32=range",
}
"""A small call of each operation that takes arrays alone: what ``explain`` and ``lockstep`` use without arguments."""


def arguments(texts: Iterable[str], fill: str) -> dict[str, Any]:
    """The keyword arguments of ``NAME=VALUE`` texts. An array is ``SHAPE:DTYPE`` or ``SHAPE:DTYPE=FILL``: the fill is a
    number, ``range`` (0, 1, 2, ...), ``random`` or a list of numbers; without one it is ``fill`` for floats, 0 for
    integers. Anything else is a literal of Python, or text.

    >>> made = arguments(["q=2x4:bf16", "lens=2:i32=7", "at=3:i64=0,2,5", "n=2:i32", "causal=True"], "random")
    >>> made["q"].shape, made["lens"].tolist(), made["at"].tolist(), made["n"].tolist(), made["causal"]
    ((2, 4), [7, 7], [0, 2, 5], [0, 0], True)
    """
    pairs = _pairs(texts, "'q=2x8x64:bf16' or 'causal=True'")
    arrays = ((name, value, _ARRAY.fullmatch(value)) for name, value in pairs.items())
    return {name: _array(name, array, fill) if array else _literal(value) for name, value, array in arrays}


def literals(texts: Iterable[str], like: str = "'x=*bf16' or 'BM=64'") -> dict[str, Any]:
    """The values of ``NAME=VALUE`` texts: literals of Python, or text, as the types of a kernel's arguments are.
    ValueError, with ``like`` as an example, for another text, and for a name that is there twice.

    >>> literals(["x=*bf16", "n=i32:16", "BM=64"])
    {'x': '*bf16', 'n': 'i32:16', 'BM': 64}
    """
    return {name: _literal(value) for name, value in _pairs(texts, like).items()}


def _pairs(texts: Iterable[str], like: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require(equals and name.isidentifier(), f"argument is {text!r}", f"NAME=VALUE, {like} say")
        require(name not in out, f"argument is {text!r} after {name}={out.get(name)}", "given once")
        out[name] = value
    return out


def _array(name: str, match: re.Match[str], fill: str) -> Any:
    shape = tuple(map(int, match[1].split("x")))
    dtype = as_dtype({"i32": "int32", "i64": "int64", "u32": "uint32", "i8": "int8"}.get(match[2], match[2]))
    require(math.prod(shape) < 1 << 48, f"{name} is {match[0]!r}", "of fewer than 2**48 elements")
    whole = dtype.kind in "iu"
    how = match[3] or ("0" if whole else fill)
    if how == "random":
        drawn = np.random.default_rng(sum(map(ord, name)))
        return (drawn.integers(0, 2, shape) if whole else drawn.standard_normal(shape, np.float32)).astype(dtype)
    if how == "range":
        return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape).astype(dtype)
    try:
        numbers = [_number(one) for one in how.split(",")]
    except ValueError:
        accepted = "a number, numbers, 'range' or 'random'"
        raise ValueError(f"{name} is {match[0]!r}: must be filled with {accepted}") from None
    if whole:
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        fits = all(least <= one <= most and one == int(one) for one in numbers)
        require(fits, f"{name} is {match[0]!r}", f"filled with integers from {least} to {most}")
    if numbers == [0]:
        return np.zeros(shape, dtype)  # no memory is touched, whatever the shape
    require(len(numbers) in (1, math.prod(shape)), f"{name} is {match[0]!r}", f"filled with {math.prod(shape)} numbers")
    wide = np.array(numbers, np.int64 if whole and most < 1 << 63 else None)
    return np.broadcast_to(wide.reshape(-1 if len(numbers) == 1 else shape), shape).astype(dtype)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def operation_of(name: str) -> Any:
    """The public function of kvlab.attention that is called so. ValueError for another name."""
    known = [one for one in dir(attention) if isinstance(getattr(attention, one), PublicOperation)]
    if name not in known:
        raise ValueError(f"operation is {name!r}: must be one of {', '.join(known)}")
    return getattr(attention, name)


def _texts(name: str, given: Sequence[str]) -> list[str]:
    if given:
        return list(given)
    if name not in EXAMPLES:
        parameters = inspect.signature(operation_of(name)).parameters.values()
        names = ", ".join(one.name for one in parameters if one.default is one.empty)
        raise ValueError(f"operation {name!r} takes {names}: must be given; one that takes a cache has no text for it")
    return EXAMPLES[name].split()


def explained(name: str, given: Sequence[str]) -> Answer:
    """``kvlab explain``: the plan of a call, of which nothing is run."""
    function, texts = operation_of(name), _texts(name, given)
    plan = explain(function, **arguments(texts, "0"))
    fields = dataclasses.fields(plan.config) if dataclasses.is_dataclass(plan.config) else ()
    config = {field.name: getattr(plan.config, field.name) for field in fields}
    data = {
        "operation": plan.operation, "backend": plan.backend, "reason": plan.reason, "arch": plan.arch,
        "grid": plan.grid, "config": {"class": type(plan.config).__name__, **config}, "arguments": texts,
    }
    width = max(map(len, config), default=0)
    where = f" as on {plan.arch}" if plan.arch else ""
    lines = [f"[bold]{plan.operation}[/bold]: {plan.backend}{where} ({escape(plan.reason)})", f"grid {plan.grid}"]
    lines += [f"  {key:{width}}  {escape(str(value))}" for key, value in config.items()]
    if plan.schedule is not None:
        data["schedule"] = str(plan.schedule)
        lines.append(escape(str(plan.schedule)))
    if not given:
        lines.append(f"[dim]arguments of its example: {' '.join(texts)}[/dim]")
    return Answer("\n".join(lines), data)


def case_of(name: str, given: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The operation's folder, what both siblings are launched with in a call, and what the emulator alone gets."""
    made = arguments(_texts(name, given), "random")
    return lockstep_case(operation_of(name).planned(**{**made, "backend": "emulator"}))


def function_in(address: str) -> tuple[str, str]:
    """``"FILE.py:name"`` or ``"module:name"`` as an importable module and a name in it; the file's folder is put on the
    path. ValueError where there is no such file or module.
    """
    place, colon, name = address.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"{address!r} names no function: must be FILE.py:name or module:name")
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise ValueError(f"{address!r} names no function: must be FILE.py:name or module:name")
        return place, name
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"{address!r}: there is no file {place}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
        sys.path[:] = search_path()
    found = importlib.util.find_spec(path.stem)
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        raise ValueError(f"{address!r}: another module is called {path.stem}, must have a name of its own")
    return path.stem, name


def module_of(name: str) -> ModuleType:
    """The module of a name. ValueError that tells what it raises when it is imported."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def imported(address: tuple[str, str]) -> Any:
    """The object of a module and a name in it, as :func:`function_in` gives them. ValueError where there is none."""
    module, name = address
    found = getattr(module_of(module), name, None)
    if found is None:
        raise ValueError(f"'{module}:{name}': there is no {name} in {module}")
    return found


def in_lockstep(
    name: str, given: Sequence[str], twin: str | None, html: Path | None, grid: str | None = None,
    target: str | None = None, unwritten: Sequence[str] = (),
) -> Answer:
    """``kvlab lockstep``: both sides of an operation, or of a pair in files, compared step by step.

    grid, target, unwritten   of a kernel without markers: as for :func:`kvlab.mirror.lockstep_kernel`
    """
    from kvlab.mirror import Twin, lockstep, lockstep_kernel, lockstep_pair

    check_output(html, ".html")
    run: Any
    if grid is None or ":" not in name:
        for option, value in (("grid", grid), ("target", target), ("unwritten", unwritten)):
            if value:
                raise ValueError(f"{option} is {value!r}: must be left out but for a kernel with --grid")
    if ":" in name:
        if not given or ":" not in given[0] or "=" in given[0]:
            twin_name = f"'twins.py:{name.rpartition(':')[2]}'"
            raise ValueError(f"{name!r} is a kernel: must be followed by its twin, {twin_name}")
        kernel, emulator = function_in(name), function_in(given[0])
        case = arguments(given[1:], "random")
        if grid is not None:
            programs = tuple(int(n) if n.isdigit() else n for n in grid.split("x"))
            both = imported(kernel), imported(emulator)
            try:
                run = lockstep_kernel(both[0], both[1], case, programs, target=target, unwritten=list(unwritten))
            except ValueError:
                raise
            except Exception as error:  # whatever the kernel or its twin raises
                said = str(error).partition("\n")[0]
                raise ValueError(f"{name!r} or its twin cannot be run: {type(error).__name__}: {said}") from error
            return _compared(run, html, "\n".join(run.sentences))
        if not hasattr(module_of(kernel[0]), "launch"):
            raise ValueError(f"grid is None: must be given, '--grid 4x2' say, as {kernel[0]} has no function launch")
        launches = [f"{module}:launch" for module, _ in (kernel, emulator)]
        pair = Twin(kernel[1], kernel=":".join(kernel), emulator=":".join(emulator))
        run = lockstep_pair(pair, (launches[0], launches[1]), case)
    else:
        folder, case, alone = case_of(name, given)
        run = lockstep(folder.rpartition(".")[2], case, twin=twin, emulator=alone)
    return _compared(run, html, run.finding)


def _compared(run: Any, html: Path | None, told: str) -> Answer:
    """The answer of a lockstep: what was found, then the table of all that was compared."""
    first = run.first_difference
    data: dict[str, Any] = {
        "ok": run.ok, "compared": len(run.rows), "first_difference": None if first is None else str(first),
        "steps": sorted({run.step_name(row) for row in run.rows}), "finding": run.finding,
    }
    head = "[bold green]no difference[/bold green]" if run.ok else "[bold red]different[/bold red]"
    words = f"{head}  {escape(told)}\n\n{escape(run.table().removesuffix(run.finding).rstrip())}"
    if html is not None:
        html.write_text(run.to_html(), encoding="utf-8")
        data["file"] = html
        words += f"\n{escape(str(html))} written"
    return Answer(words, data, yes=run.ok)


def replayed(file: Path, quick: bool, device: str | None, output: Path | None, flashinfer: Path | None) -> Answer:
    """``kvlab replay``: a recorded call in every sibling, and the first difference."""
    check_output(output, ".html", ".svg", ".png")
    if flashinfer is not None or file.is_dir():
        recorded = load_flashinfer(file, flashinfer)
    else:
        recorded = load(file)
    found = replay(recorded, quick=quick, device=device)
    data: dict[str, Any] = {
        "ok": found.ok, "finding": found.finding, "first_difference": found.first_difference,
        "call": recorded.call, "operation": recorded.operation, "versions": recorded.versions, "plan": recorded.plan,
        "repeated": found.repeated,
        "sides": {name: {"ran": side.results is not None, "words": side.words} for name, side in found.sides.items()},
        "comparisons": [
            {"side": one.side, "name": one.name, "error": one.error, "allowed": one.allowed, "ok": one.ok}
            for one in found.comparisons
        ],
        "lockstep": found.lockstep_words if found.lockstep is None else found.lockstep.finding,
    }
    words = escape(str(found))
    if output is not None:
        if output.suffix == ".html":
            output.write_text(found.to_html(full=True), encoding="utf-8")
        else:
            save(found.draw(), output)
        data["file"] = output
        words += f"\n{escape(str(output))} written"
    return Answer(words, data, yes=found.ok)
