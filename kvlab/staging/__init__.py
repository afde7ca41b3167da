"""KV staging: DRAM tile -> shared memory -> register fragments -> MMA. NumPy only."""

from .cta import DECODE_ARCHS, DecodeCTA, decode_cta
from .decode_streaming import DecodeStreamingKVBuffer
from .fragments import FragmentMap, Fragments
from .iterator import KVCacheIterator, KVTile
from .kv_mma_op import KVMmaOp, KVMmaOpParams
from .params import KVBufferParams, ceildiv
from .programs import program_ids, ragged_range
from .swizzled_tile import SwizzledTile, ldmatrix_swizzle
from .traffic import Traffic

__all__ = [
    "DECODE_ARCHS",
    "DecodeCTA",
    "DecodeStreamingKVBuffer",
    "FragmentMap",
    "Fragments",
    "KVBufferParams",
    "KVCacheIterator",
    "KVMmaOp",
    "KVMmaOpParams",
    "KVTile",
    "SwizzledTile",
    "Traffic",
    "ceildiv",
    "decode_cta",
    "ldmatrix_swizzle",
    "program_ids",
    "ragged_range",
]
