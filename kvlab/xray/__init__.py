"""X-ray of anyone's Triton or Gluon kernel: layouts, shared memory, wavefronts, sectors, registers, findings and cures.

``xray(kernel, signature_or_args, target)`` compiles for a GPU that is not there and reads what the compilers left:
the TTGIR for layouts and allocations, the LLVM IR for the address of every lane, PTX or AMD assembly for instructions.
"""

from kvlab.xray.accesses import MemoryAccess
from kvlab.xray.cures import Remedy
from kvlab.xray.difference import XRayDiff, diff
from kvlab.xray.edges import Allocation, Edge
from kvlab.xray.findings import Finding
from kvlab.xray.make import xray
from kvlab.xray.resources import Resources
from kvlab.xray.result import XRay

__all__ = [
    "Allocation", "Edge", "Finding", "MemoryAccess", "Remedy", "Resources", "XRay", "XRayDiff", "diff", "xray",
]
