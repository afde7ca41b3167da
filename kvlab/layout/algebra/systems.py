"""Rules of the layout systems, where they differ.

``"cute"``
    CuTe's law, the default everywhere.
``"legacy"``
    ``Layout`` and ``LayoutTensor`` of the MAX layout package.
``"new"``
    ``Layout`` of its tile_layout module, which ``TileTensor`` uses.

Facts: what programs compiled with Mojo 1.2.0 / MAX 26.7 printed, and what the package's public sources say."""

from __future__ import annotations

from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["cute", "legacy", "new"]


def check_rule(rule: Rule, *known: Rule) -> Rule:
    """``rule`` if it is ``"cute"`` or one of ``known``, the systems that differ in an operation; or ValueError.

    >>> check_rule("new", "legacy")
    Traceback (most recent call last):
        ...
    ValueError: rule 'new': this operation knows 'cute', 'legacy'
    """
    if rule != "cute" and rule not in known:
        raise ValueError(f"rule {rule!r}: this operation knows {', '.join(map(repr, ('cute', *known)))}")
    return rule
