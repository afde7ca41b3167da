"""Runtime extents, address-space casts, absent tensors, tensors of host and device. Rests on the layout documents'
rules (what prints flat, what a compiler refuses, which index type) and on one law: knowing less changes no access."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.layout import HostDeviceTileTensor, Layout, NullableTileTensor, TileTensor
from kvlab.memory import AddressSpace, Memory, UnwrittenRead


def numbered(*shape):
    return TileTensor.from_numpy(np.arange(1.0, 1 + np.prod(shape)).reshape(shape))


def test_a_runtime_extent_prints_flat():
    assert str(numbered(2, 3)) == "[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]"
    assert str(numbered(2, 3).make_dynamic()) == "[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]"
    assert str(numbered(2, 3).make_dynamic(0)) == "[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]"
    assert "runtime extents" in repr(numbered(2, 3).make_dynamic())


VIEWS = {
    "tile": lambda t: t.tile((2, 4), (1, 1)),
    "stride_layout": lambda t: t.tile((2, 4), (1, 0), stride_layout=(4, 1)),
    "vectorize": lambda t: t.vectorize(1, 2),
    "distribute": lambda t: t.distribute(Layout.row_major(2, 2), np.arange(4)),
    "slice": lambda t: t.slice(2, slice(1, 5)),
    "subscript": lambda t: t[1:3, 0:4],
    "transpose": lambda t: t.transpose(),
    "reshape": lambda t: t.reshape(8, 4),
    "reinterpret": lambda t: t.reshape(Layout("(4,(2,4)):(8,(4,1))")),
    "valid rows": lambda t: t.with_valid_rows(3),
    "immutable": lambda t: t.as_immut(),
    "bitcast": lambda t: t.bitcast("int64"),
    "part": lambda t: t.split(3, 1, index=1),
}
KNOWN = {  # static_shape and static_stride of the view of a wholly dynamic tensor
    "tile": ((2, 4), (-1, -1)),
    "stride_layout": ((2, 4), (4, 1)),
    "vectorize": ((-1, -1), (-1, -1)),
    "distribute": ((-1, -1), (-1, -1)),
    "slice": ((-1,), (-1,)),
    "transpose": ((-1, -1), (-1, -1)),
    "reshape": ((8, 4), (4, 1)),
    "reinterpret": ((-1, -1, -1), (-1, -1, -1)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("modes", [(), (0,), (1,), (0, 1)], ids=str)
def test_knowing_less_changes_no_access(name, modes):
    static, dynamic = VIEWS[name](numbered(4, 8)), VIEWS[name](numbered(4, 8).make_dynamic(*modes))
    assert static.all_dims_known
    assert (dynamic.layout, dynamic.element_size) == (static.layout, static.element_size)
    np.testing.assert_array_equal(dynamic.load(), static.load())
    np.testing.assert_array_equal(dynamic.offset, static.offset)
    if not modes and name in KNOWN:
        assert (dynamic.static_shape, dynamic.static_stride) == KNOWN[name]


def test_which_leaves_are_known():
    t = numbered(4, 8).make_dynamic(0)  # rows at run time: MAX's MixedLayout
    assert (t.shape_known, t.stride_known, t.all_dims_known) == (False, True, False)
    assert t.transpose().static_shape == (8, -1)
    assert t.slice(1, slice(None)).all_dims_known
    assert t.slice(slice(None), 1).static_shape == (-1,)
    nested = TileTensor(Memory(256), "int32", Layout("((2,2),8):((8,16),1)")).make_dynamic(0)
    assert nested.static_shape == (-1, -1, 8)
    assert nested.transpose().static_shape == (8, -1, -1)
    assert numbered(4, 8).make_dynamic(0).make_dynamic(1).static_shape == (-1, -1)


@pytest.mark.parametrize(
    "refused",
    [
        lambda t: t.copy_from(numbered(4, 8)),
        lambda t: numbered(4, 8).copy_from(t),
        lambda t: t.__imul__(2),
        lambda t: t.exp(),
        lambda t: t.max(0.0),
        lambda t: t.coalesce(),
        lambda t: t.as_span(),
        lambda t: t.split(2),
    ],
)
def test_what_needs_static_extents(refused):
    with pytest.raises(ValueError, match="with runtime extents: must be a static shape"):
        refused(numbered(4, 8).make_dynamic(1))
    refused(numbered(4, 8))


def test_make_dynamic_refuses_modes_that_are_not_there():
    for modes in ((2,), (-1,), ("0",)):
        with pytest.raises(ValueError, match="must be modes 0 to 1"):
            numbered(4, 8).make_dynamic(*modes)


def test_linear_index_type():
    """int32 where static and below 2^31, and in shared and constant memory whatever the layout; else int64."""
    small, large = Layout.row_major(4, 8), Layout.row_major(1 << 16, 1 << 15)

    def of(layout, space=AddressSpace.GENERIC):
        return TileTensor(Memory(0, space=space), "int8", layout)

    assert of(small).linear_idx_type == np.int32
    assert of(large).linear_idx_type == np.int64  # cosize is 2^31
    assert of(small).make_dynamic().linear_idx_type == np.int64
    assert of(small, AddressSpace.SHARED).make_dynamic().linear_idx_type == np.int32
    assert of(large, AddressSpace.CONSTANT).linear_idx_type == np.int32
    assert of(small).check_linear_idx().layout == small
    of(large).check_linear_idx()
    of(large, AddressSpace.SHARED).check_linear_idx()  # the last offset is 2^31 - 1
    with pytest.raises(ValueError, match="offset 2147483648 wraps around in int32"):
        of(Layout((2,), (1 << 31,)), AddressSpace.SHARED).check_linear_idx()
    assert (of(small).shape_known, of(small).stride_known, of(small).static_shape) == (True, True, (4, 8))


def test_address_space_cast_shares_the_bytes():
    smem = TileTensor.stack_allocation(Layout.row_major(2, 4), "fp32", programs=2, base=128)
    generic = smem.tile((1, 4), (1, 0)).address_space_cast(AddressSpace.GENERIC)
    assert (generic.memory.space, generic.layout, generic.memory.base) == (
        AddressSpace.GENERIC,
        Layout("(1,4):(4,1)"),
        128,
    )
    with pytest.raises(UnwrittenRead):
        generic.load()
    smem.fill(3)
    assert (generic.to_numpy() == 3).all()
    generic.fill(5)
    assert smem.to_numpy()[0].tolist() == [[3] * 4, [5] * 4]
    smem.memory.poison()
    with pytest.raises(UnwrittenRead):
        generic.load()
    assert generic.address_space_cast(AddressSpace.SHARED).memory.space is AddressSpace.SHARED
    assert not generic.as_immut().address_space_cast(AddressSpace.SHARED).mutable


def test_address_space_cast_refuses_what_is_a_copy():
    t = TileTensor.from_numpy(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="must be from or to generic; data moves from global to local by a copy"):
        t.address_space_cast(AddressSpace.LOCAL)
    with pytest.raises(ValueError, match=r"'local': must be a kvlab\.memory\.AddressSpace"):
        t.address_space_cast("local")
    unsafe = TileTensor(Memory(64, space=AddressSpace.SHARED, unsafe=True), "int32", Layout(4))
    assert unsafe.address_space_cast(AddressSpace.LOCAL).memory.space is AddressSpace.LOCAL


def test_nullable():
    absent = NullableTileTensor("bf16", Layout("((2,2),8):((8,16),1)"), AddressSpace.GLOBAL)
    assert (absent.rank, absent.flat_rank, absent.shape, absent.dim(0), absent.num_elements()) == (2, 3, (4, 8), 4, 32)
    with pytest.raises(ValueError, match="global, absent\\) has no memory"):
        absent.value()
    given = NullableTileTensor.of(numbered(2, 3))
    assert (given.value().load()[..., 0] == numbered(2, 3).to_numpy()).all()
    assert (given.dtype, given.space, bool(given)) == (np.float64, AddressSpace.GLOBAL, True)
    for arguments, message in ((("bf17", Layout(4)), "dtype is 'bf17'"), (("bf16", "4:1"), "must be a Layout")):
        with pytest.raises(ValueError, match=message):
            NullableTileTensor(*arguments)


def test_host_and_device():
    """Two memories of cosize scalars; a copy brings all bytes, and what nobody wrote stays unwritten."""
    pair = HostDeviceTileTensor(Layout("(2,3):(4,1)"), "int16", ctx="gpu:0")
    host, device = pair.host_tensor(), pair.device_tensor()
    assert (host.memory.nbytes, device.memory.nbytes) == (14, 14)
    assert not host.memory.shares_bytes(device.memory)
    host.tile((1, 3), (0, 0)).fill(4)
    pair.to_device()
    host.fill(9)
    assert device.tile((1, 3), (0, 0)).to_numpy().tolist() == [[4, 4, 4]]
    with pytest.raises(UnwrittenRead):
        device.load()
    device.fill(6)
    assert (host.to_numpy() == 9).all()
    pair.to_host()
    assert (host.to_numpy() == 6).all()
    assert HostDeviceTileTensor(Layout((0, 3)), "int16", ctx=0).host_tensor().memory.nbytes == 0


def test_no_device():
    pair = HostDeviceTileTensor(Layout(4), "fp32")
    assert pair.host_tensor().fill(1).to_numpy().tolist() == [1] * 4
    for use in (pair.device_tensor, pair.to_device, pair.to_host):
        with pytest.raises(ValueError, match="made without ctx=, it has no device"):
            use()
    with pytest.raises(ValueError, match="must be a Layout"):
        HostDeviceTileTensor((4,), "fp32")
