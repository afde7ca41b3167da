"""Texts from bug reports, recognised: descriptors in hex, TTGIR, Gluon, LinearLayout dumps, CuTe, swizzle modes.

:func:`recognise` finds out which of them a text is, and gives the object that it describes, a sentence, a picture."""

from kvlab.rosetta.recognise import Recognised, recognise

__all__ = ["Recognised", "recognise"]
