"""The shared memory of a KV buffer: stages and blocks between rules, the swizzle, and the lanes of one read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .pen.picture import Picture
from .shared_memory import TOLD, draw_shared_memory


def draw_kv_buffer(
    buffer: Any, *, read: tuple[int, ...] | None = None, instruction: int = 0, warp: int = 0, program: int = 0,
    stage: int | None = None, colour: str = "column", fold: bool = True, title: str | None = None,
    caption: str | None = None,
) -> Picture:
    """Draws the contents of the shared memory of a KV buffer, of gfx950 or NVIDIA.

    buffer       has ``params``, ``smem_image(program)`` and ``read_addresses(...)``; what it has not loaded is hatched
    read         the arguments of its ``read_addresses``, such as (stage, strip): the lanes of one
                 instruction are outlined
    instruction, warp   which of them
    program      whose shared memory
    stage        only this one
    colour       ``"column"``, ``"row"`` or ``"bank"``, as :func:`draw_shared_memory` takes it
    fold         show the first rows of the first two blocks and of the last one of each stage

    Raises ValueError for a read, instruction or warp that does not exist.

    >>> from kvlab.cache import PagedKVCache
    >>> from kvlab.staging import CpAsyncKVBuffer, NvidiaKVParams
    >>> params = NvidiaKVParams("bf16", BN=32, depth=64, kv_num_heads=1, transpose=True)
    >>> cache = PagedKVCache(np.zeros((1, 32, 1, 64), params.dtype), [32], [[0]], 0, 32)
    >>> k = CpAsyncKVBuffer(params, cache, batch_idx=0, head_idx=0, end=32)
    >>> k.load_from_dram(0)
    >>> draw_kv_buffer(k).title
    'CpAsyncKVBuffer of K, 2 stages of 4 KiB: vector 0 of 8 keys lies in 8 of 8 bank groups'
    >>> draw_kv_buffer(k, read=(0,)).title
    'CpAsyncKVBuffer of K: ldmatrix.x4 takes 4 wavefronts, ideal 4'
    """
    from kvlab.hardware import INSTRUCTIONS, get_arch, wavefronts

    image, arch = buffer.smem_image(program), get_arch(getattr(buffer.params, "arch", "gfx950"))
    image = image if stage is None else image.stage(stage)
    row_bytes = arch.pass_bytes
    areas = _shown(image.areas) if fold and len(image.areas) > 6 else image.areas
    rules = {area.address: area.words for area in areas if area.address % row_bytes == 0}
    access, plain, lane_bytes = None, None, 16
    if read is not None:
        if not hasattr(buffer, "read_addresses"):
            raise ValueError(f"read {read}: the tensor cores read a {type(buffer).__name__} themselves, no lane does")
        name, addresses = buffer.read_addresses(*read)
        _check(instruction, len(addresses), "instruction")
        _check(warp, addresses.shape[1], "warp")
        plain = addresses[instruction, warp]
        lane_bytes = int(name.rpartition("_")[2].lstrip("bu")) // 8 if name.startswith("ds_") else 16
        if name in INSTRUCTIONS and not (plain % lane_bytes).any():
            access = wavefronts(name, plain, arch=arch.name)
    return draw_shared_memory(
        image.slots, base=image.base, colour=colour, access=access, addresses=plain, lane_bytes=lane_bytes,
        rules=rules, row_bytes=row_bytes, banks=arch.banks, fold=fold,
        title=title or _title(buffer, image, access, row_bytes // 16),
        caption=caption or _caption(colour, row_bytes, access),
    )


def _shown(areas: tuple[Any, ...]) -> list[Any]:
    """The first two areas and the last one of each stage."""
    stages: dict[int, list[Any]] = {}
    for area in areas:
        stages.setdefault(area.stage, []).append(area)
    return [area for blocks in stages.values() for area in (*blocks[:2], *blocks[2:][-1:])]


def _check(value: int, count: int, what: str) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{what} is {value}: must be one of the {count} that read")


def _title(buffer: Any, image: Any, access: Any, groups: int) -> str:
    p = buffer.params
    name = f"{type(buffer).__name__} of {p.role.upper()}"
    if access is not None:
        passes = f"{access.wavefronts} wavefront{'s' if access.wavefronts != 1 else ''}"
        swizzle = f", {p.swizzle or 'no swizzle'}" if hasattr(p, "swizzle") else ""
        return f"{name}{swizzle}: {access.instruction} takes {passes}, ideal {access.ideal}"
    return f"{name}, {_size(image)}: {_spread(image, groups)}"


def _size(image: Any) -> str:
    stages = len({area.stage for area in image.areas})
    blocks, size = len(image.areas) // stages, f"{16 * len(image.slots) / 1024 / stages:g} KiB"
    size = f"{stages} stages of {size}" if stages > 1 else size
    return f"{size} in {blocks} blocks" if blocks > 1 else size


def _spread(image: Any, groups: int) -> str:
    """Over how many bank groups the first vector of neighbouring keys is spread."""
    row, vector = image.slots.T
    held = row >= 0
    if not held.any():
        return "nothing loaded"
    first = held & (vector == vector[held].min())
    keys = np.unique(row[first])[:groups]
    slot = np.flatnonzero(first & np.isin(row, keys))
    found = len(np.unique((image.base // 16 + slot) % groups))
    return f"vector {vector[held].min()} of {len(keys)} keys lies in {found} of {groups} bank groups"


def _caption(colour: str, row_bytes: int, access: Any) -> str:
    text = (
        f"Shared memory in rows of {row_bytes} bytes, all {row_bytes // 4} banks once. A cell is a vector of 16 bytes, "
    )
    text += f"named row,vector of the tile; the colour tells {TOLD[colour]}. Rules: stages and blocks begin."
    if access is not None:
        text += " Outlined: what the lanes of one instruction read"
        text += "; wavefronts are provisional." if access.provisional else "."
    return text
