"""KV staging: DRAM tile -> shared memory -> register fragments -> MMA. NumPy only."""

from kvlab.hardware import RegTileLoader, RegTileWriterLDS, SubTileLoaderLDS

from .async_barrier import AsyncBarrier
from .buffer_config import KBufferConfig, KVBufferConfig, VBufferConfig
from .cta import DECODE_ARCHS, TileCTA, decode_cta
from .decode_kv_buffer import DecodeKVBuffer, KBuffer, VBuffer
from .decode_kv_params import DecodeKVBufferParams
from .decode_streaming import DecodeStreamingKVBuffer
from .footprint import Footprint
from .fragments import FragmentMap, Fragments
from .hazard_words import Hazard, Side
from .hazards import Hazards
from .iterator import KVCacheIterator
from .kv_buffer import KVBuffer
from .kv_mma_op import KVMmaOp, KVMmaOpParams
from .mla_cta import MLA_ARCHS, MLACTA, mla_cta
from .mma_sync_cta import MmaSyncShape
from .nvidia_cp_async import CpAsyncKVBuffer
from .nvidia_params import NvidiaKVParams
from .nvidia_tma import TmaKVBuffer
from .operand_maps import kv_buffer_operand_map, operand_map, output_map, score_map
from .p_buffer import PRegisterBuffer
from .p_staging import FP8_P_SCALE, PStaging, PStagingParams, cast_p
from .params import KVBufferParams, ceildiv
from .programs import program_ids, ragged_range, row_offsets
from .smem_image import SmemImage, slots_of
from .smem_subtile import smem_mma_subtile, smem_mma_subtile_offset, smem_subtile
from .swizzled_tile import SwizzledTile, ldmatrix_swizzle
from .tiled_mma_loader import TiledMmaLoader
from .tiled_mma_op import TiledMmaOp, TiledTensorCore, get_accum_type, mfma_atom
from .timeline import Event, Timeline
from .traffic import Traffic
from .warp_slices import WarpSlices

__all__ = [
    "DECODE_ARCHS",
    "FP8_P_SCALE",
    "MLACTA",
    "MLA_ARCHS",
    "AsyncBarrier",
    "CpAsyncKVBuffer",
    "DecodeKVBuffer",
    "DecodeKVBufferParams",
    "DecodeStreamingKVBuffer",
    "Event",
    "Footprint",
    "FragmentMap",
    "Fragments",
    "Hazard",
    "Hazards",
    "KBuffer",
    "KBufferConfig",
    "KVBuffer",
    "KVBufferConfig",
    "KVBufferParams",
    "KVCacheIterator",
    "KVMmaOp",
    "KVMmaOpParams",
    "MmaSyncShape",
    "NvidiaKVParams",
    "PRegisterBuffer",
    "PStaging",
    "PStagingParams",
    "RegTileLoader",
    "RegTileWriterLDS",
    "Side",
    "SmemImage",
    "SubTileLoaderLDS",
    "SwizzledTile",
    "TileCTA",
    "TiledMmaLoader",
    "TiledMmaOp",
    "TiledTensorCore",
    "Timeline",
    "TmaKVBuffer",
    "Traffic",
    "VBuffer",
    "VBufferConfig",
    "WarpSlices",
    "cast_p",
    "ceildiv",
    "decode_cta",
    "get_accum_type",
    "kv_buffer_operand_map",
    "ldmatrix_swizzle",
    "mfma_atom",
    "mla_cta",
    "operand_map",
    "output_map",
    "program_ids",
    "ragged_range",
    "row_offsets",
    "score_map",
    "slots_of",
    "smem_mma_subtile",
    "smem_mma_subtile_offset",
    "smem_subtile",
]
