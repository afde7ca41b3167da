"""docs/gallery.md and the pictures in docs/gallery/: one of each kind, as a web page shows it.

    python tools/picture_gallery.py    # writes them; tests/browser/test_gallery.py says when they are not up to date
    python tools/picture_gallery.py --sheets build/sheets    # PNG sheets of all that is drawn, to look at: light and
                                                             # dark, at 100 % and 50 %; needs Chromium

The objects are those of tests/browser/gallery.py, which the browser tests measure in many pages. Files have no hover
texts: a page that shows them as pictures would not show those.
"""

from __future__ import annotations

import html
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlab.viz import draw
from kvlab.viz.pen.files import browser
from kvlab.viz.pen.host import document

ROOT = Path(__file__).resolve().parents[1]
PAGE, FOLDER = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"

SHEET = "body{margin:8px;display:grid;grid-template-columns:1fr 1fr;align-items:start;font-family:sans-serif}" \
    "h4{margin:8px}"
HEAD = """\
# Gallery

One picture of each kind, as `kvlab.viz` draws it; [pictures](pictures.md) lists the functions and their options. In a
notebook each part tells more under the pointer. `python tools/picture_gallery.py` writes this page. A lockstep run,
whose errors depend on the machine, is on the page of `make demo`.
"""

SHOWN: dict[str, dict[str, str]] = {
    "Layouts": {
        "layout": "draw_layout", "composed layout": "draw_composed_layout", "swizzle": "draw_swizzle",
        "linear layout": "draw_linear_layout", "encoding, swizzled": "draw_encoding",
        "thread values": "draw_thread_values", "tile tensor": "draw_tile_tensor", "recognised": "draw_recognised",
    },
    "Shared memory": {
        "one diagonal": "draw_one_diagonal", "punch card, conflicts": "draw_punch_card", "cure, found": "draw_cure",
        "swizzled tile": "draw_shared_memory", "tiles beside": "draw_tiles_beside",
        "kv buffer, cp.async": "draw_kv_buffer",
    },
    "Instructions and copies": {
        "coalescing": "draw_coalescing", "atom, lane": "draw_atom", "descriptor": "draw_descriptor",
        "tma descriptor": "draw_tma_box", "gather4": "draw_gather4", "copy plan, cp.async": "draw_copy_plan",
        "fragment map": "draw_fragment_map",
    },
    "Caches": {
        "page table": "draw_page_table", "page pool": "draw_page_table", "kv tile, drawn": "draw_kv_tile",
        "quantised page": "draw_quantised_page", "row of a KV format": "draw_format",
        "two KV formats": "draw_agreement", "KV transfer": "draw_transfer", "KV audit": "draw_audit",
        "KV budget": "draw_kv_budget",
    },
    "Time": {
        "timeline, hazard": "draw_timeline", "pipeline without a wait": "draw_pipeline", "tile film": "draw_tile_film",
        "traffic": "draw_traffic", "explanation": "draw_explanation", "schedule": "draw_schedule",
    },
    "The whole": {
        "path of a byte": "draw_path_of_a_byte", "roofline": "draw_roofline", "byte budget": "draw_byte_budget",
        "shares": "draw_shares", "errors": "draw_errors",
    },
}
"""Heading -> object of the gallery -> the function that draws it."""


def files(objects: Mapping[str, Callable[[], Any]]) -> dict[Path, str]:
    """Files of the gallery and what is in them."""
    parts, found = [HEAD], dict[Path, str]()
    for heading, shown in SHOWN.items():
        parts.append(f"## {heading}\n")
        for name, function in shown.items():
            picture = draw(objects[name]())
            path = FOLDER / (re.sub(r"\W+", "_", name) + ".svg")
            head, title, rest = picture.svg.partition("</title>")
            found[path] = head + title + re.sub(r"<title>[^<]*</title>", "", rest) + "\n"
            told = html.unescape(picture.title).replace("[", "(").replace("]", ")").replace("<", "\\<")
            parts.append(f"`{function}`\n\n![{told}](gallery/{path.name})\n")
    return {**found, PAGE: "\n".join(parts)}


def sheets(objects: Mapping[str, Callable[[], Any]], folder: Path) -> list[Path]:
    """Write sheets of 12 pictures each as ``THEME-PERCENT-NUMBER.png``."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    shown = [f"<div><h4>{html.escape(name)}</h4>{draw(make()).inline}</div>" for name, make in objects.items()]
    pages = [document("Gallery", "".join(shown[n : n + 12]), style=SHEET) for n in range(0, len(shown), 12)]
    written, plain = [], ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=browser(), args=[*plain, "--disable-dev-shm-usage"])
        for theme, percent in itertools.product(("light", "dark"), (100, 50)):
            size = {"width": 1930, "height": 1000}
            context = running.new_context(viewport=size, device_scale_factor=percent / 100, color_scheme=theme)
            for number, page in enumerate(pages):
                tab, path = context.new_page(), folder / f"{theme}-{percent}-{number:02d}.png"
                tab.set_content(page)
                tab.screenshot(path=path, full_page=True)
                tab.close()
                written.append(path)
        running.close()
    return written


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "browser"))
    from gallery import GALLERY

    if "--sheets" in sys.argv:
        print(*sheets(GALLERY, Path(sys.argv[-1])), sep="\n")
    else:
        FOLDER.mkdir(exist_ok=True)
        for path, text in files(GALLERY).items():
            path.write_text(text, encoding="utf-8")
