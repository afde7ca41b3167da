"""Shared memory of a tile."""

from __future__ import annotations

from kvlab.attention.machines.gpu import traits

BARRIER_BYTES = 1024
"""Of mbarriers, and of the words by which warps tell each other of tiles, at most: Hopper's kernels, beside tiles."""

NUMBER_BYTES = 16
"""Of what a key has beside its columns: the number of its page, scales, and what aligns a buffer more."""


def tile_bytes(
    BM: int, BN: int, columns: tuple[int, int], itemsize: int, num_stages: int, *, arch: str = "sm_90",
    key_bytes: int | None = None, q_columns: tuple[int, int] | None = None, hops: int = 1, wgmma: bool = False,
    biased: bool = False,
) -> int:
    """Bytes of shared memory that a loop over tiles of BN keys takes on ``arch`` at most: BM query rows, ``columns`` of
    K and V, products of ``itemsize`` bytes. No kernel that Triton 3.6 or 3.7 compiles takes more, and near a limit
    none takes much less. (On AMD's GPUs 3.9 fetches further ahead.)

    With one stage, V comes where K was. With more, K and V lie side by side, a tile for each stage but the one at
    work; a load that waits for another, of its page's number, is a pipeline of half as many stages (``hops`` 2).
    ``key_bytes``: of a key's K and V as they come, where products are of another dtype. ``q_columns``: of a row of Q
    and of the output, where they are not those of K and V. ``wgmma`` reads K and V while the next tile comes: one tile
    more, and one that is converted; P stays in registers, and otherwise goes through memory. ``biased``: float32 that
    is added to the scores comes as K does. Blackwell's products have mbarriers, and P of e4m3 in memory. On AMD's GPUs
    Q and the scores pass through memory that others use, too, and with one stage each piece of the columns after the
    other: ``columns`` are the widest.

    >>> tile_bytes(32, 32, (576, 512), 2, 2), tile_bytes(32, 32, (576, 512), 2, 1)
    (108544, 75776)
    >>> [tile_bytes(128, 64, (192, 128), 2, stages, wgmma=True, biased=True) for stages in (3, 2)]
    [240640, 165888]
    """
    (amd, products, _), (k, v), (q_k, q_v) = traits(arch), columns, q_columns or columns
    row = (k + v) * itemsize
    given = row if key_bytes is None else key_bytes
    ahead = max((num_stages - 1) // hops, 1) if num_stages > 1 else 0
    if num_stages == 1:
        tiles = BN * max(k, v) * itemsize
    else:
        tiles = BN * (ahead + wgmma) * given + BN * row * (wgmma and given < row)
    blackwell = wgmma and products != "wgmma"
    p = BM * BN * itemsize if not wgmma or (blackwell and itemsize == 1) else 0
    q, out = BM * q_k * itemsize, BM * q_v * max(itemsize, 2)
    if amd:
        scores = BM * BN * 4
        return max(q, tiles + scores if num_stages > 1 else max(tiles, scores), out)
    tiles += ahead * BM * BN * 4 * biased + BARRIER_BYTES * blackwell
    if biased or hops == 2 or given < row:
        tiles += num_stages * BN * NUMBER_BYTES
    return max(q + tiles + p, out)
