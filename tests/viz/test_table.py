"""The table of pictures is true: its classes, its files, the page of the documents (rests on the package itself)."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlab import viz
from kvlab.common.drawn import drawer_of
from kvlab.viz import PICTURES
from tools import pictures

ROOT = Path(__file__).resolve().parents[2]


def modules(package: str) -> list[ModuleType]:
    """A package and all that lies in it."""
    top = importlib.import_module(package)
    inside = pkgutil.walk_packages(getattr(top, "__path__", []), f"{package}.") if package.startswith("kvlab.") else ()
    return [top, *(importlib.import_module(module.name) for module in inside)]


def test_each_name_is_that_of_one_class_which_the_function_draws() -> None:
    for function, (file, classes) in PICTURES.items():
        module = importlib.import_module(f"kvlab.viz.{file}")
        assert getattr(viz, function) is getattr(module, function)
        for name in classes.split():
            package, _, kind = name.partition(":")
            found = {vars(m)[kind] for m in modules(package) if kind in vars(m)}
            (cls,) = {c for c in found if f"{c.__module__}.".startswith(f"{package}.")}
            assert drawer_of(cls) is getattr(module, function)


def test_public_objects_with_a_picture_show_it() -> None:
    """A law: what a room exports and has a picture is drawn by itself; but loaders of tiles, which need a shape."""
    silent = set()
    for _, classes in PICTURES.values():
        for name in classes.split():
            package, _, kind = name.partition(":")
            cls = getattr(importlib.import_module(package), kind, None)
            if cls is not None and not hasattr(cls, "_repr_html_"):
                silent.add(kind)
    assert silent == {"ndarray", "SubTileLoaderLDS", "RegTileLoader"}


ROOMS = ("attention", "cache", "layout", "hardware", "staging", "formats", "rosetta", "mirror", "xray", "simt",
         "replay", "exercises", "data", "viz")
WITHOUT = {
    "a type for annotations, or an address space: it has no object with a content":
        "KVCacheT MHAOperand NullableTileTensor TensorLayout TileType ThreadScope KVBufferConfig TileCTA "
        "TensorMapL2Promotion TensorMapSwizzle",
    "numbers of a choice, a line each":
        "KVCacheStaticParams KVBufferParams DecodeKVBufferParams NvidiaKVParams PStagingParams KVMmaOpParams "
        "KBufferConfig VBufferConfig MmaSyncShape Rope Arch Instruction LaneAccess LaneGroups Ranks CardFit KVRequest "
        "PublicModel",
    "part of what is drawn: a row, a phase, a field, an event of another picture":
        "Candidate Collision Phase Event Footprint PageCopy PageTable Fragments SmemImage Field Flaw Piece KVGroup "
        "LayerBytes Copies Stored Known Identified Proof Conversion Difference Pattern Violation Twin Allocation Edge "
        "Finding MemoryAccess Remedy Resources InstructionFacts LineFacts PtxInstruction Comparison Ran RooflinePoint "
        "DmaPlan Side",
    "something that does: a copy, a product, a barrier, a program; what it moves is drawn of buffers and timelines":
        "GenericToLocalTileCopier GenericToSharedAsyncTileCopier GenericToSharedTileCopier LocalToGenericTileCopier "
        "LocalToSharedTileCopier SharedToGenericTileCopier SharedToLocalTileCopier SharedMemBarrier SharedTransfer "
        "AsyncBarrier PipelineState RegTileWriterLDS TiledMmaLoader TiledMmaOp TiledTensorCore KVMmaOp KVCacheIterator "
        "PRegisterBuffer PStaging ColumnAction Arithmetic TensorMemory Operation Program Recorder Watch Canvas "
        "Question",
    "a view of a cache or of an array, which is drawn itself":
        "KVCacheMHAOperand KVCacheScalesMHAOperand RaggedMHAOperand TileTensorMHAOperand PagedRowIndices UnsafePointer "
        "HostDeviceTileTensor RaggedTMA3DTile RaggedTensorMap RecordedCall Capture",
    "a loader whose tile has a shape of its own: draw(loader, shape=...) shows it": "SubTileLoaderLDS RegTileLoader",
    "a table in words": "Coverage Report",
    "a layout whose offsets are coordinates: it lies in no bank": "CoordinateLayout",
}
"""Why -> public classes whose objects show no picture."""


def test_every_public_class_draws_itself_or_says_why_not() -> None:
    """Rests on what rooms export: a class is drawn, shows a page of its own, or is named above with the reason. Errors
    are sentences that name the place; a Hazard is drawn in its timeline (``hazard=``)."""
    silent = set()
    for room in ROOMS:
        module = importlib.import_module(f"kvlab.{room}")
        for name in module.__all__:
            cls = getattr(module, name)
            if isinstance(cls, type) and not hasattr(cls, "_repr_html_") and not issubclass(cls, BaseException):
                silent.add(name)
    told = [name for names in WITHOUT.values() for name in names.split()]
    assert len(told) == len(set(told))
    assert silent == set(told)


def test_what_a_type_checker_sees_is_the_table() -> None:
    """The imports under TYPE_CHECKING say the same as the table: each public name, and its file."""
    tree = ast.parse(Path(viz.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    seen = {alias.name: f"{viz.__name__}.{node.module}" for node in imports for alias in node.names}
    assert set(seen) == set(viz.__all__) - {"PICTURES", "register"}
    assert {name: getattr(viz, name).__module__ for name in seen} == seen


def test_every_file_of_the_room_is_in_the_table() -> None:
    room = Path(viz.__file__).parent
    files = {path.stem for path in room.glob("*.py")}
    files |= {f"{folder}.{path.stem}" for folder in ("charts", "formats") for path in room.glob(f"{folder}/*.py")}
    pages = {"lockstep_page", "charts.replay_page"}  # several pictures in one
    files -= {"__init__", "charts.__init__", "formats.__init__", *pages}
    assert files == {file for file, _ in PICTURES.values()}


def test_the_page_of_the_documents_is_written_from_the_table() -> None:
    text = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    assert text == pictures.page()
    assert set(re.findall(r"`(draw_\w+)` in ", text)) == set(PICTURES)


def test_what_the_page_says_works(registry: dict[Any, Any], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    knobs, block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    before = len(registry)
    names: dict[str, Any] = {}
    exec(compile(block, "pictures.md", "exec"), names)
    assert len(registry) == before + 1
    assert viz.draw(names["Ring"](8)).title == "A ring of 8 slots"
    exec(compile(knobs, "pictures.md", "exec"), names)
    assert (tmp_path / "swizzle.html").exists()
