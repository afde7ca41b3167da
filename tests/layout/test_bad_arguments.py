"""What is no layout, no int, no tensor or no shape is refused by a ValueError that repeats it; nothing hangs on a
layout taken for a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab import layout as kl
from kvlab.hardware import (
    SmemDescriptor,
    TmaDescriptor,
    bank_conflicts,
    buffer_load,
    cp_async,
    create_tensor_tile,
    ds_read_tr16_b64,
    get_atom,
    internal_k_major,
    ldmatrix,
    sectors,
    tmem_address,
    wavefronts,
)
from kvlab.layout import Layout, LinearLayout, Swizzle, TileTensor
from kvlab.layout.encodings import BlockedLayout, PaddedSharedLayout, SliceLayout, SwizzledSharedLayout
from kvlab.memory import AddressSpace, Memory

TILE = Layout.row_major(4, 8)
DRAM = Memory.over(np.arange(64, dtype=np.int32))
LANE = np.arange(32)
BLOCKED = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


def tensor():
    return TileTensor.from_numpy(np.zeros((8, 16), np.float32))


@pytest.mark.parametrize("bad", [None, "(4,8):(8,1)", (4, 8), np.zeros(2)], ids=repr)
@pytest.mark.parametrize(
    "operation",
    [
        kl.coalesce, kl.complement, kl.right_inverse, kl.left_inverse, kl.size, kl.cosize, kl.make_layout,
        kl.format_layout, lambda a: kl.compose(a, TILE), lambda a: kl.logical_divide(a, 2),
        lambda a: kl.zipped_divide(a, 2), lambda a: kl.logical_product(a, 2), lambda a: kl.blocked_product(TILE, a),
        lambda a: kl.tile_to_shape(a, (8, 8)), lambda a: kl.upcast(a, 2), lambda a: kl.zip_modes(TILE, a),
        lambda a: kl.expand_modes_alike(a, TILE), lambda a: kl.slice_and_offset((1, None), a), LinearLayout.from_layout,
        lambda a: TileTensor(Memory(64), "int32", a), lambda a: TileTensor.stack_allocation(a, "int32"),
        lambda a: tensor().distribute(a, 0),
    ],
)
def test_what_is_no_layout(operation, bad):
    with pytest.raises(ValueError, match="must be"):
        operation(bad)


@pytest.mark.parametrize("bad", [None, 1.5, "2", True, (2,), np.array([1.5])], ids=repr)
@pytest.mark.parametrize(
    "operation",
    [
        lambda n: kl.replace(TILE, n, TILE), lambda n: kl.upcast(TILE, n), lambda n: kl.sublayout(TILE, n),
        lambda n: kl.make_swizzle(n, 64, 8, "bf16"), lambda n: Swizzle(n, 4, 3, "byte"),
        lambda n: Swizzle(3, 4, 3, "byte").apply(0, n), lambda n: tensor().split(n), lambda n: tensor().split(2, n),
        lambda n: tensor().raw_load(0, n), lambda n: TileTensor(Memory(64), "int32", TILE, 0, n),
        lambda n: sectors(LANE, n), lambda n: ldmatrix(DRAM, LANE, n), lambda n: SmemDescriptor(n, 16, 1024, "128B"),
        lambda n: SmemDescriptor(0, 16, 1024, "128B").advance(n), lambda n: internal_k_major("bf16", n, 64, 128),
        lambda n: create_tensor_tile(np.zeros((64, 64), np.float16), (n, 64)), lambda n: SliceLayout(n, BLOCKED),
        lambda n: SwizzledSharedLayout(n, 1, 8, [1, 0]),
    ],
)
def test_what_is_no_int(operation, bad):
    with pytest.raises(ValueError):
        operation(bad)


@pytest.mark.parametrize("bad", [1.5, np.full(64, 1.5), None, "1", 1 << 70], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: buffer_load(DRAM, 0, x, 4, 256),
        lambda x: buffer_load(DRAM, x, LANE * 4, 4, 256),
        lambda x: buffer_load(DRAM, 0, LANE * 4, 4, x),
        lambda x: cp_async(Memory(256), x, DRAM, LANE[:4] * 16, 16),
        lambda x: ldmatrix(DRAM, x, 4),
        lambda x: ds_read_tr16_b64(DRAM, x),
        lambda x: wavefronts("ld.shared.b32", x),
        lambda x: tmem_address(x, 0),
        lambda x: TmaDescriptor.of(np.zeros((64, 64), np.float16), (x, 64)),
    ],
)
def test_addresses_are_integers_and_never_cut_to_them(operation, bad):
    with pytest.raises(ValueError):
        operation(bad)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: cp_async(tensor(), 0, DRAM, 0, 16), lambda: ldmatrix(None, LANE * 16, 4),
        lambda: tensor().copy_from(np.zeros((8, 16))), lambda: kl.copy_dram_to_sram(None, tensor(), TILE),
        lambda: TileTensor.from_numpy([[1, 2]]), lambda: tensor().address_space_cast("shared"),
        lambda: TileTensor.stack_allocation(TILE, "int32", "shared"), lambda: bank_conflicts(None, BLOCKED, (8, 8), 16),
        lambda: bank_conflicts(BLOCKED, BLOCKED, (64, 64), 16), lambda: get_atom(["mma"]),
        lambda: wavefronts([1], LANE),
        lambda: LinearLayout([[1]], (2,)), lambda: LinearLayout({"lane": [[1]]}, 2),
    ],
)
def test_other_kinds_of_things(operation):
    with pytest.raises(ValueError, match="must be"):
        operation()


@pytest.mark.parametrize("bad", [None, 4, "8", (4, (2,)), (0, 8), (-8, 8), (2.0, 8), Layout((8, 8))], ids=repr)
def test_shapes_of_encodings(bad):
    for operation in (
        BLOCKED.to_linear_layout,
        lambda shape: SwizzledSharedLayout(8, 1, 8, [1, 0]).offsets(shape),
        lambda shape: PaddedSharedLayout.with_identity_for([[64, 8]], shape, (1, 0)),
        lambda order: BlockedLayout([1, 8], [4, 8], [4, 1], order),
    ):
        with pytest.raises(ValueError):
            operation(bad)


def test_a_read_only_array_is_immutable_and_text_is_no_memory():
    numbers = np.arange(6.0)
    numbers.flags.writeable = False
    with pytest.raises(ValueError, match="which is immutable: as_immut\\(\\) or a read-only array made it"):
        TileTensor.from_numpy(numbers).fill(1)
    for array in (np.array(["a"]), np.array([None])):
        with pytest.raises(ValueError, match="must be numbers"):
            TileTensor.from_numpy(array)


def test_layouts_are_no_sequences():
    for layout in (TILE, kl.ComposedLayout(TILE, None, 3)):
        with pytest.raises(TypeError, match="not iterable"):
            iter(layout)


def test_an_empty_layout_leaves_nothing_out():
    with pytest.raises(ValueError, match="complement of 0:1: must be a layout with elements"):
        kl.complement(Layout(0))
    assert AddressSpace.SHARED.value == "shared"
