"""Scales of fp8 queries, of keys and values of fp8 or 4 bits: checked, and in the forms that kernels fold into sums.

A scale is None (1), a number, an array ``[Hkv]`` (or of one element) or ``[B, Hkv]`` of float32, or, for K and V, one
for each token and head. It multiplies what is stored: the true K is ``k * k_scale``. K and V of other dtypes have
none but 1, that of q is ignored. Numbers and scales of heads go into the softmax scale and the epilogue, those of
tokens into the columns of S and P.

Keys and values of 4 bits are bytes, the first of two columns in the low half: e2m1 where scales of blocks are given
(NVFP4: e4m3, of 16 columns each; they multiply the tile where it is converted), integers from 0 to 15 where minima of
tokens are (``code * scale + minimum``; products are of ``code - 8``, what is missing is added to the sums), integers
from -8 to 7 otherwise.

Operations call :func:`resolve_scales` and hand the :class:`Scales` to all siblings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.checks import check_array, check_strides, finite_number, known_dtype
from kvlab.attention.tiles.masked import load
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.strides import PageStrides, in_units
from kvlab.common.arrays import address_of, dtype_of, element_strides, same_place
from kvlab.common.checks import require, shown
from kvlab.common.torch_here import is_torch, torch_here
from kvlab.formats.stored import STORED
from kvlab.memory import float8_e4m3fn, float16, float32
from kvlab.staging import Fragments

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]
DOCUMENTATION = (
    "of e4m3 arrays, and of K and V of 4 bits: a number, float32 ``[Hkv]`` or ``[B, Hkv]``, or, for K and V, of each "
    "token and head ``[pages, page_size, Hkv]`` (so is taken what could be ``[B, Hkv]``, too); the true K is "
    "``k_cache * k_scale``. Left out, or 1, for K and V of other dtypes; that of another q is ignored"
)
BLOCK_DOCUMENTATION = (
    "of K and V of uint8, two e2m1 a byte, both or none: float8_e4m3fn ``[pages, page_size, Hkv, D / 16]`` (NVFP4), "
    "not negative, of 16 columns each, besides k_scale and v_scale; those of four slots side by side (the 4x4 order) "
    "are ``[pages, page_size / 4, Hkv, D / 16, 4]``; without them uint8 is two integers, -8 to 7"
)
MINIMA_DOCUMENTATION = (
    "of K and V of uint8, both or none: ``[pages, page_size, Hkv]`` as k_scale and v_scale then are, all float32 or "
    "float16: codes are integers from 0 to 15, and the true K is ``code * k_scale + k_min``"
)
BLOCK = 16
"""Columns of 4 bits that share an e4m3 scale."""
SIDE_BY_SIDE = 4
"""Slots whose scales of a block lie side by side in the 4x4 order."""
MIDDLE = 8.0
"""What a code over minima is converted less: numbers of either sign, as of integers without minima."""
BLOCK_UNIT = 2.0**14
"""Columns with scales of blocks over this are multiplied, all exact in float16."""
P_SCALE = 2.0**8
"""P times this is rounded to e4m3 where P V runs in fp8; its inverse is in the epilogue."""


@dataclass(frozen=True, eq=False)
class Scale:
    """``number`` times the element of ``heads`` ``[Hkv]`` or ``[B, Hkv]``, or of ``tokens`` (K's or V's shape without
    its last axis), times that of ``blocks``, e4m3 of each 16 columns; to which that of ``minima``, as of tokens, is
    added.
    """

    number: float = 1.0
    heads: Any = None
    tokens: Any = None
    blocks: Any = None
    minima: Any = None

    @property
    def kind(self) -> str:
        """ "number", "head" or "token"; the constant of kernels."""
        return "token" if self.tokens is not None else "head" if self.heads is not None else "number"

    @property
    def array(self) -> Any:
        """The array of the scale, None where there is none."""
        return self.heads if self.tokens is None else self.tokens

    @property
    def factor(self) -> float:
        """The number, times what columns with scales of blocks are divided by where they are multiplied."""
        return self.number if self.blocks is None else self.number * BLOCK_UNIT

    @property
    def scaled(self) -> bool:
        """The scale is another than 1."""
        return self.array is not None or self.number != 1

    def values(self, cache: Any, where: Any) -> Any:
        """The rows ``where`` of K or V as they are before :meth:`at`: of 4 bits the numbers of their codes, times the
        scales of their blocks or, over minima, as they are; float64, NumPy.

        >>> cache = np.array([[0x21, 0xF8]], np.uint8)
        >>> Scale().values(cache, 0).tolist(), Scale(blocks=np.array([[2.0]], float8_e4m3fn)).values(cache, 0).tolist()
        ([1.0, 2.0, -8.0, -1.0], [1.0, 2.0, -0.0, -12.0])
        """
        rows = cache[where]
        if not is_four_bits(cache):
            return rows
        codes = np.stack([rows & 15, rows >> 4], -1).reshape(*rows.shape[:-1], columns_of(cache))
        if self.minima is not None:
            step, least = (np.asarray(x[where], np.float64)[..., None] for x in (self.tokens, self.minima))
            return STORED["u4"].numbers(codes) * step + least
        if self.blocks is None:
            return STORED["s4"].numbers(codes).astype(np.float64)
        by = np.repeat(np.asarray(by_slot(self.blocks)[where]).astype(np.float64), BLOCK, -1)[..., : codes.shape[-1]]
        return STORED["e2m1"].numbers(codes) * by

    def at(self, where: Any, sequence: int = 0) -> Any:
        """The scales ``[Hkv]`` or ``[n, Hkv]`` of the rows ``where`` of K or V of a sequence, float64, NumPy."""
        if self.array is None or self.minima is not None:
            return np.float64(self.number)
        found = self.tokens[where] if self.heads is None else self.heads
        return np.asarray(found[sequence] if self.by_sequence else found, np.float64) * self.number

    @property
    def by_sequence(self) -> bool:
        """Sequences have scales of heads of their own."""
        return self.heads is not None and self.heads.ndim == 2


@dataclass(frozen=True, eq=False)
class Scales:
    """The scales of a call. Where parts of K have scales of their own, ``nope`` is that of its columns before those of
    rope, ``rope`` that of those, and ``k`` that of both.
    """

    q: Scale = field(default_factory=Scale)
    k: Scale = field(default_factory=Scale)
    v: Scale = field(default_factory=Scale)
    nope: Scale = field(default_factory=Scale)
    rope: Scale = field(default_factory=Scale)

    def factor_log2(self, scale: float) -> float:
        """``scale`` of the softmax in units of log2, times the numbers of q and k, as K is multiplied."""
        return scale * LOG2E * self.q.number * self.k.factor

    @property
    def v_factor(self) -> float:
        """The number of v, as V is multiplied."""
        return self.v.factor

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Kind of each of q, k, v."""
        return self.q.kind, self.k.kind, self.v.kind


def is_fp8(array: Any) -> bool:
    """Tells whether the elements are e4m3."""
    return known_dtype(array, "array") == float8_e4m3fn


def is_scaled(array: Any) -> bool:
    """Tells whether the elements are e4m3, or of 4 bits."""
    return known_dtype(array, "array") in (float8_e4m3fn, np.uint8)


def is_four_bits(array: Any) -> bool:
    """Tells whether the elements are bytes, each two columns of 4 bits."""
    return known_dtype(array, "array") == np.uint8


def columns_of(array: Any) -> int:
    """Columns of a row of K or V ``[.., D]``, or of 4 bits ``[.., D / 2]``.

    >>> columns_of(np.zeros((4, 16, 2, 64), np.uint8)), columns_of(np.zeros((4, 16, 2, 64), float8_e4m3fn))
    (128, 64)
    """
    return int(array.shape[-1]) << is_four_bits(array)


def resolve_scales(
    q: Any, k: Any, v: Any, batch: int, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
    k_block_scale: Any = None, v_block_scale: Any = None, k_min: Any = None, v_min: Any = None,
) -> Scales:
    """The scales of q, k ``[.., Hkv, D]`` and v of ``batch`` sequences; ValueError for what is no scale of theirs.

    >>> k = np.zeros((4, 16, 2, 64), float8_e4m3fn)
    >>> resolve_scales(k, k, k, 3, 0.5, np.ones((3, 2), np.float32), np.ones((4, 16, 2), np.float32)).kinds
    ('number', 'head', 'token')
    >>> resolve_scales(k, k, k, 3, k_scale=np.ones(3, np.float32))
    Traceback (most recent call last):
        ...
    ValueError: k_scale has shape (3,): must be a number, [Hkv = 2], [B = 3, 2] or, of each token and head, (4, 16, 2)
    """
    heads = int(k.shape[-2])
    check_block_scales(k, v, k_block_scale, v_block_scale)
    check_minima(k, v, k_scale, v_scale, k_min, v_min, blocks=k_block_scale is not None)
    given = ("k_scale", k_scale, k, k_block_scale, k_min), ("v_scale", v_scale, v, v_block_scale, v_min)
    return Scales(resolve_scale("q_scale", q_scale, q, batch, heads, None), *(
        of_codes(resolve_scale(name, scale, of, batch, heads, tuple(of.shape[:-1]), minima is not None), blocks, minima)
        for name, scale, of, blocks, minima in given
    ))


def check_block_scales(k: Any, v: Any, k_block_scale: Any, v_block_scale: Any) -> None:
    """ValueError for scales of blocks that are not of K and V of 4 bits, both or none.

    >>> k, scale = np.zeros((4, 16, 2, 32), np.uint8), np.ones((4, 16, 2, 4), float8_e4m3fn)
    >>> check_block_scales(k, k, scale, scale)
    >>> check_block_scales(k, k, scale, scale[..., :2])
    Traceback (most recent call last):
        ...
    ValueError: v_block_scale has shape (4, 16, 2, 2): must be (4, 16, 2, 4), one of each 16 columns of v
    """
    given = {"k_block_scale": k_block_scale, "v_block_scale": v_block_scale}
    if not _of_both(given):
        return
    for (name, scale), (of, array) in zip(given.items(), (("k", k), ("v", v)), strict=True):
        what = f"{name} with {of} of dtype {dtype_of(array, of)}"
        require(is_four_bits(array), what, "left out: of uint8, two e2m1 a byte")
        check_array(name, scale)
        same_place(**{name: scale, of: array})
        require(is_fp8(scale), f"{name} has dtype {scale.dtype}", "float8_e4m3fn")
        rows, blocks = tuple(map(int, array.shape[:-1])), columns_of(array) // BLOCK
        check_blocks_of_rows(name, scale, rows, blocks, f"one of each {BLOCK} columns of {of}")


def _of_both(given: dict[str, Any]) -> bool:
    """Whether an array of K and one of V are there; ValueError for one without the other."""
    missing = [name for name, array in given.items() if array is None]
    beside = " and ".join(name for name in given if name not in missing)
    require(len(missing) != 1, f"{''.join(missing)} is None", f"given with {beside}: K and V are of one format")
    return not missing


def check_blocks_of_rows(name: str, scale: Any, rows: tuple[int, ...], blocks: int, what: str) -> None:
    """ValueError for scales that are not ``[pages, page_size, Hkv, blocks]`` of these rows, or in the 4x4 order
    ``[pages, page_size / 4, Hkv, blocks, 4]``, whose fours are words.
    """
    shape = tuple(map(int, scale.shape))
    if len(shape) != 5:
        require(shape == (*rows, blocks), f"{name} has shape {shape}", f"{(*rows, blocks)}, {what}")
        check_strides(name, scale)
        return
    pages, slots, heads = rows
    whole = slots % SIDE_BY_SIDE == 0
    require(whole, f"{name} in the 4x4 order with pages of {slots}", f"of pages of a multiple of {SIDE_BY_SIDE} slots")
    expected = pages, slots // SIDE_BY_SIDE, heads, blocks, SIDE_BY_SIDE
    require(shape == expected, f"{name} has shape {shape}", f"{expected}, {what}, of four slots side by side")
    strides = element_strides(scale, name)
    words = strides[-2:] == (SIDE_BY_SIDE, 1) and not any(step % SIDE_BY_SIDE for step in (*strides[:-2],))
    words = words and min(strides) >= 0 and address_of(scale) % SIDE_BY_SIDE == 0
    require(words, f"{name} has strides {strides}", "words of four bytes, those of a head one after the other")


def check_minima(
    k: Any, v: Any, k_scale: Any, v_scale: Any, k_min: Any, v_min: Any, *, blocks: bool
) -> None:
    """ValueError for minima that are not of K and V of 4 bits, both or none, and beside scales of tokens.

    >>> k, some = np.zeros((4, 16, 2, 32), np.uint8), np.ones((4, 16, 2), np.float32)
    >>> check_minima(k, k, some, some, some, some, blocks=False)
    >>> check_minima(k, k, 1.0, some, some, some, blocks=False)
    Traceback (most recent call last):
        ...
    ValueError: k_scale is 1.0: must be of shape (4, 16, 2), as k_min is
    """
    given = {"k_min": k_min, "v_min": v_min}
    if not _of_both(given):
        return
    for (name, least), of, array, scale in zip(given.items(), "kv", (k, v), (k_scale, v_scale), strict=True):
        require(is_four_bits(array), f"{name} with {of} of dtype {array.dtype}", "left out: of uint8, two codes a byte")
        require(not blocks, f"{name} with {of}_block_scale", "one of them: e2m1 has no minimum")
        check_array(name, least)
        same_place(**{name: least, of: array})
        expected = tuple(map(int, array.shape[:-1]))
        shape = tuple(map(int, getattr(scale, "shape", ())))
        found = f"is {shown(scale)}" if not shape else f"has shape {shape}"
        require(shape == expected, f"{of}_scale {found}", f"of shape {expected}, as {name} is")
        shape = tuple(map(int, least.shape))
        require(shape == expected, f"{name} has shape {shape}", f"{expected}, one of each token and head of {of}")
        kind = dtype_of(least, name)
        require(kind in (float32, float16), f"{name} has dtype {least.dtype}", "float32 or float16")
        alike = dtype_of(scale, f"{of}_scale") == kind
        require(alike, f"{of}_scale has dtype {scale.dtype}", f"that of {name}, {least.dtype}")


def of_codes(scale: Scale, blocks: Any, minima: Any = None) -> Scale:
    """A scale, those of blocks and minima, of codes of 4 bits."""
    return scale if blocks is None and minima is None else replace(scale, blocks=blocks, minima=minima)


def by_slot(blocks: Any) -> Any:
    """Scales of blocks ``[pages, page_size, Hkv, D / 16]``, a copy of those in the 4x4 order; NumPy.

    >>> by_slot(np.arange(8).reshape(1, 1, 1, 2, 4))[0, :, 0].tolist()
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    if blocks.ndim < 5:
        return blocks
    pages, fours, heads, columns, each = blocks.shape
    return np.asarray(blocks).transpose(0, 1, 4, 2, 3).reshape(pages, fours * each, heads, columns)


def block_bytes(scale: Scale) -> Any:
    """The scales of blocks, torch tensors, as words of two blocks, or as bytes where words do not lie aligned; in the
    4x4 order as words of four slots. None where there are none.
    """
    if scale.blocks is None:
        return None
    torch, blocks = torch_here(), scale.blocks
    if blocks.ndim == 5:
        return blocks.view(torch.int32)[..., 0]
    even = not any(step % 2 for step in blocks.stride()[:-1]) and blocks.shape[-1] % 2 == blocks.data_ptr() % 2 == 0
    return blocks.view(torch.int16 if even else torch.uint8)


def resolve_scale(
    name: str, scale: Any, of: Any, batch: int, heads: int, tokens: tuple[int, ...] | None, half: bool = False
) -> Scale:
    """The scale ``name`` of the array ``of`` with ``heads`` heads in ``batch`` sequences, or of each of ``tokens``;
    ``half``: it may be of float16.
    """
    array = is_torch(scale) or isinstance(scale, np.ndarray)
    if scale is not None and not is_scaled(of) and name != "q_scale":
        one = not array and finite_number(scale, name, "1, or left out") == 1
        owner = name.partition("_")[0]
        own = f"{name} is {'an array' if array else shown(scale)} with {owner} of dtype {dtype_of(of, owner)}"
        require(one, own, "left out, or 1: scales are of float8_e4m3fn and of 4 bits")
    elif scale is not None and is_scaled(of):
        if not array:
            return Scale(finite_number(scale, name, "a finite number that float32 holds, or an array"))
        check_array(name, scale)
        same_place(**{name: scale, name.partition("_")[0]: of})
        fits = dtype_of(scale, name) in (float32, float16)[: 1 + half]
        require(fits, f"{name} has dtype {scale.dtype}", "float32")
        shape = tuple(int(n) for n in scale.shape)
        last = f" or [B = {batch}, {heads}]"
        if tokens is not None:
            last = f", [B = {batch}, {heads}] or, of each token and head, {tokens}"
        fits = shape in ((), (1,), (heads,), (batch, heads)) or (len(shape) > 1 and shape == tokens)
        require(fits, f"{name} has shape {shape}", f"a number, [Hkv = {heads}]{last}")
    return scale_of(scale, of, heads, by_token=tokens is not None)


def scale_of(scale: Any, of: Any, heads: int, *, by_token: bool = True) -> Scale:
    """A scale that :func:`resolve_scale` lets pass."""
    if scale is None or not is_scaled(of):
        return Scale()
    if not (is_torch(scale) or isinstance(scale, np.ndarray)):
        return Scale(float(scale))
    if by_token and scale.ndim > 1 and tuple(scale.shape) == tuple(of.shape[:-1]):
        return Scale(tokens=scale)
    if tuple(scale.shape) in ((), (1,)):  # one number in memory: a view of it for every head
        one = scale.reshape(1)
        scale = one.expand(heads) if is_torch(one) else np.broadcast_to(one, (heads,))
    return Scale(heads=scale)


def scale_strides(scale: Scale, *, ragged: bool = False) -> PageStrides:
    """Strides of the scales of tokens, torch tensors, or of heads; 0 for the axes that they do not have, and for the
    first where rows are ``ragged``.

    >>> scale_strides(Scale(0.5))
    PageStrides(page=0, token=0, head=0)
    """
    strides = () if scale.array is None else tuple(scale.array.stride())
    if scale.by_sequence:
        strides = strides[1:]
    page, token, head = (0,) * (3 - len(strides)) + strides
    return PageStrides(0 if ragged else page, token, head)


def block_strides(scales: Scales) -> tuple[int, list[int | None]]:
    """(unit, strides): strides of the scales of blocks of K and of V, torch tensors, of the axes but the last, in the
    unit of ``in_units``, those of the 4x4 order in words; None where there are none, the unit then 0, or -1 over
    minima.

    >>> block_strides(Scales())
    (0, [None, None, None, None, None, None])
    """
    if scales.k.blocks is None:
        return -int(scales.k.minima is not None), [None] * 6
    unit, strides = in_units(*(block_bytes(one).stride()[:3] for one in (scales.k, scales.v)))
    return unit, [step for steps in strides for step in steps]


def minima_strides(scales: Scales) -> list[int | None]:
    """Strides of the minima of K's and V's tokens, torch tensors; None where there are none."""
    if scales.k.minima is None:
        return [None] * 6
    return [*scales.k.minima.stride(), *scales.v.minima.stride()]


def sequence_stride(scale: Scale) -> int | None:
    """Elements from a sequence's scales of heads to the next one's, of a torch tensor; None where all have the same."""
    return int(scale.heads.stride(0)) if scale.by_sequence else None


def latent_scales(scales: Scales, whole: bool) -> Scales:
    """Scales of MLA over latent rows, whose latents are V, too: those of K. whole : the rope part has them as well.

    >>> scales = latent_scales(Scales(k=Scale(0.5)), whole=False)
    >>> scales.k.number, scales.nope.number, scales.v.number
    (1.0, 0.5, 0.5)
    """
    return replace(scales, v=scales.k) if whole else replace(scales, k=Scale(), nope=scales.k, v=scales.k)


def head_scale(factor: Any, scale_array: Array | None, batch: Any, kv_head: Any) -> Array:
    """``factor``, a number or of the shape of ``kv_head``, times the scale of each of these KV heads in its sequence
    ``batch``.
    """
    factor = np.broadcast_to(np.float32(factor), np.shape(kv_head))
    if scale_array is not None:
        sequence = (batch,) if scale_array.ndim > 1 else ()  #- address
        factor = factor * scale_array[*sequence, kv_head]
    return factor


def token_scale(scale_array: Array | None, at: tuple[Any, ...], exists: Array) -> Array:
    """Scales ``[P, BN]`` of keys at the index ``at``, 0 for those that do not exist; 1 where there are none."""
    scale = np.ones(1, np.float32)
    if scale_array is not None:
        scale = load(scale_array, at, mask=exists, other=0.0).astype(np.float32)
    return scale


def key_scales(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Scales ``[P, BN]`` of K's tokens in ``slot`` of ``page``; ``features``: Features."""
    return token_scale(features.scales.k.tokens, (page, slot, kv_head[:, None]), exists)


def value_scales(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Scales ``[P, BN]`` of V's tokens in ``slot`` of ``page``; ``features``: Features."""
    return token_scale(features.scales.v.tokens, (page, slot, kv_head[:, None]), exists)


def scale_weights(p: Fragments, features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Fragments:
    """Weights times the scales of V's tokens in ``slot`` of ``page``; ``features``: Features."""
    if features.scales.v.tokens is not None:
        scale = value_scales(features, page, slot, kv_head, exists)
        p = p.with_values(p.values * p.by_column(scale))
    return p


def over_minima(
    s: Fragments, scale: Array, q_sum: Array, features: Any, page: Array, slot: Array, kv_head: Array, exists: Array
) -> Fragments:
    """Products with K of codes less the middle, as products with K: times the ``scale`` of its tokens, over their
    minima, ``[P, BN]``. ``q_sum`` ``[P, BM]``: sums of the rows of q. ``features``: Features.
    """
    if features.scales.k.minima is not None:
        least = token_scale(features.scales.k.minima, (page, slot, kv_head[:, None]), exists)
        more = s.by_row(q_sum) * s.by_column(least + scale * np.float32(MIDDLE))
        s = s.with_values(s.values * s.by_column(scale) + more)
    return s


def weighted_minima(
    p: Fragments, features: Any, page: Array, slot: Array, kv_head: Array, exists: Array
) -> Fragments:
    """Weights times what codes of V's tokens less the middle lack; ``features``: Features, with minima."""
    scale = value_scales(features, page, slot, kv_head, exists)
    least = token_scale(features.scales.v.minima, (page, slot, kv_head[:, None]), exists)
    return p.with_values(p.values * p.by_column(least + scale * np.float32(MIDDLE)))


def nope_scales(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Scales ``[P, BN]`` of the tokens' columns before those of rope; ``features``: Features."""
    return token_scale(features.scales.nope.tokens, (page, slot, kv_head[:, None]), exists)


def rope_scales(features: Any, page: Array, slot: Array, kv_head: Array, exists: Array) -> Array:
    """Scales ``[P, BN]`` of the tokens' rope columns; ``features``: Features."""
    return token_scale(features.scales.rope.tokens, (page, slot, kv_head[:, None]), exists)


def head_scale_kernel(factor, scale_ptr, scale_batch, scale_head, batch, kv_head):
    """``factor`` times the scale of a KV head, of a sequence where ``scale_batch`` is not None."""
    if scale_ptr is not None:
        first = 0 if scale_batch is None else batch * scale_batch  #- address
        factor = factor * tl.load(scale_ptr + first + kv_head * scale_head)
    return factor


def token_scale_kernel(scale_ptr, first, at, exists):
    """Scales ``[BN]`` of keys at the offsets ``first + at``, as of ``token_scale``."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + first + at, mask=exists, other=0.0).to(tl.float32)
    return scale


def key_scales_kernel(features, numbers, page, slot, kv_head, exists):
    """Scales ``[BN]`` of K's tokens, as of ``key_scales``."""
    at = page * numbers.k_scale_page + slot * numbers.k_scale_token  #- address
    return token_scale_kernel(features.k_tokens, kv_head * numbers.k_scale_head, at, exists)


def value_scales_kernel(features, numbers, page, slot, kv_head, exists):
    """Scales ``[BN]`` of V's tokens, as of ``value_scales``."""
    at = page * numbers.v_scale_page + slot * numbers.v_scale_token  #- address
    return token_scale_kernel(features.v_tokens, kv_head * numbers.v_scale_head, at, exists)


def scale_weights_kernel(p, features, numbers, page, slot, kv_head, exists):
    """Weights ``[BM, BN]`` times the scales of V's tokens, as of ``scale_weights``."""
    if features.v_tokens is not None:
        scale = value_scales_kernel(features, numbers, page, slot, kv_head, exists)
        p = p * scale[None, :]
    return p


def over_minima_kernel(s, scale, q_sum, features, numbers, page, slot, kv_head, exists):
    """Products ``[BM, BN]`` with K, as of ``over_minima``."""
    if features.k_minima is not None:
        at = page * numbers.k_min_page + slot * numbers.k_min_token  #- address
        least = token_scale_kernel(features.k_minima, kv_head * numbers.k_min_head, at, exists)
        more = q_sum[:, None] * (least + scale * MIDDLE)[None, :]
        s = s * scale[None, :] + more
    return s


def weighted_minima_kernel(p, features, numbers, page, slot, kv_head, exists):
    """Weights ``[BM, BN]`` as of ``weighted_minima``."""
    scale = value_scales_kernel(features, numbers, page, slot, kv_head, exists)
    at = page * numbers.v_min_page + slot * numbers.v_min_token  #- address
    least = token_scale_kernel(features.v_minima, kv_head * numbers.v_min_head, at, exists)
    return p * (least + scale * MIDDLE)[None, :]


def nope_scales_kernel(features, numbers, page, slot, kv_head, exists):
    """Scales ``[BN]`` of the tokens' columns before those of rope, as of ``nope_scales``."""
    at = page * numbers.nope_scale_page + slot * numbers.nope_scale_token  #- address
    return token_scale_kernel(features.nope_tokens, kv_head * numbers.nope_scale_head, at, exists)


def rope_scales_kernel(features, numbers, page, slot, kv_head, exists):
    """Scales ``[BN]`` of the tokens' rope columns, as of ``rope_scales``."""
    at = page * numbers.rope_scale_page + slot * numbers.rope_scale_token  #- address
    return token_scale_kernel(features.rope_tokens, kv_head * numbers.rope_scale_head, at, exists)
