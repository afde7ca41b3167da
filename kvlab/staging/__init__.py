"""KV staging: DRAM tile -> shared memory -> register fragments -> MMA. NumPy only."""

from .cta import DECODE_ARCHS, DecodeCTA, decode_cta
from .decode_streaming import DecodeStreamingKVBuffer
from .fragments import FragmentMap, Fragments
from .iterator import KVCacheIterator, KVTile
from .kv_mma_op import KVMmaOp, KVMmaOpParams, mfma_atom, mma_tiles
from .operand_maps import operand_map, output_map, score_map
from .p_buffer import PRegisterBuffer
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
    "PRegisterBuffer",
    "SwizzledTile",
    "Traffic",
    "ceildiv",
    "decode_cta",
    "ldmatrix_swizzle",
    "mfma_atom",
    "mma_tiles",
    "operand_map",
    "output_map",
    "program_ids",
    "ragged_range",
    "score_map",
]
