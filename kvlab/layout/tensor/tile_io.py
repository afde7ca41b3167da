"""MAX's free functions of tile copies: each makes the copier of its name and copies."""

from __future__ import annotations

from typing import Any

from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import Swizzle
from kvlab.layout.tensor import copiers
from kvlab.layout.tensor.copier import ThreadScope
from kvlab.layout.tensor.tile_tensor import TileTensor


def copy_dram_to_sram(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, swizzle: Swizzle | None = None,
    num_threads: int | None = None, thread_scope: ThreadScope = ThreadScope.BLOCK,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.GenericToSharedTileCopier`.

    >>> import numpy as np
    >>> smem = TileTensor.stack_allocation(Layout.row_major(4, 4), "int32")
    >>> copy_dram_to_sram(smem, TileTensor.from_numpy(np.eye(4, dtype=np.int32)), Layout.row_major(2, 4))
    >>> print(smem)
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    copiers.GenericToSharedTileCopier(thread_layout, num_threads, thread_scope, swizzle).copy(dst, src)


def copy_dram_to_sram_async(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, swizzle: Swizzle | None = None, masked: bool = False,
    num_threads: int | None = None, thread_scope: ThreadScope = ThreadScope.BLOCK,
    src_num_valid_rows: int | None = None,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.GenericToSharedAsyncTileCopier`.

    >>> import numpy as np
    >>> smem = TileTensor.stack_allocation(Layout.row_major(2, 2), "int32")
    >>> dram = TileTensor.from_numpy(np.ones((2, 2), np.int32))
    >>> copy_dram_to_sram_async(smem, dram, Layout.row_major(2, 2), masked=True, src_num_valid_rows=1)
    >>> print(smem)
    [[1, 1], [0, 0]]
    """
    copier = copiers.GenericToSharedAsyncTileCopier(thread_layout, num_threads, thread_scope, swizzle, masked)
    copier.copy(dst, src, src_num_valid_rows=src_num_valid_rows)


def copy_sram_to_dram(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, swizzle: Swizzle | None = None,
    num_threads: int | None = None,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.SharedToGenericTileCopier`.

    >>> import numpy as np
    >>> smem = TileTensor.stack_allocation(Layout(4), "int32").fill(3)
    >>> dram = TileTensor.from_numpy(np.zeros(4, np.int32))
    >>> copy_sram_to_dram(dram, smem, Layout(2))
    >>> dram.to_numpy().tolist()
    [3, 3, 3, 3]
    """
    copiers.SharedToGenericTileCopier(thread_layout, num_threads, swizzle=swizzle).copy(dst, src)


def copy_dram_to_local(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, num_threads: int | None = None,
    thread_scope: ThreadScope = ThreadScope.BLOCK, worker: Any = None,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.GenericToLocalTileCopier`.

    >>> import numpy as np
    >>> from kvlab.memory import AddressSpace
    >>> registers = TileTensor.stack_allocation(Layout(2), "int32", AddressSpace.LOCAL, programs=2)
    >>> copy_dram_to_local(registers, TileTensor.from_numpy(np.arange(4, dtype=np.int32)), Layout(2))
    >>> registers.to_numpy().tolist()
    [[0, 2], [1, 3]]
    """
    copiers.GenericToLocalTileCopier(thread_layout, num_threads, thread_scope).copy(dst, src, worker)


def copy_local_to_dram(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, num_threads: int | None = None,
    thread_scope: ThreadScope = ThreadScope.BLOCK, worker: Any = None,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.LocalToGenericTileCopier`.

    >>> import numpy as np
    >>> from kvlab.memory import AddressSpace
    >>> registers = TileTensor.stack_allocation(Layout(2), "int32", AddressSpace.LOCAL, programs=2)
    >>> registers.store(np.array([[[0], [2]], [[1], [3]]], np.int32))
    >>> dram = TileTensor.from_numpy(np.zeros(4, np.int32))
    >>> copy_local_to_dram(dram, registers, Layout(2))
    >>> dram.to_numpy().tolist()
    [0, 1, 2, 3]
    """
    copiers.LocalToGenericTileCopier(thread_layout, num_threads, thread_scope).copy(dst, src, worker)


def copy_sram_to_local(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, num_threads: int | None = None,
    thread_scope: ThreadScope = ThreadScope.BLOCK, worker: Any = None,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.SharedToLocalTileCopier`.

    >>> from kvlab.memory import AddressSpace
    >>> smem = TileTensor.stack_allocation(Layout(4), "int32").fill(3)
    >>> registers = TileTensor.stack_allocation(Layout(2), "int32", AddressSpace.LOCAL, programs=2)
    >>> copy_sram_to_local(registers, smem, Layout(2))
    >>> registers.to_numpy().tolist()
    [[3, 3], [3, 3]]
    """
    copiers.SharedToLocalTileCopier(thread_layout, num_threads, thread_scope).copy(dst, src, worker)


def copy_local_to_shared(
    dst: TileTensor, src: TileTensor, thread_layout: Layout, *, swizzle: Swizzle | None = None,
    num_threads: int | None = None, thread_scope: ThreadScope = ThreadScope.BLOCK, worker: Any = None,
) -> None:
    """:class:`~kvlab.layout.tensor.copiers.LocalToSharedTileCopier`.

    >>> from kvlab.memory import AddressSpace
    >>> registers = TileTensor.stack_allocation(Layout(2), "int32", AddressSpace.LOCAL, programs=2).fill(5)
    >>> smem = TileTensor.stack_allocation(Layout(4), "int32")
    >>> copy_local_to_shared(smem, registers, Layout(2))
    >>> smem.to_numpy().tolist()
    [5, 5, 5, 5]
    """
    copiers.LocalToSharedTileCopier(thread_layout, num_threads, thread_scope, swizzle).copy(dst, src, worker)
