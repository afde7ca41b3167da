"""The pictures of the demo's page: one key of the capture on its way, for each machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlab.attention.mha_decode.config import DecodeConfig, DecodeProblem, choose_config
from kvlab.cache import PagedKVCacheCollection
from kvlab.data import Capture
from kvlab.hardware import get_atom, wavefronts
from kvlab.layout import Swizzle
from kvlab.mirror import Lockstep
from kvlab.staging import DecodeStreamingKVBuffer, KVBufferParams, MmaSyncShape, SwizzledTile
from kvlab.staging.gfx950.mfma_cta import MfmaShape
from kvlab.viz import (
    BytePath,
    ByteScroll,
    Picture,
    draw_atom,
    draw_cure,
    draw_errors,
    draw_one_diagonal,
    draw_page_table,
    draw_path_of_a_byte,
    draw_shared_memory,
)

from .steps import Step


def shown_token(capture: Capture) -> int:
    """The token whose key the page follows."""
    return min(max(capture.prompt_tokens - 1, 0), 137)


def shown_config(capture: Capture) -> DecodeConfig:
    """The tile sizes of a decode step over the capture's prompt."""
    heads, D, size = (capture.query_heads, capture.kv_heads), capture.head_dim, capture.dtype.itemsize
    return choose_config(DecodeProblem(1, 1, *heads, D, D, size, 16, capture.tokens))


@dataclass(frozen=True)
class Chapter:
    """A heading, a few words and pictures."""

    heading: str
    words: str
    pictures: tuple[Picture, ...]


def pages(pool: PagedKVCacheCollection, tokens: int, token: int) -> Chapter:
    """The page table and where the followed token lies."""
    picture = draw_page_table(
        pool.lookup_table, [tokens], pool.page_size, pages=pool.total_num_pages, token=(0, token),
        names=["one sequence"],
    )
    words = (
        "K and V of all layers lie in pages of a pool, in any order. The page table says which page holds which "
        "tokens of a sequence; pages that belong to nobody, and slots that no token has filled, hold NaN here, so that "
        "reading one shows."
    )
    return Chapter("In DRAM: pages", words, (picture,))


def byte_path(
    capture: Capture, pool: PagedKVCacheCollection, config: DecodeConfig, layer: int, head: int, token: int,
    element: int,
) -> BytePath:
    """Places of one element of a key at every stage, on sm_90 in 16-bit storage."""
    shape = MmaSyncShape(config.BM, config.BN, capture.head_dim, config.BD, capture.dtype)
    keys, place, size = pool.get_key_cache(layer), shape.place("k"), capture.dtype.itemsize
    view = keys.blocks.ctypes.data - pool.blocks.ctypes.data
    row = token % config.BN
    vector, inside = divmod(element * size, 16)
    held = shape.fragment_map("k")
    thread, _, register = np.argwhere((held.row == row) & (held.col == element))[0].tolist()
    at = shape.atom.fragment_b(np.arange(16 * 8).reshape(16, 8))[thread % 32, register]
    k, n = divmod(int(at), 8)
    return BytePath(
        name="K", sequence=0, token=token, head=head, element=element, element_bytes=size,
        page_table=tuple(pool.lookup_table[0, : -(-capture.tokens // pool.page_size)].tolist()),
        page_size=pool.page_size, depth=capture.head_dim,
        dram_byte=view + int(keys.block_paged_ptr(0, token, head, element).byte_address),
        tile=(config.BN, config.BD), tile_at=(row, element), shared_byte=int(place.address(row, vector)) + inside,
        plain_byte=int(place.plain().address(row, vector)) + inside,
        warp=thread // 32, lane=thread % 32, register=register, lanes=32, registers=shape.atom.regs_b,
        atom=shape.atom.name, shape=shape.atom.shape, operand="b",
        operand_at=(int(k), int(n)), packed=max(1, 4 // shape.atom.dtype_of("b").itemsize),
    )


def diagonal(capture: Capture, config: DecodeConfig) -> Chapter | None:
    """The tile of keys without and with its swizzle; None for float32, which has none."""
    if capture.dtype.itemsize != 2:
        return None
    shape = MmaSyncShape(config.BM, config.BN, capture.head_dim, config.BD, capture.dtype)
    words = (
        f"A key of this model has {shape.place('k').row_bytes} bytes in a row of shared memory. A matrix instruction "
        "asks for the same 16 bytes of 8 keys at once. In plain rows they crowd in few groups of banks and come one "
        "after the other; permuted, they lie in all groups: one diagonal."
    )
    return Chapter("Why a key lies swizzled", words, (draw_one_diagonal(shape.place("k")),))


def path(
    capture: Capture, pool: PagedKVCacheCollection, config: DecodeConfig, layer: int, token: int
) -> Chapter | None:
    """The whole way of one byte in one strip; None for float32, which has no fragments."""
    if capture.dtype.itemsize != 2:
        return None
    followed = _followed(capture, pool, config, layer, token)
    words = "Six places, the same byte marked in each; the sections below look at them one by one."
    return Chapter("The way of one byte", words, (draw_path_of_a_byte(followed),))


def _followed(
    capture: Capture, pool: PagedKVCacheCollection, config: DecodeConfig, layer: int, token: int
) -> BytePath:
    """The element that the page follows."""
    element = min(37, capture.head_dim - 1)
    return byte_path(capture, pool, config, layer, capture.kv_heads - 1, token, element=element)


def scroll(
    capture: Capture, pool: PagedKVCacheCollection, config: DecodeConfig, layer: int, token: int, run: Lockstep
) -> ByteScroll | None:
    """The way of one byte, place after place, with the lines of ``run``; None for float32."""
    if capture.dtype.itemsize != 2:
        return None
    followed = _followed(capture, pool, config, layer, token)
    value = pool.get_key_cache(layer).load(0, followed.head, token, followed.element, width=1)[0]
    return ByteScroll(followed, value, run)


def errors(steps: Sequence[Step], names: Sequence[str]) -> Picture | None:
    """The errors of the siblings; None where nothing was compared."""
    rows = {name: [(step.errors[name], step.allowed) for step in steps if name in step.errors] for name in names}
    return draw_errors({name: row for name, row in rows.items() if row}) if any(rows.values()) else None


def sm_90(capture: Capture, config: DecodeConfig, token: int) -> Chapter:
    """The K tile in shared memory as cp.async leaves it, and the first ldmatrix of the warp that reads the token."""
    if capture.dtype.itemsize == 4:
        return _sm_90_float32(config)
    shape = MmaSyncShape(config.BM, config.BN, capture.head_dim, config.BD, capture.dtype)
    place = shape.place("k")
    row = token % config.BN
    warp, instruction = row // 8 % 4, row // 32 * (config.BD // 32)
    name, address = shape.read_addresses("k")
    _, plain = shape.read_addresses("k", swizzled=False)
    swizzled, unswizzled = (wavefronts(name, a[instruction, warp], arch="sm_90") for a in (address, plain))
    pictures = (
        draw_shared_memory(place, access=swizzled),
        draw_cure(unswizzled, swizzled, tiles=(place.plain(), place), names=("not swizzled", "swizzled")),
        draw_atom(shape.atom, lane=row % 8 * 4),
    )
    words = (
        f"Each tile of {config.BN} keys is copied by cp.async, 16 bytes a lane, into rows of {place.row_bytes} bytes "
        f"whose 16-byte vectors are permuted by {place.swizzle}. Warp {warp} then reads 8 keys x 32 columns with one "
        f"{name}; below, the same read without the swizzle beside it. Last, the fragments that the matrix "
        f"instruction takes; lane {row % 8 * 4} holds the first elements of the followed key."
    )
    return Chapter("Hopper (sm_90): shared memory, lanes, fragments", words, pictures)


def _sm_90_float32(config: DecodeConfig) -> Chapter:
    """float32 takes no tensor cores and no swizzle: rows as they are."""
    place = SwizzledTile(config.BN, 4 * config.BD, swizzle=Swizzle.identity("vector"))
    words = (
        f"float32 is multiplied without tensor cores, which would round it. Each tile of {config.BN} keys is copied by "
        f"cp.async into plain rows of {place.row_bytes} bytes; every lane reads the keys of its own columns of S, four "
        "columns at a time."
    )
    return Chapter("Hopper (sm_90): shared memory", words, (draw_shared_memory(place),))


def gfx950(capture: Capture, pool: PagedKVCacheCollection, layer: int) -> Chapter | None:
    """A strip of K as the streaming buffer's DMA leaves it in LDS, and the first read of wave 0."""
    try:
        shape = MfmaShape(16, 128, capture.head_dim, capture.dtype)
    except ValueError:
        return None
    params = shape.params(capture.kv_heads, transpose=True)
    pictures = []
    for p in (params, params.unswizzled()):
        buffer = DecodeStreamingKVBuffer(p, pool.get_key_cache(layer), batch_idx=0, head_idx=0)
        name, address = buffer.read_addresses()
        access = wavefronts(name, address[0, 0], arch="gfx950")
        pictures.append(draw_shared_memory(_strip_owner(p), access=access, row_bytes=256))
    pictures.append(draw_atom(get_atom(shape.atom.name), lane=17))
    words = (
        f"MAX's streaming decode brings K strip by strip: {params.BN} keys x {params.BK} columns by DMA, whose "
        f"shared-memory side is linear in the lane, so that the swizzle, {params.swizzle}, is made by permuting the "
        "source. Shown are the strip with the first read of wave 0, the same without the swizzle, and the fragments. "
        f"{_GROUPS if params.swizzle is not None and params.BK == 32 else ''}"
        "Wavefronts are provisional: no chip has confirmed the AMD rule here."
    )
    return Chapter("CDNA4 (gfx950): streaming strips", words, tuple(pictures))


_GROUPS = (
    "gfx950 has 64 banks, 16 groups of 16 bytes, and serves 16 lanes of this read at once, not in lane order: lanes 0 "
    "to 3, 12 to 15 and 20 to 27 first, as others measured. They hold keys 0 to 3 and 12 to 15 at one column and 4 to "
    "11 at the next, and the swizzle spreads these over all 16 groups; 16 keys at one column would fall into 8. "
)


def _strip_owner(params: KVBufferParams) -> np.ndarray:
    """(row, 16-byte vector) of the strip that lies in each 16-byte slot of shared memory."""
    vectors = params.BK // params.simd_width
    slot = np.arange(params.BN * vectors)
    source = slot if params.swizzle is None else params.swizzle(slot)  # LDS slot v holds vector swizzle(v)
    return np.stack(np.divmod(source, vectors), axis=-1)
