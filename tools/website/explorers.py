"""Explorers in pages of the site: the same ES module, as a plain script, and the state of each in its page.

A browser loads no ES module from a file beside the page, and the site must work from files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvlab.viz.explorer.explore import Explorer, css, explore, module

STYLE = "\nbody[data-theme=dark]{color-scheme:dark}body[data-theme=light]{color-scheme:light}\n" \
    "@media(prefers-color-scheme:dark){body:not([data-theme=light]){color-scheme:dark}}\n" \
    ".kvlab-explorer{margin:1em 0}div.cell_output svg.kvlab{background:none}\n" \
    "@media(max-width:700px){div.cell_output,.explored,section#gallery p{overflow-x:auto}\n" \
    "div.cell_output svg.kvlab,.explored svg.kvlab,section#gallery img{max-width:none!important}}\n"
"""Pictures of a narrow window keep the size of their letters: their box scrolls, not the page."""

START = """
document.querySelectorAll("script[type='kvlab/explorer']").forEach((script) => {
  const {scene, state: start} = JSON.parse(script.textContent), calls = [];
  let state = start;
  mount(script.parentElement.appendChild(document.createElement("div")), scene, {
    get: () => state,
    set(changes) { state = {...state, ...changes}; calls.forEach((call) => call()); },
    watch(call) { calls.push(call); },
  });
  script.parentElement.querySelector(".still")?.remove();
});
"""


def script() -> str:
    """The module as a script that runs when the page is there."""
    text = re.sub(r"^export default .*$", "", module(), flags=re.MULTILINE)
    text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
    return f'document.addEventListener("DOMContentLoaded", () => {{\n{text}\n{START}}});\n'


def style() -> str:
    """The style of explorers, and whether pictures are dark: as the page says."""
    return css() + STYLE


def element(scene: dict[str, Any], state: dict[str, Any], still: str) -> str:
    """HTML of one explorer: the still picture, until the script takes its place."""
    data = json.dumps({"scene": scene, "state": state}).replace("</", "<\\/")
    return f'<div class="explored"><div class="still">{still}</div><script type="kvlab/explorer">{data}</script></div>'


def of(found: Explorer) -> str:
    """HTML of an :class:`kvlab.viz.Explorer`."""
    return element(found.scene.shown, found.state, found.still.inline)


def alive(notebook: Any) -> Any:
    """The notebook whose widgets are explorers of the page, from the state that its kernel has stored."""
    stored = notebook.metadata.pop("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            state = stored.get(view["model_id"], {}).get("state", {}) if view else {}
            if "scene" in state:
                scene = state["scene"]
                output["data"]["text/html"] = element(
                    scene, {name: state[name] for name in scene["knobs"]}, output["data"]["text/html"]
                )
    return notebook


def page() -> str:
    """The page of explorers, one of each kind."""
    parts = ["# Explorers", "Sliders, arrow keys and the pointer change what is drawn. `kvlab.viz.explore(obj)` makes "
             "them in a notebook; `save` writes one as a page of its own."]
    for heading, told, code, make in _shown():
        parts += [f"## {heading}", told, f"```python\n{code}\n```", f"```{{raw}} html\n{of(make())}\n```"]
    return "\n\n".join(parts) + "\n"


def _shown() -> Iterator[tuple[str, str, str, Callable[[], Explorer]]]:
    """(heading, what to try, the line that makes it, what makes it here)."""
    from kvlab.cache import PagedKVCacheCollection
    from kvlab.hardware import get_atom
    from kvlab.layout import Layout, Swizzle
    from kvlab.viz import ByteBudget

    yield (
        "A swizzle", "Count the passes with the arrow keys; set `bits` to 0 and count again.",
        'explore(Swizzle(3, 4, 3, "byte"))', lambda: explore(Swizzle(3, 4, 3, "byte")),
    )
    yield (
        "A layout", "Which banks does a load along a row, or down a column, ask?",
        'explore(Layout("(16,32):(32,1)"), element_bytes=4)',
        lambda: explore(Layout("(16,32):(32,1)"), element_bytes=4),
    )
    yield (
        "Fragments", "Choose a lane: what it holds of A, B and C. Slide C onto A.",
        'explore(get_atom("mma.sync.m16n8k16.bf16"))', lambda: explore(get_atom("mma.sync.m16n8k16.bf16")),
    )
    table = [[5, 2, 9, 0], [7, 1, 0, 0]]
    cache = PagedKVCacheCollection(np.zeros((10, 2, 1, 16, 1, 64), np.float32), [61, 21], table, 1, 62)
    yield (
        "Pages", "Choose a token: the byte of its key, term by term.", "explore(cache)", lambda: explore(cache),
    )
    budget = ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14, shared=2.9e13)
    yield (
        "A byte budget", "Batch, context, page and dtype: bytes, time, and what bounds them.",
        "explore(ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14, shared=2.9e13))", lambda: explore(budget),
    )
