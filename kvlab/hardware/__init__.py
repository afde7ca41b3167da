"""Model of the chips: architectures as data, shared-memory banks, MMA atoms and the data instructions. NumPy only."""

from .arch import Arch, LaneGroups, get_arch
from .arch_table import ARCHS
from .banks.copy_wavefronts import COPIES, copy_unit_passes, copy_wavefronts
from .banks.count import count_wavefronts, wavefronts
from .banks.cure_search import (
    BestOrder,
    BestPadding,
    BestSwizzle,
    Candidate,
    Cure,
    best_order,
    best_padding,
    best_swizzle,
)
from .banks.sectors import SECTOR_BYTES, Coalescing, coalescing, sectors
from .banks.tile_access import LaneAccess
from .banks.triton_conflicts import SharedTransfer, bank_conflicts, shared_transfer
from .banks.wavefront import Collision, Phase, Wavefronts
from .chip import Arithmetic, arithmetic, current_arithmetic, div_full, ex2_approx, fma, mma_sum, rcp_approx
from .copies import tma
from .copies.copy import buffer_load, buffer_load_lds, cp_async
from .copies.ld_st_shared import ld_shared, st_shared
from .copies.lds_dma import DmaPlan, SubTileLoaderLDS, SubTileLoaderLDS_st_8x32
from .copies.mbarrier import BarrierDeadlock, PipelineState, SharedMemBarrier
from .copies.ragged_tma import RaggedTensorMap, RaggedTMA3DTile
from .copies.reg_tile import RegTileLoader, RegTileWriterLDS
from .copies.tensor_map import TensorMapL2Promotion, TensorMapSwizzle, TmaDescriptor
from .copies.tile_resource import buffer_resource
from .copies.tma_gather4 import TMAGather4Tile, create_tma_tile_gather4
from .copies.tma_tile import (
    TMATensorTile,
    create_kv_tile,
    create_split_tma,
    create_tensor_tile,
    create_tma_tile,
    fold_kv_descriptor,
)
from .instructions import INSTRUCTIONS, Instruction, get_instruction
from .mma.atom import MmaAtom
from .mma.atoms import ATOMS, get_atom, round_tf32
from .mma.canonical import (
    internal_k_major,
    st_matrix_n_atom,
    tile_layout_k_major,
    tile_layout_mn_major,
    tile_sf_layout_k_major,
)
from .mma.ds_read_tr import ds_read_tr8_b64, ds_read_tr16_b64
from .mma.ldmatrix import ldmatrix, stmatrix
from .mma.shared_mma import shared_mma, shared_mma_wavefronts
from .mma.smem_descriptor import SmemDescriptor, tile_to_descriptor
from .mma.tmem import TMEM_COLUMNS, TMEM_LANES, TensorMemory, tmem_address, tmem_layout

__all__ = [
    "ARCHS", "ATOMS", "COPIES", "INSTRUCTIONS", "SECTOR_BYTES", "TMEM_COLUMNS", "TMEM_LANES", "Arch", "Arithmetic",
    "BarrierDeadlock", "BestOrder", "BestPadding", "BestSwizzle", "Candidate", "Coalescing", "Collision", "Cure",
    "DmaPlan", "Instruction", "LaneAccess", "LaneGroups", "MmaAtom", "Phase", "PipelineState", "RaggedTMA3DTile",
    "RaggedTensorMap", "RegTileLoader", "RegTileWriterLDS", "SharedMemBarrier", "SharedTransfer", "SmemDescriptor",
    "SubTileLoaderLDS", "SubTileLoaderLDS_st_8x32", "TMAGather4Tile", "TMATensorTile", "TensorMapL2Promotion",
    "TensorMapSwizzle", "TensorMemory", "TmaDescriptor", "Wavefronts", "arithmetic", "bank_conflicts", "best_order",
    "best_padding", "best_swizzle", "buffer_load", "buffer_load_lds", "buffer_resource", "coalescing",
    "copy_unit_passes", "copy_wavefronts", "count_wavefronts", "cp_async", "create_kv_tile", "create_split_tma",
    "create_tensor_tile", "create_tma_tile", "create_tma_tile_gather4", "current_arithmetic", "div_full",
    "ds_read_tr8_b64", "ds_read_tr16_b64", "ex2_approx", "fma", "fold_kv_descriptor", "get_arch", "get_atom",
    "get_instruction", "internal_k_major", "ld_shared", "ldmatrix", "mma_sum", "rcp_approx", "round_tf32",
    "sectors", "shared_mma", "shared_mma_wavefronts", "shared_transfer", "st_matrix_n_atom", "st_shared",
    "stmatrix", "tile_layout_k_major", "tile_layout_mn_major", "tile_sf_layout_k_major", "tile_to_descriptor",
    "tma", "tmem_address", "tmem_layout", "wavefronts",
]
