"""Which lanes the LDS of AMD serves together: groups that others measured on both chips, pair by pair."""

from __future__ import annotations

from kvlab.hardware import get_arch

READS_OF_16_BYTES = {  # lanes 0-31 as others measured them, pair by pair; lanes 32-63 likewise
    "gfx942": [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19],
               [8, 9, 10, 11, 28, 29, 30, 31], [12, 13, 14, 15, 24, 25, 26, 27]],
    "gfx950": [[0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27],
               [4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31]],
}


def amd_phases(name: str, arch: str) -> tuple[list[list[int]], int]:
    """The lanes of each phase, and the banks: groups measured by others, one source for writes of 8 bytes on gfx950,
    else lane order, as many lanes as fill all banks.
    """
    nbytes, lanes, banks = int(name.rpartition("_b")[2]) // 8, get_arch(arch).warp_size, get_arch(arch).banks
    if name == "ds_read_b128" and arch in READS_OF_16_BYTES:
        half = READS_OF_16_BYTES[arch]
        return [*half, *([lane + 32 for lane in group] for group in half)], banks
    if name == "ds_write_b64" and arch == "gfx950":
        return [list(range(first, first + 16)) for first in range(0, 64, 16)], 32
    together = min(4 * banks // nbytes, lanes)
    return [list(range(first, first + together)) for first in range(0, lanes, together)], banks
