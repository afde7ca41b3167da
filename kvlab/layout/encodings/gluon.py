"""From Gluon's layout objects, or their fields as data, to the encodings here; without importing Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvlab.layout.encodings.amd_mfma import AMDMFMALayout
from kvlab.layout.encodings.amd_wmma import AMDWMMALayout
from kvlab.layout.encodings.base import Encoding
from kvlab.layout.encodings.blocked import BlockedLayout, DistributedLinearLayout, SliceLayout
from kvlab.layout.encodings.dot_operand import DotOperandLayout
from kvlab.layout.encodings.nvidia_mma import NVMMADistributedLayout
from kvlab.layout.encodings.nvmma_shared import NVMMASharedLayout
from kvlab.layout.encodings.padded_shared import PaddedSharedLayout
from kvlab.layout.encodings.shared import SharedLinearLayout
from kvlab.layout.encodings.swizzled_shared import AMDRotatingSharedLayout, SwizzledSharedLayout
from kvlab.layout.encodings.tensor_memory import TensorMemoryLayout, TensorMemoryScalesLayout

CLASSES: dict[str, type[Encoding]] = {
    cls.__name__: cls
    for cls in (
        AMDMFMALayout,
        AMDRotatingSharedLayout,
        AMDWMMALayout,
        BlockedLayout,
        DistributedLinearLayout,
        DotOperandLayout,
        NVMMADistributedLayout,
        NVMMASharedLayout,
        PaddedSharedLayout,
        SharedLinearLayout,
        SliceLayout,
        SwizzledSharedLayout,
        TensorMemoryLayout,
        TensorMemoryScalesLayout,
    )
}


def from_fields(fields: Mapping[str, Any]) -> Encoding:
    """The encoding with these fields and its class name under ``"class"``; ``parent`` may be nested alike.

    >>> from_fields({"class": "SwizzledSharedLayout", "vec": 8, "per_phase": 1, "max_phase": 8, "order": [1, 0]})
    SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=(1, 0), cga_layout=())
    """
    arguments = dict(fields)
    name = arguments.pop("class", None)
    if name not in CLASSES:
        raise ValueError(f"class is {name!r}: must be one of {sorted(CLASSES)}")
    if isinstance(arguments.get("parent"), Mapping):
        arguments["parent"] = from_fields(arguments["parent"])
    known = {field.name for field in dataclasses.fields(CLASSES[name])}
    if unknown := arguments.keys() - known:
        raise ValueError(f"fields {sorted(unknown)} of {name}: must be {sorted(known)}")
    if lacking := [one.name for one in dataclasses.fields(CLASSES[name]) if _needed(one) and one.name not in arguments]:
        raise ValueError(f"{name} has no {', '.join(lacking)}: must be given")
    return CLASSES[name](**arguments)


def _needed(field: dataclasses.Field[Any]) -> bool:
    """Tells whether a field has no default."""
    return field.init and field.default is field.default_factory is dataclasses.MISSING


def from_gluon(layout: Any) -> Encoding:
    """The encoding of a layout object of ``triton.experimental.gluon.language``.

    >>> gluon = dataclasses.make_dataclass("SwizzledSharedLayout", ["vec", "per_phase", "max_phase", "order"])
    >>> from_gluon(gluon(8, 1, 8, [1, 0])).offsets((2, 64))[1, :9].tolist()
    [72, 73, 74, 75, 76, 77, 78, 79, 64]
    """
    if not dataclasses.is_dataclass(layout):
        raise ValueError(f"{layout!r} is not a layout of Gluon")
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    if fields.get("cta_split_num", 0) is None:  # before Triton 3.9 for one CTA; of several the bases are not told
        del fields["cta_split_num"]
    if "parent" in fields:
        fields["parent"] = from_gluon(fields["parent"])
    return from_fields({"class": type(layout).__name__, **fields})
