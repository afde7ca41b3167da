"""The 128 bytes of a tensor map, read.

CUDA calls them opaque, but PTX changes single fields in place (``tensormap.replace``), and what ptxas makes of such an
instruction says where its field lies (tests/data/tensor_map_fields.json holds what it wrote for sm_90a). The fields
that PTX cannot replace, L2 promotion among them, are not read."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.common.checks import integers
from kvlab.memory import Memory, as_dtype

from .tensor_map import TensorMapSwizzle, TmaDescriptor

BYTES = 128
ELEMENT_TYPES = (
    "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float32", "float64", "bfloat16",
)
"""By number; 7 and 8 are float32, kept and flushed to zero, or tf32 where the bit behind them says so."""


def decode_tensor_map(data: Any) -> TmaDescriptor:
    """The descriptor that 128 bytes hold: ``bytes``, or 32 unsigned 32-bit words, the lowest address first.

    Its ``source`` is no memory (nothing can be copied through it), ``base`` the global address; L2 promotion is not
    read. ValueError for another length, for interleaved maps, and for fields that no descriptor has.

    >>> words = np.zeros(32, np.uint32)
    >>> words[0], words[2], words[3] = 0x5000, 1 << 4 | 10 << 7 | 3 << 13, 2048 >> 4  # rank 2, bfloat16, 128B
    >>> words[8], words[9], words[13], words[14] = 1023, 4095, 63 << 24, 15           # sizes and box, one less
    >>> decode_tensor_map(words), hex(decode_tensor_map(words).base)
    (TmaDescriptor(box 16 x 64 of 4096 x 1024 bfloat16, swizzle 128B), '0x5000')
    """
    raw = bytes(data) if isinstance(data, bytes | bytearray) else integers("data", data).astype("<u4").tobytes()
    if len(raw) != BYTES:
        raise ValueError(f"data has {len(raw)} bytes: must be the {BYTES} of a tensor map")
    word = np.frombuffer(raw, "<u4").astype(np.int64)
    flags = int(word[2])
    rank, kind, interleave = (flags >> 4 & 7) + 1, flags >> 7 & 15, flags >> 11 & 3
    if rank > 5 or kind >= len(ELEMENT_TYPES):
        raise ValueError(f"word 2 of the tensor map is {flags:#010x}: must have a rank of 1 to 5 and a known type")
    if interleave:
        raise ValueError(f"word 2 of the tensor map is {flags:#010x}: must not be interleaved, which is not modelled")
    dtype = as_dtype(ELEMENT_TYPES[kind])
    size = dtype.itemsize
    axes = np.arange(rank)
    high = int(word[7])
    strides = (word[3:7] | (high >> 4 * np.arange(4) & 15) << 32) << 4
    boxes = np.array([word[13] >> 24, *(word[14] >> 8 * np.arange(4) & 255)]) + 1
    steps = (word[13] >> 3 * axes & 7) + 1
    outer = strides[: rank - 1]
    if (outer % size).any():
        raise ValueError(f"strides of the tensor map are {outer.tolist()} bytes: must be multiples of {size}")
    return TmaDescriptor(
        Memory(16), dtype, tuple((word[8 : 8 + rank] + 1)[::-1].tolist()), (*(outer // size)[::-1].tolist(), 1),
        tuple(boxes[:rank][::-1].tolist()), TensorMapSwizzle(flags >> 13 & 3), int(word[0]) | int(word[1]) << 32,
        tuple(steps[::-1].tolist()),
    )
