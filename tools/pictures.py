"""docs/pictures.md, from the table of pictures.

    python tools/pictures.py    # writes it; tests/viz/test_table.py says when it is not up to date
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvlab import viz

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pictures.md"

HEAD = """\
# Pictures

`kvlab.viz.draw(obj, **options)` finds the picture of an object by its class, or by the nearest of its bases;
`kvlab.viz.save(obj, path, **options)` writes it as .svg, .html or .png. The objects show themselves in notebooks.
`title` and `caption` are options of all but `draw_lockstep`; `help(kvlab.viz.draw_layout)` explains them.

`python tools/pictures.py` writes this page from the table `kvlab.viz.PICTURES`.

## Of an object
"""

MIDDLE = """
## Of several objects

Called by name: `from kvlab.viz import draw_cure`.
"""

FOOT = """
## With knobs

`kvlab.viz.explore(obj)` shows an object with sliders: a `Swizzle`, a `SwizzledTile` or the `Wavefronts` of an
instruction (plain beside swizzled, each pass), a `Layout` or a `TileTensor` (what loads over it ask of the banks, who
holds what), an `MmaAtom` (who holds what of A, B and C; C slides onto A), a `FragmentMap`, a
`Timeline` or a `Pipeline` (leave out a wait: the hazard appears at its bytes), a `PagedKVCache` or its collection (the
byte of a token, term by term), a `ByteBudget` (sizes, bytes, time under the roofline). Its knobs are attributes:

```python
from kvlab.layout import Swizzle
from kvlab.viz import explore

shown = explore(Swizzle(3, 4, 3, "byte"))
shown.set(access="ld.shared.b32 down a column", lane=5)
shown.save("swizzle.html")
```

In a notebook it is a widget where anywidget is installed: what is moved by hand is read as `shown.bits`. `save` writes
one page that needs nothing else; a state has an address, `swizzle.html#bits=2&lane=9`. Arrow keys
count passes and lanes.

## Beside your own charts

`kvlab.viz.plots` has charts of matplotlib (extra `notebooks`) that draw in `ax=` or in a figure of their own:
`plot_roofline` and `plot_ratios` (what was measured, beside peers), `plot_errors` (siblings against a reference),
`plot_context` (bytes and time of a decode step against the context length), `plot_schedule`. Each gives a `Chart`:
`axes`, `title`, `caption`, `alt`, `save(path, theme="dark")`; in a notebook it is light or dark as the page is.

## A picture of your own class

```python
from kvlab.viz import Canvas, draw, register


class Ring:
    def __init__(self, slots):
        self.slots = slots


def draw_ring(ring, *, mark=None):
    canvas = Canvas()
    for slot in range(ring.slots):
        canvas.rect(24 * slot, 0, 20, 20, fill="currentColor", opacity=0.2, title=f"slot {slot}")
    if mark is not None:
        canvas.look_here(24 * mark, 0, 20, 20)
    return canvas.picture(f"A ring of {ring.slots} slots", "Each square is a slot; the outlined one is written next.")


register(Ring, draw_ring)
draw(Ring(8), mark=3)
```

A class that derives from `kvlab.common.drawn.Drawn` shows its picture in notebooks. Subclasses are drawn as their base.

## A picture of kvlab

A file in `kvlab/viz/`, in `kvlab/viz/charts/` for numbers on axes or in `kvlab/viz/formats/` for caches at rest, with
its function; a line in `PICTURES` and an import for type checkers (`kvlab/viz/__init__.py`), a test in `tests/viz/`, an
entry in `tests/browser/gallery.py`. It draws with `kvlab/viz/pen/` (`Canvas`, axes, legends, colours), which knows no
class of objects; what takes working out as arrays lies in `kvlab/viz/model/`.
"""


def page() -> str:
    """The whole page."""
    single = ["| objects | drawn by | options | shows |", "|---|---|---|---|"]
    several = ["| drawn by | arguments | shows |", "|---|---|---|"]
    for name, (file, classes) in viz.PICTURES.items():
        kinds = ", ".join(f"`{one.partition(':')[2]}`" for one in classes.split())
        given = ", ".join(f"`{one}`" for one in _arguments(name)[bool(kinds) :])
        path = file.replace(".", "/")
        row = f"`{name}` in [{path}.py](../kvlab/viz/{path}.py) | {given or 'none'} | {_shows(name)} |"
        (single if kinds else several).append(f"| {kinds} | {row}" if kinds else f"| {row}")
    return "\n".join([HEAD, *single, MIDDLE, *several, FOOT])


def _arguments(name: str) -> list[str]:
    """What may be given, the object first; ``how`` stands for the options of ``draw_layout``."""
    given = inspect.signature(getattr(viz, name)).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in given):
        return [next(iter(given)).name, *_arguments("draw_layout")[1:]]
    return [one.name for one in given if one.name not in ("title", "caption")]


def _shows(name: str) -> str:
    """The first paragraph of the function, as Markdown."""
    words = " ".join((inspect.getdoc(getattr(viz, name)) or "").partition("\n\n")[0].split())
    return re.sub(r":\w+:`([^`]+)`|``([^`]+)``", lambda match: f"`{match[1] or match[2]}`", words)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
