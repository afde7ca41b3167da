"""Layouts, swizzles and views of memory through them. NumPy only."""

from kvlab.layout.algebra.composed import ComposedLayout
from kvlab.layout.algebra.compositions import compose, composition
from kvlab.layout.algebra.coordinate_layout import CoordinateLayout, E
from kvlab.layout.algebra.cute_text import from_cute, to_cute
from kvlab.layout.algebra.divide import flat_divide, local_tile, logical_divide, tiled_divide, zipped_divide
from kvlab.layout.algebra.grid_text import format_layout
from kvlab.layout.algebra.int_tuple import crd2idx, idx2crd, prefix_product
from kvlab.layout.algebra.inverse import (
    left_inverse,
    max_common_layout,
    max_common_vector,
    nullspace,
    right_inverse,
)
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.modes import append, group, prepend, replace
from kvlab.layout.algebra.operations import (
    coalesce,
    complement,
    cosize,
    make_layout,
    make_ordered_layout,
    size,
    sublayout,
    zip_modes,
)
from kvlab.layout.algebra.product import (
    blocked_product,
    flat_product,
    logical_product,
    raked_product,
    tile_to_shape,
    tiled_product,
    zipped_product,
)
from kvlab.layout.algebra.recast import downcast, expand_modes_alike, upcast
from kvlab.layout.algebra.slicing import slice_and_offset
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.algebra.swizzles import make_ldmatrix_swizzle, make_swizzle, make_tma_swizzle
from kvlab.layout.algebra.tree_ops import shape_div
from kvlab.layout.linear.linear_dims import ColumnAction
from kvlab.layout.linear.linear_layout import LinearLayout
from kvlab.layout.tensor.copier import ThreadScope
from kvlab.layout.tensor.copiers import (
    GenericToLocalTileCopier,
    GenericToSharedAsyncTileCopier,
    GenericToSharedTileCopier,
    LocalToGenericTileCopier,
    LocalToSharedTileCopier,
    SharedToGenericTileCopier,
    SharedToLocalTileCopier,
)
from kvlab.layout.tensor.layout_tensor import LayoutTensor
from kvlab.layout.tensor.tensor_layout import TensorLayout
from kvlab.layout.tensor.tile_host_device import HostDeviceTileTensor
from kvlab.layout.tensor.tile_io import (
    copy_dram_to_local,
    copy_dram_to_sram,
    copy_dram_to_sram_async,
    copy_local_to_dram,
    copy_local_to_shared,
    copy_sram_to_dram,
    copy_sram_to_local,
)
from kvlab.layout.tensor.tile_nullable import NullableTileTensor
from kvlab.layout.tensor.tile_tensor import TileTensor
from kvlab.layout.tensor.tile_type import TileType

__all__ = [
    "ColumnAction", "ComposedLayout", "CoordinateLayout", "E", "GenericToLocalTileCopier",
    "GenericToSharedAsyncTileCopier", "GenericToSharedTileCopier", "HostDeviceTileTensor", "Layout", "LayoutTensor",
    "LinearLayout", "LocalToGenericTileCopier", "LocalToSharedTileCopier", "NullableTileTensor",
    "SharedToGenericTileCopier", "SharedToLocalTileCopier", "Swizzle", "TensorLayout", "ThreadScope", "TileTensor",
    "TileType", "append", "blocked_product", "coalesce", "complement", "compose", "composition", "copy_dram_to_local",
    "copy_dram_to_sram", "copy_dram_to_sram_async", "copy_local_to_dram", "copy_local_to_shared", "copy_sram_to_dram",
    "copy_sram_to_local", "cosize", "crd2idx", "downcast", "expand_modes_alike", "flat_divide", "flat_product",
    "format_layout", "from_cute", "group", "idx2crd", "left_inverse", "local_tile", "logical_divide", "logical_product",
    "make_layout", "make_ldmatrix_swizzle", "make_ordered_layout", "make_swizzle", "make_tma_swizzle",
    "max_common_layout", "max_common_vector", "nullspace", "prefix_product", "prepend", "raked_product", "replace",
    "right_inverse", "shape_div", "size", "slice_and_offset", "sublayout", "tile_to_shape", "tiled_divide",
    "tiled_product", "to_cute", "upcast", "zip_modes", "zipped_divide", "zipped_product",
]
