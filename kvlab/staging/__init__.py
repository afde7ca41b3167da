"""KV staging: DRAM tile -> shared memory -> register fragments -> MMA. NumPy only."""

from kvlab.hardware import RegTileLoader, RegTileWriterLDS, SubTileLoaderLDS

from .max.buffer_config import KBufferConfig, KVBufferConfig, VBufferConfig
from .max.decode_kv_buffer import DecodeKVBuffer, KBuffer, VBuffer
from .max.decode_kv_params import DecodeKVBufferParams
from .max.decode_streaming import DecodeStreamingKVBuffer
from .max.kv_buffer import KVBuffer
from .max.kv_buffer_addresses import kv_buffer_dma_plan
from .max.kv_mma_op import KVMmaOp, KVMmaOpParams
from .max.mma_op_addresses import v_bf16_offsets, v_fp8_offsets
from .max.operand_maps import kv_buffer_operand_map, operand_map, output_map, score_map
from .max.p_buffer import PRegisterBuffer
from .max.p_staging import FP8_P_SCALE, PStaging, PStagingParams, cast_p
from .max.params import KVBufferParams, ceildiv
from .max.smem_subtile import smem_mma_subtile, smem_mma_subtile_offset, smem_subtile
from .max.streaming_addresses import streaming_dma_plan
from .max.tiled_mma_loader import TiledMmaLoader
from .max.tiled_mma_op import TiledMmaOp, TiledTensorCore, get_accum_type, mfma_atom
from .max.warp_slices import WarpSlices
from .nvidia.cp_async import CpAsyncKVBuffer
from .nvidia.mma_sync_cta import MmaSyncShape
from .nvidia.nvidia_kv_params import NvidiaKVParams
from .nvidia.swizzled_tile import SwizzledTile, ldmatrix_swizzle
from .nvidia.tma_kv_buffer import TmaKVBuffer
from .record.async_barrier import AsyncBarrier
from .record.footprint import Footprint
from .record.hazard_words import Hazard, Side
from .record.hazards import Hazards
from .record.timeline import Event, Timeline
from .record.traffic import Traffic
from .tile.fragments import FragmentMap, Fragments
from .tile.iterator import KVCacheIterator
from .tile.programs import program_ids, ragged_range, row_offsets
from .tile.smem_image import SmemImage, slots_of
from .tile.tile_spec import TileCTA

__all__ = [
    "FP8_P_SCALE", "AsyncBarrier", "CpAsyncKVBuffer", "DecodeKVBuffer", "DecodeKVBufferParams",
    "DecodeStreamingKVBuffer", "Event", "Footprint", "FragmentMap", "Fragments", "Hazard", "Hazards", "KBuffer",
    "KBufferConfig", "KVBuffer", "KVBufferConfig", "KVBufferParams", "KVCacheIterator", "KVMmaOp", "KVMmaOpParams",
    "MmaSyncShape", "NvidiaKVParams", "PRegisterBuffer", "PStaging", "PStagingParams", "RegTileLoader",
    "RegTileWriterLDS", "Side", "SmemImage", "SubTileLoaderLDS", "SwizzledTile", "TileCTA", "TiledMmaLoader",
    "TiledMmaOp", "TiledTensorCore", "Timeline", "TmaKVBuffer", "Traffic", "VBuffer", "VBufferConfig", "WarpSlices",
    "cast_p", "ceildiv", "get_accum_type", "kv_buffer_dma_plan", "kv_buffer_operand_map", "ldmatrix_swizzle",
    "mfma_atom", "operand_map", "output_map", "program_ids", "ragged_range", "row_offsets", "score_map", "slots_of",
    "smem_mma_subtile", "smem_mma_subtile_offset", "smem_subtile", "streaming_dma_plan", "v_bf16_offsets",
    "v_fp8_offsets",
]
