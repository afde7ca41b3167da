"""Triton's encodings of tensors, by the names and fields of Gluon's layout classes, as linear layouts.

``BlockedLayout(...).to_linear_layout(shape)`` is what ``GluonOpBuilder.to_linear_layout`` of the compiler returns. The
rules are those of Triton 3.6.0 to 3.9.0; where versions differ, ``triton_version`` picks one."""

from kvlab.layout.encodings.amd_mfma import AMDMFMALayout
from kvlab.layout.encodings.amd_wmma import AMDWMMALayout
from kvlab.layout.encodings.base import NEWEST, Encoding
from kvlab.layout.encodings.blocked import BlockedLayout, DistributedLinearLayout, SliceLayout
from kvlab.layout.encodings.dot_operand import DotOperandLayout
from kvlab.layout.encodings.gluon import from_fields, from_gluon
from kvlab.layout.encodings.nvidia_mma import NVMMADistributedLayout
from kvlab.layout.encodings.nvmma_shared import NVMMASharedLayout
from kvlab.layout.encodings.padded_shared import PaddedSharedLayout
from kvlab.layout.encodings.shared import SharedEncoding, SharedLinearLayout
from kvlab.layout.encodings.swizzled_shared import AMDRotatingSharedLayout, SwizzledSharedLayout
from kvlab.layout.encodings.tensor_memory import TensorMemoryLayout, TensorMemoryScalesLayout, sm120_scales_layout
from kvlab.layout.encodings.ttgir import from_ttgir, ttgir_aliases

__all__ = [
    "NEWEST",
    "AMDMFMALayout",
    "AMDRotatingSharedLayout",
    "AMDWMMALayout",
    "BlockedLayout",
    "DistributedLinearLayout",
    "DotOperandLayout",
    "Encoding",
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
    "PaddedSharedLayout",
    "SharedEncoding",
    "SharedLinearLayout",
    "SliceLayout",
    "SwizzledSharedLayout",
    "TensorMemoryLayout",
    "TensorMemoryScalesLayout",
    "from_fields",
    "from_gluon",
    "from_ttgir",
    "sm120_scales_layout",
    "ttgir_aliases",
]
