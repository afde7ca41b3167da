"""Contents of the site: which page stands where, and the text of the pages that are made for it alone."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from tools.website.docstrings import arguments

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "website"
"""What the site is made of, and what notebooks have shown."""

NAVIGATION: dict[str, tuple[str, ...]] = {
    "Course": tuple(f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob("[0-9]*.py"))),
    "Look": ("explorers", "docs/gallery", "docs/facts", "docs/glossary"),
    "Use": ("README", "docs/command", "docs/coming_from", "docs/torch", "docs/xray", "docs/rosetta", "docs/formats"),
    "Build": ("docs/architecture", "docs/recipes", "docs/pictures", "docs/machines", "CONTRIBUTING", "docs/CHANGELOG"),
    "Reference": ("api/index",),
}
"""Heading of the contents -> pages, in order; those of api/ follow from :data:`ROOMS`."""

ROOMS = (
    "kvlab.attention", "kvlab.cache", "kvlab.layout", "kvlab.layout.encodings", "kvlab.hardware", "kvlab.staging",
    "kvlab.memory", "kvlab.viz", "kvlab.viz.plots", "kvlab.formats", "kvlab.rosetta", "kvlab.mirror", "kvlab.xray",
    "kvlab.simt", "kvlab.replay", "kvlab.integrations.flash_attn", "kvlab.integrations.flashinfer",
    "kvlab.integrations.vllm", "kvlab.integrations.transformers", "kvlab.integrations.distributed", "kvlab.exercises",
    "kvlab.data",
)
"""Modules whose public names have a page of the reference."""

COPIED = ("README.md", "CONTRIBUTING.md", "LICENSE", "docs")
"""Files and folders that are pages as they are."""

LINKED = ("kvlab", "benchmarks", "tests", "tools", "examples", "pyproject.toml", "constraints.txt")
"""What pages link to and is no page."""


def index() -> str:
    """The first page: what it is, and the contents."""
    parts = [
        "# kvlab",
        "How a KV cache travels from DRAM through shared memory into tensor-core registers, byte by byte, and the "
        "attention kernels that do it.",
        "![A swizzled key: 8 lanes in 1 pass, not 8](docs/one_diagonal.svg)",
        "- New here: [the map of the course](notebooks/00_start_here.ipynb), then "
        "[follow one token](notebooks/01_follow_one_token.ipynb).",
        "- In a hurry: [README](README.md), [the command](docs/command.md), "
        "[coming from flash-attention, FlashInfer, vLLM, transformers](docs/coming_from.md).",
        "- To play: [explorers](explorers.md). To look something up: [glossary](docs/glossary.md), "
        "[reference](api/index.md).",
        '- For programs that read: <a href="llms.txt">llms.txt</a>, <a href="llms-full.txt">all pages in one</a>; '
        "every page has a twin, its address with `.md` for `.html`.",
    ]
    for heading, names in NAVIGATION.items():
        parts.append("\n".join([f"```{{toctree}}\n:caption: {heading}\n:maxdepth: 1\n:hidden:\n", *names, "```"]))
    return "\n\n".join(parts) + "\n"


def api_index() -> str:
    """The list of rooms."""
    names = "\n".join(ROOMS)
    told = "Public names by room, from their docstrings."
    return f"# Reference\n\n{told}\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"


def public(room: str) -> dict[str, object]:
    """Public names of a module, and what they are: those of its list, or what it defines itself.

    Names that an earlier room of :data:`ROOMS` has are left out.
    """
    module = importlib.import_module(room)
    listed = getattr(module, "__all__", None)
    if listed is None:
        return {name: value for name, value in vars(module).items()
                if name[0] != "_" and getattr(value, "__module__", None) == room}
    earlier = [public(one) for one in ROOMS[: ROOMS.index(room)]]
    found = {name: getattr(module, name) for name in listed}
    return {name: one for name, one in found.items() if not any(names.get(name) is one for names in earlier)}


def api(room: str) -> str:
    """The page of a room."""
    parts = [f"# {room}", f"```{{eval-rst}}\n.. automodule:: {room}\n```"]
    for name, value in public(room).items():
        if inspect.isclass(value):
            text = f".. autoclass:: {room}.{name}\n   :members:\n"
        elif inspect.isfunction(value):
            text = f".. autofunction:: {room}.{name}\n"
        elif callable(value):  # an operation: a function with more to ask of it
            lines = arguments((inspect.getdoc(value) or "").splitlines())
            text = f".. py:function:: {room}.{name}{signature(value)}\n\n" + "".join(f"   {line}\n" for line in lines)
        else:
            text = f".. py:data:: {room}.{name}\n   :type: {type(value).__name__}\n"
        parts.append(f"````{{eval-rst}}\n{text}````")
    return "\n\n".join(parts) + "\n"


def signature(value: object) -> str:
    """The arguments, types as they are written; empty for what is not called."""
    try:
        return str(inspect.signature(value)).replace("'", "") if callable(value) else ""
    except (TypeError, ValueError):
        return ""
