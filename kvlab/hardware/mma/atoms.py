"""The table of MMA atoms by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

import numpy as np

from kvlab.common.checks import shown
from kvlab.hardware._arrays import Array
from kvlab.memory import float32

from .atom import MmaAtom
from .atoms_amd import amd_atoms
from .atoms_nvidia import nvidia_atoms

ATOMS: Mapping[str, MmaAtom] = MappingProxyType({atom.name: atom for atom in (*nvidia_atoms(), *amd_atoms())})


def get_atom(name: str) -> MmaAtom:
    """The atom called ``name``: ``mma.sync.m16n8k16.bf16``, ``wgmma.m64n128k16.f16``, ``tcgen05.m128n64k16.bf16``,
    ``mfma.16x16x32.bf16``, ``wmma.gfx11.16x16x16.f16``, ...

    >>> get_atom("mfma.16x16x32.bf16").shape
    (16, 16, 32)
    >>> get_atom("wgmma.m64n20k16.f16")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: atom is 'wgmma.m64n20k16.f16': must be one of mma.sync.m16n8k16.bf16, ...
    """
    if isinstance(name, str) and name in ATOMS:
        return ATOMS[name]
    close = get_close_matches(shown(name), ATOMS, n=3)
    hint = f"; close to it: {', '.join(close)}" if close else ""
    raise ValueError(f"atom is {shown(name)}: must be one of {', '.join(_names())}{hint}")


def _names() -> list[str]:
    """Names for a message: the many widths of wgmma and tcgen05 as one."""
    widths: dict[str, list[int]] = {}
    for atom in ATOMS.values():
        shared = atom.b is None
        _, n, k = atom.shape
        widths.setdefault(atom.name.replace(f"n{n}k{k}", f"n<>k{k}") if shared else atom.name, []).append(n)
    return [name.replace("<>", f"<{min(ns)} to {max(ns)}>") for name, ns in widths.items()]


def round_tf32(values: object) -> Array:
    """float32 values rounded to tf32: 10 bits of mantissa, halves away from zero (``cvt.rna.tf32.f32``).

    >>> round_tf32([1.0, 1 + 2**-11, 1 + 2**-12]).tolist()
    [1.0, 1.0009765625, 1.0]
    """
    try:
        x = np.array(values, float32)
    except OverflowError:
        raise ValueError(f"values is {shown(values)}: must be numbers that float32 rounds") from None
    bits = x.view(np.uint32)
    finite = np.isfinite(x)
    rounded = ((bits + np.uint32(1 << 12)) >> np.uint32(13) << np.uint32(13)).view(float32)
    return np.where(finite, rounded, x)
