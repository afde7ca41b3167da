"""One function for all texts: which notation it is, what it describes, a sentence, a picture."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from kvlab.common.checks import shown
from kvlab.common.drawn import Drawn
from kvlab.hardware import get_arch
from kvlab.rosetta.also import also
from kvlab.rosetta.readers import READERS, Found
from kvlab.rosetta.sentences import sentence_of


@dataclass(frozen=True, eq=False, repr=False)
class Recognised(Drawn):
    """Text that was recognised; it draws itself.

    notation   what the text is: ``"matrix descriptor"``, ``"TTGIR"``, ...
    object     what it describes: a layout, a swizzle, an encoding or a descriptor of kvlab
    sentence   what that is, in one sentence
    how        options of its picture: the shape of the tensor and the bytes of an element, where the text has them
    also       the same tile in other notations

    >>> Recognised("tile", 4, "A number.")
    Recognised(tile: A number.)
    """

    notation: str
    object: Any
    sentence: str
    how: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @functools.cached_property
    def also(self) -> dict[str, str]:
        """The same tile of shared memory in other notations, where its shape and elements are known.

        >>> recognise("!ttg.memdesc<64x64xf16, #ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, "
        ...           "elementBitWidth = 16}>, #smem>").also["CuTe"]
        'Sw<3,3,3> o _0 o (_64,_64):(_64,_1)'
        """
        return also(self.object, self.how)

    def __str__(self) -> str:
        return f"{self.notation}: {self.sentence}"

    def __repr__(self) -> str:
        return f"Recognised({self})"


def recognise(
    text: str, dtype: Any = None, *, swizzle_unit: Literal["byte", "element"] | None = None, arch: str | None = None
) -> Recognised:
    """The notation of a pasted text, and the layout, swizzle, encoding or descriptor that it describes.

    text           a matrix descriptor of wgmma or tcgen05 (64 bits in hex); a tensor map (128 bytes in hex, as bytes or
                   words); encodings or types of TTGIR, with or without the lines that name them; the repr of a Gluon
                   layout; a layout of TLX, or the type of a buffer with it; a LinearLayout as Triton prints it; CuTe
                   text; a swizzle mode of PTX, CUDA or TMA; or ``64x128``, a row-major tile
    dtype, swizzle_unit   of CuTe text (:func:`kvlab.layout.from_cute`)
    arch           ``"sm_90"`` or ``"sm_100"``: whose matrix descriptor; None takes the one whose constant bits fit

    Of several encodings in a text the first type's is taken, else the last one that is named. ValueError for a text
    that is none of these, and, with its notation's own sentence, for one that is wrong in its notation.

    >>> print(recognise("0x4000004000010400"))
    matrix descriptor: The operand of a wgmma at byte 16384 of shared memory, if K-major in rows of 128 bytes with \
swizzle 128B, 1024 bytes from 8 rows to the next.
    >>> print(recognise("!ttg.memdesc<64x64xbf16, #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, "
    ...                 "order = [1, 0]}>, #smem>"))
    TTGIR: Shared memory, rows along dimension 1: pieces of 8 elements of row r are XORed with r / 1 mod 8; on 64 x 64 \
bfloat16.
    >>> recognise("SWIZZLE_128B").object
    Swizzle(3, 4, 3, unit='byte')
    >>> recognise("hello")
    Traceback (most recent call last):
        ...
    ValueError: text is 'hello': must be a matrix descriptor or tensor map in hex, TTGIR, a Gluon layout, one of TLX, \
a LinearLayout dump, CuTe text, a swizzle mode of PTX, or rows x columns
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text is {shown(text)}: must be text")
    if arch is not None and not {"wgmma", "tcgen05"} & get_arch(arch).features:
        raise ValueError(f"arch is {arch!r}: must be one that has matrix descriptors, or None")
    for notation, read in READERS.items():
        found = read(text.strip(), dtype, swizzle_unit, arch)
        if isinstance(found, Found):
            return Recognised(notation, found.object, sentence_of(found.object, found.more), found.how)
    raise ValueError(
        f"text is {shown(text)}: must be a matrix descriptor or tensor map in hex, TTGIR, a Gluon layout, one of TLX, "
        "a LinearLayout dump, CuTe text, a swizzle mode of PTX, or rows x columns"
    )
