"""What the chips do: architectures as data, shared-memory banks, MMA atoms and the data instructions. NumPy only."""

from .arch import ARCHS, Arch, get_arch
from .banks import count_wavefronts, wavefronts
from .copy import buffer_load, buffer_load_lds, cp_async
from .ds_read_tr import ds_read_tr8_b64, ds_read_tr16_b64
from .instructions import INSTRUCTIONS, Instruction, get_instruction
from .ldmatrix import ldmatrix, stmatrix
from .mma import ATOMS, MmaAtom, get_atom
from .sectors import SECTOR_BYTES, sectors
from .wavefront import Collision, Phase, Wavefronts

__all__ = [
    "ARCHS",
    "ATOMS",
    "INSTRUCTIONS",
    "SECTOR_BYTES",
    "Arch",
    "Collision",
    "Instruction",
    "MmaAtom",
    "Phase",
    "Wavefronts",
    "buffer_load",
    "buffer_load_lds",
    "count_wavefronts",
    "cp_async",
    "ds_read_tr8_b64",
    "ds_read_tr16_b64",
    "get_arch",
    "get_atom",
    "get_instruction",
    "ldmatrix",
    "sectors",
    "stmatrix",
    "wavefronts",
]
