"""``kvlab xray`` and ``kvlab diff``: anyone's Triton or Gluon kernels, from their files."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from kvlab.command.answers import Answer, check_output
from kvlab.command.calls import function_in, imported, literals
from kvlab.triton_support.compile import jit_function
from kvlab.viz.pen.host import document
from kvlab.xray import XRay, diff, xray


def _made(address: str, values: dict[str, Any], target: str) -> XRay:
    """The X-ray of ``FILE.py:kernel``; values that are none of its parameters are the compiler's, as at a launch.
    ValueError where it is not found or does not compile."""
    kernel = imported(function_in(address))
    own = getattr(jit_function(kernel), "arg_names", ())
    options = {name: value for name, value in values.items() if name not in own}
    try:
        return xray(kernel, {name: value for name, value in values.items() if name in own}, target, **options)
    except ValueError:
        raise
    except Exception as error:  # whatever the compiler says of the kernel
        said = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise ValueError(f"{address!r} does not compile for {target}: {type(error).__name__}: {said}") from error


def x_rayed(address: str, given: Sequence[str], target: str, page: Path | None) -> Answer:
    """``kvlab xray``: layouts, allocations, edges, resources, findings with cures; no where there are findings."""
    check_output(page, ".html")
    found = _made(address, literals(given), target)
    many = len(found.findings)
    head = f"[bold red]{many} finding{'s' * (many > 1)}[/bold red]" if many else "[bold green]no findings[/bold green]"
    return _answer(head, str(found), found.to_dict(), not many, page, found.to_html)


def differing(
    addresses: tuple[str, str], given: Sequence[str], changed: Sequence[str], targets: tuple[str, str],
    page: Path | None,
) -> Answer:
    """``kvlab diff``: what two kernels, or one with other values or on another target, differ in; no where they do."""
    check_output(page, ".html")
    values = literals(given)
    both = (values, values | literals(changed))
    a, b = (_made(*one) for one in zip(addresses, both, targets, strict=True))
    found = diff(a, b)
    head = "[bold green]no difference[/bold green]" if found.same else "[bold red]different[/bold red]"
    title = f"{a.name} on {a.target}, {b.name} on {b.target}"
    html = functools.partial(document, title, found._repr_html_(), style="body{margin:24px}")
    return _answer(head, str(found), found.to_dict(), found.same, page, html)


def _answer(head: str, words: str, data: dict[str, Any], yes: bool, page: Path | None, html: Any) -> Answer:
    words = f"{head}  {escape(words)}"
    if page is not None:
        page.write_text(html(), encoding="utf-8")
        data, words = data | {"file": page}, f"{words}\n{escape(str(page))} written"
    return Answer(words, data, yes)
