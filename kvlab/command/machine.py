"""``kvlab doctor``: what works on this machine, in plain words."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.markup import escape

from kvlab import __version__
from kvlab.command.answers import Answer
from kvlab.triton_support import versions
from kvlab.viz.pen.files import browser

SUPPORTED = ((3, 11), (3, 14))


class Checkup(NamedTuple):
    """Thing that was looked at, whether it works, a sentence, and the remedy where there is one. needed : False for
    what is only an extra, whose absence is no fault.
    """

    what: str
    works: bool
    words: str
    remedy: str = ""
    needed: bool = False


def examined(run: bool) -> Answer:
    """The answer of the subcommand; no where something that must work does not."""
    found = list(findings(run))
    bad = [one for one in found if one.needed and not one.works]
    width = max(len(one.what) for one in found)
    lines = [f"[bold]kvlab {__version__}[/bold] on {escape(platform.platform())}"]
    for one in found:
        mark = "[green]works[/green]" if one.works else "[red]fails[/red]" if one.needed else "[yellow]no   [/yellow]"
        lines.append(f"{mark}  {one.what:{width}}  {escape(one.words)}")
        if one.remedy and not one.works:
            lines.append(f"       {'':{width}}  {escape(one.remedy)}")
    lines.append("" if bad else "Everything that kvlab needs here works.")
    data = {"version": __version__, "ok": not bad, "findings": [one._asdict() for one in found]}
    return Answer("\n".join(lines), data, yes=not bad)


def findings(run: bool) -> Iterator[Checkup]:
    """Each thing that was looked at; with ``run`` kernels are interpreted and compiled, which takes some seconds."""
    python = sys.version_info[:2]
    yield Checkup(
        "Python", SUPPORTED[0] <= python < SUPPORTED[1], f"{platform.python_version()}, 3.11 to 3.13 are tested",
        needed=True,
    )
    yield _tried("emulator", _emulate, "NumPy arrays are attended to as on sm_90, byte by byte")
    torch = _version("torch")
    yield Checkup("torch", torch is not None, torch or "is not installed: kernels need it", versions.hint())
    triton = versions.installed()
    tested = ", ".join(versions.TESTED)
    words = f"{triton}, tested: {tested}" if triton else "is not installed: kernels run in the emulator alone"
    yield Checkup("Triton", triton is not None, words, versions.hint())
    if triton and torch:
        if run:
            yield _tried("interpreter", _interpret, "kernels run on the CPU, as the emulator to the last bit")
            yield _tried("compiler", _compile, "kernels compile for sm_90 without a GPU")
        gpu = _gpu()
        yield Checkup("GPU", gpu is not None, gpu or "none: torch tensors are interpreted on the CPU, which is slow")
        lacks = versions.gluon_lacks()
        words = lacks or f"Triton {triton} has the Gluon that Hopper's kernels are written in"
        yield Checkup("Gluon", lacks is None, words, "the portable kernels run instead")
    converter = browser() or ("cairosvg" if importlib.util.find_spec("cairosvg") else None)
    words = f"pictures by {converter}" if converter else "no converter; .svg and .html need none"
    yield Checkup("PNG", converter is not None, words, "pip install cairosvg, or install Chromium")
    for what, package, does in (
        ("notebooks", "jupyterlab", "kvlab lab opens them"),
        ("transformers", "transformers", 'attn_implementation="kvlab"'),
        ("notebook views", "anywidget", "pictures that move"),
    ):
        version = _version(package)
        words = f"{package} {version}: {does}" if version else f"{package} is not installed: {does}"
        yield Checkup(what, version is not None, words, f"pip install {package}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tried(what: str, does: Callable[[], None], words: str) -> Checkup:
    try:
        does()
    except Exception as error:  # whatever is wrong with the machine is what is asked for
        return Checkup(what, False, f"{type(error).__name__}: {error}".splitlines()[0], needed=True)
    return Checkup(what, True, words, needed=True)


def _call(**more: Any) -> Any:
    from kvlab.attention import mha_decode_paged

    q = np.random.default_rng(0).standard_normal((1, 2, 16), np.float32)
    pages = np.random.default_rng(1).standard_normal((2, 2, 4, 1, 16), np.float32)
    return mha_decode_paged(q, pages[0], pages[1], np.array([[1, 0]]), np.array([6]), **more)


def _emulate() -> None:
    out, exact = _call(), _call(backend="reference")
    if not np.allclose(out, exact, atol=1e-5):
        raise ValueError(f"the emulator is {np.abs(out - exact).max()} off the reference")


def _interpret() -> None:
    if not np.array_equal(_call(backend="triton"), _call()):
        raise ValueError("the interpreted kernel differs from the emulator")


def _compile() -> None:
    from kvlab.triton_support.staged_tile import compiler_staging

    compiler_staging("sm_90", BM=64, BN=64, D=64)


def _gpu() -> str | None:
    from kvlab.demo.steps import gpu_name

    return gpu_name()
