"""Readers of the notations: each gives what a text describes, or None where it is another notation's."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvlab.common.checks import shown
from kvlab.hardware import SmemDescriptor, TensorMapSwizzle
from kvlab.hardware.copies.tensor_map_words import BYTES, decode_tensor_map
from kvlab.layout import CoordinateLayout, Layout, LinearLayout, from_cute
from kvlab.layout.encodings import (
    Encoding,
    NVMMASharedLayout,
    SharedEncoding,
    SwizzledSharedLayout,
    TensorMemoryLayout,
    from_fields,
    from_ttgir,
    ttgir_aliases,
)
from kvlab.layout.encodings.gluon import CLASSES
from kvlab.memory import as_dtype


class Found(NamedTuple):
    """Object of a text, options of its picture, and what else the sentence should say."""

    object: Any
    how: Mapping[str, Any] = {}
    more: str = ""


Reader: TypeAlias = Callable[[str, Any, Any, "str | None"], "Found | None"]

_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]+")
_OFFSET = re.compile(r"^\s*(?:0x)?[0-9a-fA-F]+:\s+", re.M)
_TYPE = re.compile(r"(?:tensor|!ttg\.memdesc|memdesc)<((?:\d+x)+)(\w+),\s*(?=#)")
_MODES = re.compile(
    r"(?:CU_TENSOR_MAP_|TensorMapSwizzle\.|\.)?(?:SWIZZLE_|swizzle_mode(?:::|\s*[,=:]?\s*)|swizzle\s*[:=]?\s*)?"
    r"(?P<mode>NONE|(?:32|64|96|128)B(?:_ATOM_\w+)?|0x[0-3]|[0-3])", re.I,
)
_BASIS = re.compile(r"^\s*(?:-\s*)?(\w+)=(\d+)\s*->\s*\(([^)]*)\)\s*$", re.M)
_EMPTY = re.compile(r"^\s*(?:-\s*)?(\w+) is a size 1 dimension\s*$", re.M)
_OUTS = re.compile(r"where out dims are: \[(.*?)\]", re.S)
_DIGITS = re.compile(r"[0-9]{1,18}")
_OUT = re.compile(r"(\w+) \(size (\d+)\)")
_SIZES = re.compile(r"([1-9]\d{0,6})\s*x\s*([1-9]\d{0,6})")
_CUTE = re.compile(r"Sw?<|\S:\S|ptr\[|^\s*tensor<|ptr<|@")


def tile(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """``64x128``: a row-major tile.

    >>> tile("8x64", None, None, None).object
    Layout("(8,64):(64,1)")
    """
    found = _SIZES.fullmatch(text)
    return Found(Layout.row_major(int(found[1]), int(found[2])), _bytes_of(dtype)) if found else None


def swizzle_mode(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """A swizzle mode, as PTX, the CUDA driver or MAX write it; a bare number only after a name.

    >>> swizzle_mode(".swizzle_mode, 0x2", None, None, None).object
    Swizzle(2, 4, 3, unit='byte')
    """
    line = text.rstrip("; ")
    if line.startswith("tensormap.replace"):
        line = f"swizzle_mode {line.rpartition(',')[2].strip()}" if "swizzle_mode" in line else ""
    found = _MODES.fullmatch(line)
    if found is None or (found["mode"] == line and not re.match(r"\d+B", line, re.I)):  # a number alone says nothing
        return None
    mode = found["mode"].upper()
    if "ATOM" in mode or mode == "96B":
        raise ValueError(f"text is {shown(text)}: must be a mode with pieces of 16 bytes, none, 32B, 64B or 128B")
    one = TensorMapSwizzle.of(mode.lower() if mode.endswith(("B", "NONE")) else int(mode, 0))
    return Found(one.swizzle())


def descriptor(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """A 64-bit word of wgmma or tcgen05, with 0x before it or of 16 digits.

    >>> descriptor("4000004000010400", None, None, None).object.swizzle.label
    '128B'
    """
    if not _HEX.fullmatch(text) or not (text[:2].lower() == "0x" or len(text) == 16) or len(text) > 18:
        return None
    word, refused = int(text, 16), None
    for one in (arch,) if arch else ("sm_90", "sm_100"):
        try:
            return Found(SmemDescriptor.decode(word, one))
        except ValueError as reason:
            refused = refused or reason
    raise refused or ValueError(text)


def tensor_map(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """128 bytes in hex: pairs of digits, or words of 4 or 8 bytes, the lowest address first; offsets and commas may
    stand between.

    >>> tensor_map("00 " * 127, None, None, None) is None
    True
    """
    plain = _OFFSET.sub("", text)
    words = re.split(r"[\s,;{}\[\]()]+", plain.strip("{}[]() \n,;"))
    if len(words) == 1 and len(words[0].lower().removeprefix("0x")) == 2 * BYTES:
        words = re.findall("..", words[0].lower().removeprefix("0x"))
    if not all(map(_HEX.fullmatch, words)) or BYTES % len(words) or len(words) < 16:
        return None
    size = BYTES // len(words)
    numbers = [int(word, 16) for word in words]
    if max(numbers) >> 8 * size:
        return None
    return Found(decode_tensor_map(b"".join(number.to_bytes(size, "little") for number in numbers)))


def ttgir(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """Encodings of Triton's IR: inline, by name, or in the type of a tensor.

    >>> names = "#b = #ttg.linear<{register = [[0, 1]], lane = [[1, 0]], warp = []}>"
    >>> ttgir(f"{names}\\n%x = tt.load : tensor<2x2xf16, #b>", None, None, None).how
    {'shape': (2, 2)}
    """
    typed = list(_TYPE.finditer(text))
    named = re.search(r"#ttn?g\.", text)
    if named is None and not typed:
        return None
    aliases, refused = ttgir_aliases(text), None
    for one in typed:
        try:
            return _typed(one, from_ttgir(_encoding_at(text, one.end()), aliases))
        except ValueError as reason:  # named by a line that is not there; the next may be
            refused = refused or reason
    if aliases:
        name = list(aliases)[-1]
        return Found(aliases[name], {}, f"the last of {len(aliases)} that are named" if len(aliases) > 1 else "")
    if refused is not None:
        raise refused
    return Found(from_ttgir(_encoding_at(text, named.start() if named else 0)))


def _typed(match: re.Match[str], encoding: Encoding) -> Found:
    """An encoding on the shape and the elements of the type before it."""
    shape, name = tuple(int(n) for n in match[1].split("x")[:-1]), match[2]
    how: dict[str, Any] = {"shape": shape}
    with contextlib.suppress(ValueError):  # pointers, i1
        element = as_dtype({"i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64"}.get(name, name))
        name = str(element)
        if isinstance(encoding, SharedEncoding):
            how["element_bytes"] = element.itemsize
    return Found(encoding, how, f"on {' x '.join(map(str, shape))} {name}")


def _encoding_at(text: str, start: int) -> str:
    """The encoding that begins there: a name, or all up to the bracket that closes it."""
    name = re.compile(r"#[\w.]+").match(text, start)
    end, depth = (name.end() if name else start), 0
    while end < len(text):
        depth += (text[end] == "<") - (text[end] == ">")
        if depth <= 0:
            break
        end += 1
    return text[start : end + (depth == 0 and end < len(text) and text[end] == ">" and "<" in text[start:end])]


def gluon(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """The repr of a Gluon layout, ``BlockedLayout(size_per_thread=[1, 8], ...)``, or the call that makes it.

    >>> gluon("gl.SwizzledSharedLayout(8, 1, max_phase=8, order=[1, 0])", None, None, None).object.max_phase
    8
    """
    if not re.match(r"(?:\w+\.)*[A-Z]\w*Layout\(", text):
        return None
    try:
        return Found(_gluon(ast.parse(text.strip(), mode="eval").body))
    except SyntaxError:
        raise ValueError(f"text is {shown(text)}: must be a whole layout of Gluon, brackets closed") from None


def _gluon(node: ast.expr) -> Encoding:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node)!r} is no layout of Gluon: must be one of {', '.join(CLASSES)}")
    name = ast.unparse(node.func).rpartition(".")[2]
    if name not in CLASSES:
        raise ValueError(f"{name!r} is no layout that kvlab has: must be one of {', '.join(CLASSES)}")
    known = [one.name for one in dataclasses.fields(CLASSES[name])]
    if len(node.args) > len(known):
        raise ValueError(f"{name} has {len(node.args)} values: must be at most {', '.join(known)}")
    given = dict(zip(known, node.args, strict=False)) | {str(one.arg): one.value for one in node.keywords}
    fields = {key: _gluon(value) if isinstance(value, ast.Call) else _constant(value) for key, value in given.items()}
    return from_fields({"class": name, **fields})


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} of a Gluon layout: must be numbers, lists or layouts") from None


TLX = {
    "swizzled_shared_layout_encoding":
        "vectorSize perPhase maxPhase order numCTAs numCTAsPerCGA numCTASplit numCTAOrder",
    "nv_mma_shared_layout_encoding": "shape order elemType numCTAsPerCGA numCTASplit numCTAOrder fp4Padded",
    "tensor_memory_layout_encoding": "blockM blockN unpacked CTASplitM CTASplitN",
    "buffered_tensor_": "element_ty shape layout num",
}
"""Layouts of TLX, and its type of a buffer, with the values that each is made of and prints, in their order."""


def tlx(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """A layout of TLX, or the type of a buffer that has one, as it prints them (``name<..>``) or as a call.

    >>> tlx("buffered_tensor_<fp16, [64, 32], nv_mma_shared_layout_encoding<[64, 32], [1, 0], fp16, [1, 1], [1, 1], "
    ...     "[1, 1], False>, 2>", None, None, None).object.swizzle_byte_width
    64
    """
    if not re.match(rf"(?:tlx\.)?(?:{'|'.join(TLX)})\b", text):
        return None
    name, given = _of_tlx(_parsed_tlx(text))
    if name != "buffered_tensor_":
        return Found(_tlx_layout(name, given, None), {})
    element = _element_of_tlx(given["element_ty"])
    shape = tuple(given["shape"])
    layout = _tlx_layout(*_of_tlx(_parsed_tlx(str(given["layout"]))), element)
    how = {"shape": shape} | ({"element_bytes": element.itemsize} if isinstance(layout, SharedEncoding) else {})
    many = f", {given['num']} of them" if given["num"] else ""
    return Found(layout, how, f"on {' x '.join(map(str, shape))} {element}{many}")


def _parsed_tlx(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip().replace("<", "(").replace(">", ")"), mode="eval").body
    except SyntaxError:
        raise ValueError(f"text is {shown(text)}: must be a whole layout of TLX, brackets closed") from None


def _of_tlx(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Class and values by name; a layout inside is its text, a type its name."""
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    known = TLX.get(name, "").split()
    if not isinstance(node, ast.Call) or not known:
        raise ValueError(f"{ast.unparse(node)!r} says no values: must be one of {', '.join(TLX)} with its values")
    given = dict(zip(known, node.args, strict=False)) | {str(one.arg): one.value for one in node.keywords}
    wrong = sorted(set(given) ^ set(known)) + ["more"] * (len(node.args) > len(known))
    if wrong:
        raise ValueError(f"{name} has {', '.join(given)}: must have {', '.join(known)}")
    kept = {key: ast.unparse(value).rpartition("tlx.")[2].removeprefix("tl.")
            if isinstance(value, ast.Call | ast.Name | ast.Attribute) else _constant(value)
            for key, value in given.items()}
    for key, value in kept.items():
        if ("CTAsPer" in key or "CTASplit" in key) and set(value if isinstance(value, list) else [value]) != {1}:
            raise ValueError(f"{key} is {value}: must be 1, layouts over CTAs of a cluster are not read")
    return name, kept


def _element_of_tlx(name: str) -> Any:
    return as_dtype({"fp8e4nv": "f8E4M3FN", "fp8e5": "f8E5M2", "fp64": "f64"}.get(name, name))


def _tlx_layout(name: str, given: Mapping[str, Any], element: Any) -> Encoding:
    if name == "swizzled_shared_layout_encoding":
        return SwizzledSharedLayout(*(given[key] for key in ("vectorSize", "perPhase", "maxPhase", "order")))
    if name == "tensor_memory_layout_encoding":
        if given["unpacked"] and element is None:
            raise ValueError("unpacked is True: must have the elements, as the type buffered_tensor_<..> has them")
        apart = 4 // element.itemsize if given["unpacked"] else 1
        return TensorMemoryLayout((given["blockM"], given["blockN"]), apart)
    if name != "nv_mma_shared_layout_encoding":
        raise ValueError(f"{name!r} is no layout of TLX: must be one of {', '.join(list(TLX)[:-1])}")
    shape, order, size = given["shape"], given["order"], _element_of_tlx(given["elemType"]).itemsize
    row, rows = shape[order[0]] * size * (1 + given["fp4Padded"]), math.prod(shape) // shape[order[0]]
    width = next((n for n in (128, 64, 32) if row % n == 0), 0) if len(shape) > 1 and rows >= 8 else 0
    return NVMMASharedLayout(width, 8 * size, len(shape), order[0] == 0, given["fp4Padded"])


def linear(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """A LinearLayout as Triton prints it: a line for each basis vector, then the output dimensions.

    >>> linear(" - lane=1 -> (0, 1)\\n   lane=2 -> (1, 0)\\n - warp is a size 1 dimension\\n"
    ...        "where out dims are: [dim0 (size 2), dim1 (size 2)]", None, None, None).object.bases
    {'lane': [[0, 1], [1, 0]], 'warp': []}
    """
    rows = [(found.start(), found) for found in (*_BASIS.finditer(text), *_EMPTY.finditer(text))]
    if not rows:
        return None
    outs = _OUTS.search(text)
    if outs is None:
        raise ValueError("LinearLayout dump has no line 'where out dims are: [...]': must be whole")
    bases: dict[str, list[list[int]]] = {}
    for _, found in sorted(rows, key=lambda row: row[0]):
        steps = bases.setdefault(found[1], [])
        if found.re is _EMPTY:
            continue
        if int(found[2]) != 1 << len(steps):
            place = 1 << len(steps)
            raise ValueError(f"LinearLayout dump has {found[1]}={found[2]} in place of {place}: must be whole")
        numbers = found[3].replace(",", " ").split()
        if not all(map(_DIGITS.fullmatch, numbers)):
            raise ValueError(f"LinearLayout dump leads to ({found[3]}): must be numbers")
        steps.append([int(n) for n in numbers])
    return Found(LinearLayout(bases, {name: int(size) for name, size in _OUT.findall(outs[1])}), _bytes_of(dtype))


def cute(text: str, dtype: Any, unit: Any, arch: str | None) -> Found | None:
    """CuTe text of C++, the DSL or pycute.

    >>> cute("S<3,4,3> o 0 o (8,64):(64,1)", "f16", "byte", None).object
    ComposedLayout("Sw<3,3,3> (float16) o (8,64):(64,1)")
    """
    if not _CUTE.search(text):
        return None
    found = from_cute(text, dtype, swizzle_unit=unit)
    if isinstance(found, CoordinateLayout):
        raise ValueError(f"{text!r} has coordinates for strides (a TMA tensor's): must have offsets, to be shown; "
                         "kvlab.layout.from_cute reads it")  # fmt: skip
    width = re.search(r"ptr\[(\d+)b\]", text)
    how = _bytes_of(dtype) or ({"element_bytes": int(width[1]) // 8} if width and int(width[1]) >= 8 else {})
    return Found(found, how if hasattr(found, "shape") else {})


def _bytes_of(dtype: Any) -> dict[str, Any]:
    return {} if dtype is None else {"element_bytes": as_dtype(dtype).itemsize}


READERS: dict[str, Reader] = {
    "tile": tile,
    "swizzle mode": swizzle_mode,
    "matrix descriptor": descriptor,
    "tensor map": tensor_map,
    "LinearLayout": linear,
    "TTGIR": ttgir,
    "Gluon": gluon,
    "TLX": tlx,
    "CuTe": cute,
}
"""In the order in which they are asked."""
