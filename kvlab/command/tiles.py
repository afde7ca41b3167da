"""``kvlab draw`` and ``kvlab conflicts``: layouts from text, their pictures, their passes and cures."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from kvlab.command.answers import Answer
from kvlab.common.checks import require
from kvlab.hardware import Cure, best_padding, best_swizzle
from kvlab.layout import ComposedLayout, Layout, format_layout
from kvlab.layout.encodings import Encoding, SharedEncoding, from_ttgir
from kvlab.memory import as_dtype
from kvlab.rosetta import Recognised, recognise
from kvlab.viz import Canvas, Picture, draw, draw_punch_card, save

_SIZES = re.compile(r"\s*(\d+)\s*x\s*(\d+)\s*")
MOST_TEXT = 20
"""Columns of a table that is printed instead of a picture."""


def sizes(name: str, text: str | None) -> tuple[int, int] | None:
    """``"64x128"`` as (64, 128). ValueError for other text.

    >>> sizes("shape", "64x128"), sizes("shape", None)
    ((64, 128), None)
    """
    if text is None:
        return None
    found = _SIZES.fullmatch(text)
    if found is None:
        raise ValueError(f"{name} is {text!r}: must be rows x columns, '64x128' say")
    return int(found[1]), int(found[2])


def read(text: str, dtype: str | None, unit: str | None = None, shape: str | None = None) -> Recognised:
    """The text recognised (:func:`kvlab.rosetta.recognise`), ``-`` for what the standard input holds; ``shape`` is an
    encoding's, before that of its type.

    >>> read("8x64", None).object, read("#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>",
    ...                                 "f16", shape="16x64").how["shape"]
    (Layout("(8,64):(64,1)"), (16, 64))
    """
    if text == "-":
        require(sys.stdin is not None, "text is '-'", "in the standard input, which is closed")
        text = sys.stdin.read()
    found = recognise(text, dtype, swizzle_unit=unit)  # type: ignore[arg-type]
    how = dict(found.how)
    if shape is not None:
        how["shape"] = sizes("shape", shape)
        if not isinstance(found.object, Encoding):
            raise ValueError(f"shape is {shape!r}: must be left out, {found.object} has a shape of its own")
    if isinstance(found.object, SharedEncoding) and dtype is not None:
        how["element_bytes"] = as_dtype(dtype).itemsize
    return replace(found, how=how)


def picture_of(found: Recognised, cure: Cure | None) -> Picture:
    """The picture of a layout, with the worst instruction of an access under it."""
    above = draw(found)
    if cure is None:
        return above
    below = draw_punch_card(cure.before)
    canvas = Canvas()
    canvas.embed(above, 0, 0)
    canvas.embed(below, 0, above.extent[1] + 28)
    title = f"{found.object}: {below.title}"
    return canvas.picture(title, f"{above.caption} Below, the instruction with the most conflicts.")


def drawn(
    text: str, dtype: str | None, access: str | None, output: Path | None, shape: str | None, arch: str,
    unit: str | None,
) -> Answer:
    """``kvlab draw``: the picture in a file, or a table of offsets."""
    found = read(text, dtype, unit, shape)
    thing = found.object
    cure = None if access is None else _searched(found, dtype, access, arch)[0]
    picture = picture_of(found, cure)
    data: dict[str, Any] = {
        "notation": found.notation, "layout": str(thing), "sentence": found.sentence, "title": picture.title,
        "caption": picture.caption,
    }
    words = f"[bold]{escape(found.notation)}[/bold]: {escape(found.sentence)}"
    data["also"] = found.also
    words += "".join(f"\n[dim]also[/dim] {name}: {escape(same)}" for name, same in found.also.items())
    if cure is not None:
        data |= {"wavefronts": cure.given, "ideal": cure.ideal}
        words += f"\n{escape(access or '')} on {escape(arch)}: {cure.given} wavefronts, ideal {cure.ideal}"
        words += escape(_in_bytes(found, text, dtype, unit, access or "", arch, cure))
    if output is not None:
        data["file"] = save(picture, output)
        words += f"\n{escape(str(output))} written"
    elif isinstance(thing, Layout | ComposedLayout) and thing.rank == 2 and _columns(thing) <= MOST_TEXT:
        words += f"\n{escape(format_layout(thing))}"
    return Answer(words, data)


def _in_bytes(
    found: Recognised, text: str, dtype: str | None, unit: str | None, access: str, arch: str, cure: Cure
) -> str:
    """A line of doubt where a swizzle that has conflicts would have fewer if it counted bytes."""
    if unit is None and cure.given > cure.ideal and isinstance(found.object, ComposedLayout) and text != "-":
        with contextlib.suppress(ValueError):
            other = best_swizzle(read(text, dtype, "byte").object, dtype, access_of(access), arch=arch)
            if other.given < cure.given:
                return f"\nCounted in bytes (--swizzle-unit byte) the swizzle gives {other.given} wavefronts."
    return ""


def access_of(text: str) -> Any:
    """Access of a text: an instruction's name, or an encoding of TTGIR (``ld:`` or ``st:`` before it).

    >>> access_of("ldmatrix.x4"), access_of("st:#ttg.linear<{register = [[0, 1]], lane = [[1, 0]], warp = []}>")[0]
    ('ldmatrix.x4', 'st')
    """
    verb, _, layout = text.partition(":")
    if verb in ("ld", "st"):
        return verb, from_ttgir(layout)
    return from_ttgir(text) if text.lstrip().startswith("#ttg.") else text


def _searched(tile: Recognised, dtype: str | None, access: str, arch: str) -> list[Cure]:
    """The tile under its access, and its cures, swizzle first."""
    if dtype is None:
        raise ValueError("dtype is None: must be given with an access, '--dtype bf16' say")
    thing, shape = tile.object, tile.how.get("shape")
    if isinstance(thing, SharedEncoding) and shape is None:
        raise ValueError(f"shape is None: must be given with an access to {thing}, '--shape 64x64' say")
    found: list[Cure] = []
    refused: ValueError | None = None
    for cure in (best_swizzle, best_padding):
        try:
            found.append(cure(thing, dtype, access_of(access), arch=arch, shape=shape))
        except ValueError as reason:
            refused = reason if refused is None else refused
    if not found:
        raise refused or ValueError(f"{thing} has no cure")
    return found


def conflicts(text: str, dtype: str, access: str, shape: str | None, arch: str, unit: str | None, all_: bool) -> Answer:
    """``kvlab conflicts``: wavefronts, why, and the smallest cure; no where there are conflicts."""
    found = read(text, dtype, unit, shape)
    thing = found.object
    cures = _searched(found, dtype, access, arch)
    worst, excess = cures[0].before, cures[0].given - cures[0].ideal
    data = {
        "layout": str(thing), "access": access, "arch": arch, "wavefronts": cures[0].given, "ideal": cures[0].ideal,
        "conflicts": excess, "provisional": worst.provisional,
        "cures": [
            {
                "kind": type(one).__name__.removeprefix("Best").lower(), "change": str(one.change),
                "layout": str(one.layout), "wavefronts": one.wavefronts, "conflicts": one.conflicts,
                "extra_bytes": one.extra_bytes, "tried": one.tried,
            }
            | ({"candidates": [[str(c.change), c.wavefronts] for c in one.candidates]} if all_ else {})
            for one in cures
        ],
    }
    head = f"{thing}, {access} on {arch}: {cures[0].given} wavefronts, ideal {cures[0].ideal}"
    if not excess:
        return Answer(f"[bold green]no conflicts[/bold green]  {escape(head)}", data)
    doubt = _in_bytes(found, text, dtype, unit, access, arch, cures[0])
    lines = [f"[bold red]{excess} conflicts[/bold red]  {escape(head)}{escape(doubt)}", "", escape(worst.explain()), ""]
    for one in cures:
        kind = type(one).__name__.removeprefix("Best").lower()
        lines.append(f"[bold]{kind}[/bold]  {escape(str(one))}")
        if all_:
            lines += ["", escape(one.table()), ""]
    return Answer("\n".join(lines), data, yes=False)


def _columns(layout: Layout | ComposedLayout) -> int:
    inner = layout.layout if isinstance(layout, ComposedLayout) else layout
    return inner.modes[1].size
