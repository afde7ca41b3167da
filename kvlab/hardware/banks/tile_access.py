"""A tile in shared memory and what reads or writes it: addresses of elements, instructions of warps, their passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvlab.common.checks import count, integers, require, shown
from kvlab.hardware._arrays import BoolArray, IntArray
from kvlab.hardware.arch import Arch
from kvlab.hardware.instructions import INSTRUCTIONS, get_instruction
from kvlab.layout import ComposedLayout, Layout, LinearLayout, Swizzle
from kvlab.layout.encodings import Encoding, SharedEncoding

from .copy_wavefronts import COPIES, copy_wavefronts
from .count import count_wavefronts, wavefronts
from .wavefront import Wavefronts

MOST = 1 << 22
"""Elements of a tile whose addresses are made at once."""
WIDEST = 16
"""Bytes that a lane moves with one instruction at most."""
PANELS = {128: 3, 64: 2, 32: 1, 16: 0}
"""Bytes of a row of a wgmma operand's panel, and the bits that its swizzle mode XORs."""
ACCEPTED = (
    "a matrix instruction ('ldmatrix.x4'), 'wgmma', (instruction, rows, columns), a LaneAccess, a register layout, or "
    "('ld' or 'st', register layout)"
)


class LaneAccess(NamedTuple):
    """Instructions of a warp on a tile, lane by lane, as an access of :func:`~kvlab.hardware.best_swizzle`.

    instruction   of :data:`~kvlab.hardware.INSTRUCTIONS`, or a cp.async of ``COPIES``: ``"cp.async.cg.16"``
    at            for each dimension of the tile an int array ``[..., lanes]``: each lane's first element
    mask          active lanes ``[..., lanes]``, None: all
    source        of a cp.async: byte addresses in global memory ``[..., lanes]``

    >>> from kvlab.hardware import best_swizzle
    >>> lane = np.arange(32)
    >>> half = LaneAccess("ld.shared.b32", (lane, 0), lane < 16)
    >>> best_swizzle((32, 32), "fp32", half).unswizzled
    16
    """

    instruction: str
    at: tuple[Any, ...]
    mask: Any = None
    source: Any = None


class Access(NamedTuple):
    """Warp instructions of one name: of each lane's first element the place along each dimension, ``[n, lanes]``; its
    active lanes and, of a copy, its source, likewise."""

    name: str
    counted: str
    at: tuple[IntArray, ...]
    mask: BoolArray | None = None
    source: IntArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a lane moves."""
        return COPIES.get(self.counted) or INSTRUCTIONS[self.counted].nbytes


@dataclass(frozen=True)
class PlacedTile:
    """Byte address of each element of a tile ``[rows, columns]``, or of another number of dimensions, the bytes of an
    element, the machine."""

    address: IntArray
    size: int
    arch: Arch

    @property
    def along(self) -> int:
        """The contiguous mode: the last one of those whose elements are neighbours, the last of all if none are."""
        modes = range(self.address.ndim)
        return max((mode for mode in modes if self.steps[mode] == self.size), default=modes[-1])

    @property
    def steps(self) -> list[int]:
        """Bytes from the first element to its neighbour along each mode; 0 along those of one element."""
        first = (0,) * self.address.ndim
        return [
            int(self.address[(*first[:mode], 1, *first[mode + 1 :])] - self.address[first]) if many > 1 else 0
            for mode, many in enumerate(self.address.shape)
        ]

    def counts(self, access: Access) -> tuple[IntArray, IntArray]:
        """Wavefronts of each instruction of an access, and the least that it could take."""
        address = self.address[access.at]
        if access.counted in COPIES:
            return copy_wavefronts(access.counted, address, access.source, access.mask, self.arch)
        mask = None if INSTRUCTIONS[access.counted].matrices else access.mask
        return count_wavefronts(access.counted, address, mask, self.arch)[:2]

    def passes(self, accesses: list[Access]) -> tuple[int, int]:
        """Wavefronts of all instructions, and the least that they could take."""
        counts = [self.counts(access) for access in accesses]
        total, ideal = (sum(int(count[part].sum()) for count in counts) for part in (0, 1))
        return total, ideal

    def worst(self, accesses: list[Access]) -> tuple[Access, int] | None:
        """The instruction with the most conflicts, its access and its number there; None where all are copies."""
        counted = [access for access in accesses if access.counted not in COPIES]
        excess = [np.subtract(*self.counts(access)) for access in counted]
        if not counted:
            return None
        which = int(np.argmax([one.max() for one in excess]))
        return counted[which], int(excess[which].argmax())

    def instruction(self, place: tuple[Access, int] | None) -> Wavefronts | None:
        """One instruction of an access, with all that happens in it."""
        if place is None:
            return None
        access, number = place
        address = self.address[tuple(part[number] for part in access.at)]
        mask = None if access.mask is None or INSTRUCTIONS[access.counted].matrices else access.mask[number]
        return wavefronts(access.counted, address, mask, self.arch)

    def keeps(self, accesses: list[Access], like: PlacedTile) -> bool:
        """Tells whether each lane finds its bytes together and aligned, as it does in the tile ``like``."""
        for access in accesses:
            active = True if access.mask is None else access.mask
            if (active & (self.address[access.at] % access.nbytes != 0)).any():
                return False
            more = np.arange(max(access.nbytes // self.size, 1))
            ways = [np.expand_dims(part, -1) for part in access.at]
            ways[like.along] = np.minimum(ways[like.along] + more, self.address.shape[like.along] - 1)
            here, there = (tile.address[tuple(ways)] for tile in (self, like))
            torn = (here - here[..., :1] != there - there[..., :1]).any(axis=-1)
            if (active & torn).any():
                return False
        return True

    def fits_descriptor(self) -> bool:
        """Tells whether a wgmma descriptor can name the tile: panels of 128, 64, 32 or 16 bytes, in 8 rows one behind
        the other, each with the swizzle of its width, groups of 8 rows at one stride."""
        tile = self.address.T if self.along == 0 else self.address
        for width, bits in PANELS.items():
            columns = width // self.size
            if tile.shape[0] % 8 or tile.shape[1] % columns or (self.along == 0 and self.size != 2):
                continue
            linear = Swizzle(bits, 4, 3, "byte")(tile).reshape(-1, 8, tile.shape[1] // columns, columns)
            starts = linear[:, :1, :, :1]
            inside = np.arange(8)[:, None, None] * width + np.arange(columns) * self.size
            strides = np.diff(starts[:, 0, :, 0], axis=0)
            if (linear - starts == inside).all() and (strides == strides[:1, :1]).all():
                return True
        return False


def tile_of(tile: Any, size: int, arch: Arch, base: int, shape: Any) -> PlacedTile:
    """The tile as it is given, from byte ``base`` on. ``shape`` is an encoding's; other tiles have their own."""
    base = count("base", base)
    if isinstance(tile, SharedEncoding):
        if shape is None:
            raise ValueError(f"shape is None: must be the (rows, columns) of the tile of {tile}")
        return PlacedTile(np.asarray(tile.offsets(shape)) * size + base, size, arch)
    if shape is not None:
        raise ValueError(f"shape is {shown(shape)}: must be None, {shown(tile)} has a shape of its own")
    layout = layout_of(tile)
    require(layout.size <= MOST, f"tile is {layout}, {layout.size} elements", f"at most {MOST}")
    rows, columns = (mode.size for mode in layout.modes)
    linear = (layout(np.arange(rows)[:, None], np.arange(columns)) + _start(tile)) * size + base
    if isinstance(tile, ComposedLayout) and tile.outer is not None:
        linear = _byte_swizzle(tile, size)(linear)
    return PlacedTile(np.asarray(linear, np.int64), size, arch)


def layout_of(tile: Any) -> Layout:
    """The layout of two modes under a tile that is no encoding, without its swizzle."""
    if isinstance(tile, ComposedLayout):
        layout = tile.layout
    elif isinstance(tile, Layout):
        layout = tile
    elif isinstance(tile, tuple | list) and len(tile) == 2:
        layout = Layout.row_major(*tile)
    else:
        raise ValueError(
            f"tile is {shown(tile)}: must be (rows, columns), a Layout, a ComposedLayout or a shared encoding"
        )
    if layout.rank != 2:
        raise ValueError(f"tile is {layout}: must be a tile of two modes, rows and columns")
    return layout


def _start(tile: Any) -> int:
    return tile.offset if isinstance(tile, ComposedLayout) else 0


def _byte_swizzle(tile: ComposedLayout, size: int) -> Swizzle:
    if not isinstance(tile.outer, Swizzle):
        raise ValueError(f"tile is {tile}: must have a swizzle after its layout")
    if tile.outer.unit_bytes != size:
        raise ValueError(f"tile is {tile}: must have a swizzle that counts elements of {size} bytes")
    return tile.outer.in_bytes()


def accesses_of(access: Any, tile: PlacedTile) -> list[Access]:
    """The instructions of one access, or of each in a list."""
    given = access if isinstance(access, list) else [access]
    if not given or not tile.address.size:
        raise ValueError(f"access is {access!r}: must be at least one access, to a tile of at least one element")
    return [_access(one, tile) for one in given]


def _access(access: Any, tile: PlacedTile) -> Access:
    if isinstance(access, LaneAccess):
        return _lane_access(access, tile)
    if isinstance(access, tuple) and len(access) == 3:
        return _lane_access(LaneAccess(access[0], access[1:]), tile)
    require(tile.address.ndim == 2, f"shape is {tile.address.shape}", "(rows, columns)")
    if isinstance(access, str):
        return _wgmma(tile) if access == "wgmma" else _matrix_walk(access, tile)
    if isinstance(access, tuple) and len(access) == 2 and access[0] in ("ld", "st"):
        return _registers(access[0], access[1], tile)
    if isinstance(access, Layout | LinearLayout | Encoding):
        return _registers("ld", access, tile)
    raise ValueError(f"access is {shown(access)}: must be {ACCEPTED}")


def _lane_access(access: LaneAccess, tile: PlacedTile) -> Access:
    name, shape = access.instruction, tile.address.shape
    copies = isinstance(name, str) and name in COPIES
    if not copies:
        get_instruction(name, tile.arch)
    if copies == (access.source is None):
        raise ValueError(f"access {name}: source is {shown(access.source)}: must be {'given' if copies else 'None'}")
    parts = [integers("access", part) for part in access.at]
    parts += [] if access.source is None else [integers("access", access.source)]
    parts += [] if access.mask is None else [np.asarray(access.mask)]
    parts = list(np.broadcast_arrays(*parts))
    lanes = tile.arch.warp_size
    what = "rows and columns" if len(shape) == 2 else "places"
    if parts[0].ndim < 1 or parts[0].shape[-1] != lanes:
        raise ValueError(f"access {name}: {what} are {parts[0].shape}: must be [..., {lanes}] lanes")
    flat = [part.reshape(-1, lanes) for part in parts]
    at, source = flat[: len(access.at)], flat[len(access.at)] if copies else None
    mask = None if access.mask is None else flat[-1].astype(np.bool_)
    require(len(at) == len(shape), f"access {name}: at has {len(at)} arrays", f"{len(shape)}, one for each mode")
    if any(part.size and (part.min() < 0 or part.max() >= many) for part, many in zip(at, shape, strict=True)):
        raise ValueError(f"access {name}: {what} outside the tile of {' x '.join(map(str, shape))}")
    return Access(name, name, tuple(at), mask, source)


def _matrix_walk(name: str, tile: PlacedTile) -> Access:
    """ldmatrix or stmatrix over the whole tile, 16 bytes along the contiguous mode."""
    count = get_instruction(name, tile.arch).matrices
    if not count:
        raise ValueError(f"access {name!r} does not say where lanes go; give (instruction, rows, columns)")
    lane, vector = np.arange(tile.arch.warp_size), WIDEST // tile.size
    rows, columns = tile.address.shape if tile.along else tile.address.shape[::-1]
    height = 8 if count == 1 or (rows == 8 and columns % (count * vector) == 0) else 16
    width = 8 * count // height * vector
    if rows % height or columns % width:
        raise ValueError(
            f"access {name!r} visits blocks of {height} x {width}, which do not divide the tile of {rows} x {columns}"
        )
    first_row, first_column = np.arange(0, rows, height), np.arange(0, columns, width)
    row = first_row[:, None, None] + lane % height
    column = first_column[:, None] + lane // height * vector % width
    shape = (len(first_row), len(first_column), tile.arch.warp_size)
    ways = [np.broadcast_to(part, shape).reshape(-1, shape[-1]) for part in (row, column)]
    return Access(name, name, tuple(ways if tile.along else ways[::-1]))


def _wgmma(tile: PlacedTile) -> Access:
    """The operand read by core matrices: 8 rows of 16 bytes are a pass, as those of an 8x8 matrix."""
    if "wgmma" not in tile.arch.features:
        raise ValueError(f"access is 'wgmma': {tile.arch.name} has none, must be one of its instructions")
    return _matrix_walk("ldmatrix.x1", tile)._replace(name="wgmma")


def _registers(verb: str, layout: Any, tile: PlacedTile) -> Access:
    """The plain loads or stores of a register layout: the widest whose bytes lie together in the tile."""
    row, column = _held(layout, tile)
    address = tile.address[row, column]
    order = np.argsort(address[0], kind="stable")
    row, column, address = row[:, order], column[:, order], address[:, order]
    width = max(WIDEST // tile.size, 1)
    while width > 1 and not _together(address, width, tile.size):
        width //= 2
    warp, bits = tile.arch.warp_size, 8 * tile.size * width
    kind = "read" if verb == "ld" else "write"
    amd = f"ds_{kind}_{'u' if verb == 'ld' and bits < 32 else 'b'}{bits}"
    name = f"{verb}.shared.b{bits}" if tile.arch.vendor == "nvidia" else amd
    if name not in INSTRUCTIONS:
        raise ValueError(f"access is {shown(layout)}: no instruction moves elements of {tile.size} bytes")
    ways = (part[:, ::width].reshape(-1, warp, part.shape[1] // width) for part in (row, column))
    return Access(name, name, tuple(np.moveaxis(part, -1, 1).reshape(-1, warp) for part in ways))


def _together(address: IntArray, width: int, size: int) -> bool:
    if address.shape[1] % width:
        return False
    pieces = address.reshape(len(address), -1, width)
    steps = pieces - pieces[..., :1] == np.arange(width) * size
    return bool(steps.all() and not (pieces[..., 0] % (width * size)).any())


def _held(layout: Any, tile: PlacedTile) -> tuple[IntArray, IntArray]:
    """Row and column ``[threads, values]`` that a thread holds in a value, those that only repeat left out.

    A :class:`Layout` of (threads, values) gives places in the tile counted down its columns, as CuTe does."""
    rows, columns = tile.address.shape
    if isinstance(layout, Layout):
        if layout.rank != 2:
            raise ValueError(f"access is {layout}: must be a thread-value layout of two modes, threads and values")
        threads, values = (mode.size for mode in layout.modes)
        place = np.asarray(layout(np.arange(threads)[:, None], np.arange(values)), np.int64)
        if place.size and not (0 <= place.min() and place.max() < rows * columns):
            reach = f"places {place.min()} to {place.max()}"
            raise ValueError(f"access {layout}: {reach} outside the tile of {rows} x {columns}")
        column, row = np.divmod(place, rows)
    else:
        if isinstance(layout, SharedEncoding) or not isinstance(layout, Encoding | LinearLayout):
            raise ValueError(f"access is {shown(layout)}: must be {ACCEPTED}")
        linear = layout.to_linear_layout((rows, columns)) if isinstance(layout, Encoding) else layout
        ins = linear.in_dims
        if not {"register", "lane"} <= ins.keys() or linear.shape != (rows, columns):
            raise ValueError(
                f"access is a layout from {ins} to {linear.shape}: must be from registers and lanes to {rows, columns}"
            )
        warps = ins.get("warp", 1)
        thread = np.arange(warps * ins["lane"])[:, None]
        where = {"lane": thread % ins["lane"], "register": np.arange(ins["register"])}
        row, column = linear(**where, **({"warp": thread // ins["lane"]} if "warp" in ins else {}))
    if not row.size or len(row) % tile.arch.warp_size:
        raise ValueError(f"access has {len(row)} threads: must be whole warps of {tile.arch.warp_size}")
    _, first = np.unique(row * columns + column, axis=1, return_index=True)
    kept = np.sort(first)
    return row[:, kept], column[:, kept]
