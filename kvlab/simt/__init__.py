"""The compiled kernel run without a GPU: a machine of warps for the PTX that Triton and Gluon emit.

:func:`run` compiles a kernel for a GPU that is not there and executes every instruction for all lanes at once, on
arrays; :func:`run_ptx` takes PTX as text. Products, exponentials and reciprocals are those of an H100 to the bit
(:mod:`kvlab.hardware.chip`). The record of a run says for each line what its accesses took: passes of shared memory and
sectors of global memory are those of the compiled code, not a prediction.
"""

from .control import DeviceAssertion
from .launch import run, run_ptx
from .machine import Deadlock
from .order import Race, Unfenced, Unwaited
from .ptx import Program, PtxInstruction, parse
from .record import InstructionFacts, KernelRun, LineFacts
from .values import UnknownInstruction

__all__ = [
    "Deadlock",
    "DeviceAssertion",
    "InstructionFacts",
    "KernelRun",
    "LineFacts",
    "Program",
    "PtxInstruction",
    "Race",
    "Unfenced",
    "UnknownInstruction",
    "Unwaited",
    "parse",
    "run",
    "run_ptx",
]
