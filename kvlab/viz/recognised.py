"""Pictures of pasted texts, under their sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .pen.dispatch import draw
from .pen.picture import Picture

if TYPE_CHECKING:
    from kvlab.rosetta import Recognised


def draw_recognised(
    found: Recognised, *, title: str | None = None, caption: str | None = None, **how: Any
) -> Picture:
    """The picture of what :func:`kvlab.rosetta.recognise` found; ``how`` goes to the function that draws the object.

    >>> from kvlab.rosetta import recognise
    >>> draw_recognised(recognise("SWIZZLE_64B")).title
    'Bits 4 to 5 of a byte address are XORed with bits 7 to 8, the mode 64B of TMA and wgmma.'
    """
    options = {**found.how, **how} | ({} if caption is None else {"caption": caption})
    return draw(found.object, title=title or found.sentence, **options)
