"""Encodings as Triton's compiler prints them in its TTGIR; read without importing Triton."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from kvlab.common.checks import is_integer, shown
from kvlab.layout.encodings.base import Encoding
from kvlab.layout.encodings.gluon import from_fields
from kvlab.layout.encodings.padded_shared import PaddedSharedLayout

CLASSES = {
    "amd_mfma": "AMDMFMALayout",
    "amd_rotating_shared": "AMDRotatingSharedLayout",
    "blocked": "BlockedLayout",
    "dot_op": "DotOperandLayout",
    "linear": "DistributedLinearLayout",
    "nvidia_mma": "NVMMADistributedLayout",
    "nvmma_shared": "NVMMASharedLayout",
    "padded_shared": "PaddedSharedLayout",
    "shared_linear": "SharedLinearLayout",
    "slice": "SliceLayout",
    "swizzled_shared": "SwizzledSharedLayout",
    "tensor_memory_encoding": "TensorMemoryLayout",
    "tensor_memory_scales_encoding": "TensorMemoryScalesLayout",
}
RENAMED = {
    "CGALayout": "cga_layout",
    "block": "block_bases",
    "colStride": "col_stride",
    "elementBitWidth": "element_bitwidth",
    "fp4Padded": "fp4_padded",
    "instrShape": "instr_shape",
    "isTransposed": "transposed",
    "kWidth": "k_width",
    "lane": "lane_bases",
    "maxPhase": "max_phase",
    "offset": "offset_bases",
    "opIdx": "operand_index",
    "perPhase": "per_phase",
    "register": "reg_bases",
    "sizePerThread": "size_per_thread",
    "swizzlingByteWidth": "swizzle_byte_width",
    "threadsPerWarp": "threads_per_warp",
    "tilesPerWarp": "tiles_per_warp",
    "twoCTAs": "two_ctas",
    "warp": "warp_bases",
    "warpsPerCTA": "warps_per_cta",
}
"""What Gluon's classes call the fields that the compiler prints."""
NEEDED = {
    "linear": ("register", "lane", "warp"),
    "nvidia_mma": ("versionMajor", "versionMinor"),
    "tensor_memory_encoding": ("blockM", "blockN"),
}
"""The fields from which others are made."""
_INNERMOST = re.compile(r"#ttn?g\.(\w+)<([^<>]*)>")
_FIELD = re.compile(r"(\w+) = (\[[^={}]*\]|[^,{}\[\]]+)")
_ALIAS = re.compile(r"^#(\w+) = (#ttg\.(\w+)<.*>)$", re.M)


def from_ttgir(text: str, aliases: Mapping[str, Encoding] | None = None) -> Encoding:
    """The encoding that the compiler prints as ``text``: ``#ttg.swizzled_shared<...>``, or a name such as ``#shared``.

    text      one encoding, others as parents inside; of blocked, linear, MMA, MFMA, operand, slice, swizzled, rotating,
              NVMMA, padded and linear shared layouts of Triton 3.6.0 to 3.9.0, and of tensor memory (``#ttng.``)
    aliases   what the names in ``text`` stand for, as :func:`ttgir_aliases` gives them

    ValueError for another encoding, and for a name that ``aliases`` does not have.

    >>> from_ttgir("#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>")
    SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=(1, 0), cga_layout=())
    >>> from_ttgir("#ttg.padded_shared<[4:+2] {order = [1, 0], shape = [2, 4]}>").offsets((2, 4)).tolist()
    [[0, 1, 2, 3], [6, 7, 8, 9]]
    >>> from_ttgir("#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 1>").block
    (128, 64)
    >>> from_ttgir("#ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>")
    Traceback (most recent call last):
        ...
    ValueError: '#mma' is no encoding: must be one that Triton prints, or one of the aliases []
    """
    known = {f"#{name}": encoding for name, encoding in (aliases or {}).items()}
    rest = text.strip()
    while found := _INNERMOST.search(rest):  # parents first, each under a name of its own
        name = f"#{len(known)}@"
        known[name] = _encoding(found[1], found[2], known)
        rest = rest[: found.start()] + name + rest[found.end() :]
    return _named(rest, known)


def ttgir_aliases(module: str) -> dict[str, Encoding]:
    """The encodings that a module's first lines name, ``#name = #ttg...``; those that kvlab lacks are left out.

    >>> ttgir_aliases("#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], "
    ...               "instrShape = [16, 8]}>\\n#smem = #ttg.shared_memory\\n")
    {'mma': NVMMADistributedLayout(version=(2, 0), warps_per_cta=(4, 1), instr_shape=(16, 8), cga_layout=())}
    """
    found: dict[str, Encoding] = {}
    for name, text, kind in _ALIAS.findall(module):
        if kind in CLASSES:
            found[name] = from_ttgir(text, found)
    return found


def _named(name: str, known: Mapping[str, Encoding]) -> Encoding:
    if name not in known:
        names = sorted(alias for alias in known if not alias.endswith("@"))
        raise ValueError(f"{name!r} is no encoding: must be one that Triton prints, or one of the aliases {names}")
    return known[name]


def _encoding(kind: str, body: str, known: Mapping[str, Encoding]) -> Encoding:
    if kind not in CLASSES:
        raise ValueError(f"encoding #ttg.{kind}<{body}>: must be one of {', '.join(CLASSES)}")
    fields: dict[str, Any] = {RENAMED.get(name, name): _value(value, known) for name, value in _FIELD.findall(body)}
    if lacking := [RENAMED.get(name, name) for name in NEEDED.get(kind, ()) if RENAMED.get(name, name) not in fields]:
        raise ValueError(f"encoding #ttg.{kind}<{body}> has no {', '.join(lacking)}: must be whole")
    if kind == "nvidia_mma":
        fields["version"] = [fields.pop("versionMajor"), fields.pop("versionMinor")]
    elif kind == "tensor_memory_encoding":
        fields["block"] = [fields.pop("blockM"), fields.pop("blockN")]
    elif kind == "dot_op":
        fields.setdefault("k_width", 0)
    elif kind == "linear":
        fields["shape"] = _reach(*(fields[name] for name in ("reg_bases", "lane_bases", "warp_bases")))
    elif kind == "padded_shared":
        pairs = [[int(n) for n in pair] for pair in re.findall(r"(\d+):\+(\d+)", body)]
        if "order" in fields:
            if "shape" not in fields:
                raise ValueError(f"encoding #ttg.{kind}<{body}> has no shape: must be beside its order")
            return PaddedSharedLayout.with_identity_for(pairs, fields["shape"], fields["order"])
        if "offset_bases" not in fields:
            raise ValueError(f"encoding #ttg.{kind}<{body}>: must have an order and a shape, or bases of offset")
        fields |= {"interval_padding_pairs": pairs, "shape": _reach(fields["offset_bases"])}
    return from_fields({"class": CLASSES[kind], **fields})


def _value(text: str, known: Mapping[str, Encoding]) -> Any:
    text = text.strip()
    if text.startswith("#"):
        return _named(text, known)
    try:
        return text == "true" if text in ("true", "false") else ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError):
        raise ValueError(f"{shown(text)} of an encoding: must be numbers, lists, true, false or a name") from None


def _reach(*parts: Any) -> list[int]:
    """The shape that the bases of powers of two fill."""
    for rows in parts:
        good = isinstance(rows, list) and all(isinstance(row, list) and all(map(is_integer, row)) for row in rows)
        if not good:
            raise ValueError(f"bases {shown(rows)}: must be lists with an integer for each dimension")
    bases = [row for rows in parts for row in rows]
    if len({len(row) for row in bases}) > 1:
        raise ValueError(f"bases {shown(bases)}: must have as many integers each")
    return [1 << max(steps).bit_length() for steps in zip(*bases, strict=True)]
