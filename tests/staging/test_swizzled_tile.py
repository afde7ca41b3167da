"""Tiles in shared memory as Triton keeps them, against the compiler's closed form and bank laws."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import count_wavefronts
from kvlab.layout import Swizzle
from kvlab.staging import SwizzledTile, ldmatrix_swizzle

TRITON = {512: (8, 1, 8), 256: (8, 1, 8), 128: (8, 1, 8), 64: (8, 2, 4), 32: (8, 4, 2)}
"""``SwizzledSharedLayout(vec, per_phase, max_phase)`` for 16-bit rows of so many bytes."""


@pytest.mark.parametrize("row_bytes", TRITON)
def test_image_of_triton(row_bytes: int) -> None:
    """``off = R*NC + (C ^ (((R // per_phase) % max_phase) * vec) % NC)``, in elements of 2 bytes."""
    vec, per_phase, max_phase = TRITON[row_bytes]
    R, C = np.ogrid[:64, : row_bytes // 2 : vec]
    offset = R * (row_bytes // 2) + (C ^ ((R // per_phase) % max_phase * vec) % (row_bytes // 2))
    tile = SwizzledTile(64, row_bytes, base=4096)
    assert (tile.address(R, C // vec) == 4096 + 2 * offset).all()


@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128, 256, 512])
def test_eight_rows_of_a_column_take_one_pass_per_matrix(row_bytes: int) -> None:
    """Rests on the rule of an H100: what ldmatrix needs. Without the swizzle they collide, from rows of 32 bytes on."""
    tile = SwizzledTile(64, row_bytes)
    for vector in range(tile.vectors):
        lanes = tile.address(np.arange(32), vector)
        plain = tile.plain().address(np.arange(32), vector)
        assert int(count_wavefronts("ldmatrix.x4", lanes, arch="sm_90")[0]) == 4
        assert int(count_wavefronts("ldmatrix.x4", plain, arch="sm_90")[0]) == 4 * min(max(row_bytes // 16, 1), 8)


@pytest.mark.parametrize("row_bytes", [16, 64, 256])
def test_every_vector_has_its_own_slot(row_bytes: int) -> None:
    tile = SwizzledTile(32, row_bytes, base=1024)
    address = tile.address(np.arange(32)[:, None], np.arange(tile.vectors))
    assert sorted(address.reshape(-1).tolist()) == list(range(1024, 1024 + tile.nbytes, 16))
    owner = tile.owner()[(address - 1024) // 16]
    assert (owner[..., 0] == np.arange(32)[:, None]).all()
    assert (owner[..., 1] == np.arange(tile.vectors)).all()


@pytest.mark.parametrize("row_bytes", [0, 8, 48, 160])
def test_rows_that_have_no_swizzle(row_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"row_bytes is {row_bytes}: must be a power of two of at least 16"):
        ldmatrix_swizzle(row_bytes)


@pytest.mark.parametrize(
    ("row", "vector", "message"),
    [
        (64, 0, "row is 64: must be 0 to 63"),
        (-1, 0, "row is -1: must be 0 to 63, in the tile"),
        (0, 8, "vector is 8: must be 0 to 7"),
        (np.arange(3), [0, 1, -2], "vector is -2: must be 0 to 7"),
        (0.5, 0, "row of float64: must be integers from 0 to 63"),
        (0, "a", "vector of <U1: must be integers from 0 to 7"),
    ],
)
def test_addresses_outside_the_tile(row: object, vector: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwizzledTile(64, 128).address(row, vector)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1}, "rows is -1: must be an integer of at least 0"),
        ({"rows": 6.5}, r"rows is 6\.5: must be an integer"),
        ({"rows": "64"}, "rows is '64': must be an integer"),
        ({"row_bytes": 100}, "row_bytes is 100: must be a multiple of 16"),
        ({"row_bytes": 96}, "row_bytes is 96: must be a power of two"),
        ({"base": 8}, "base is 8: must be a multiple of 16"),
        ({"rows": 9, "row_bytes": 32, "swizzle": Swizzle(2, 0, 3, "vector")}, "moves vectors out of the tile of 9 x"),
    ],
)
def test_tiles_that_are_none(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwizzledTile(**{"rows": 64, "row_bytes": 128} | arguments)  # type: ignore[arg-type]
