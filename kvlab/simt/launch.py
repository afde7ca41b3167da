"""A launch on arrays: the kernel compiled without a GPU, its arguments placed in memory, its grid run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.arrays import on_gpu, to_numpy
from kvlab.common.checks import require, shown
from kvlab.common.torch_here import is_torch
from kvlab.hardware import TmaDescriptor
from kvlab.hardware.chip import ARITHMETICS
from kvlab.memory import AddressSpace, Memory

from .hopper import descriptor_over
from .machine import Code, SimtMachine, symbols_of
from .order import Unwaited
from .ptx import Parameter, Program, parse
from .record import KernelRun, Trace, facts_of
from .values import GLOBALS, REGION, TYPES

_LANES = 4096  # that run side by side
_SCRATCH = 1 << 20


def run(
    kernel: Any, grid: Any, *args: Any, target: str = "sm_80", arithmetic: str = "chip", addresses: bool = True,
    strict: bool = True, races: bool = False, launch_before: Callable[[], Any] | None = None, **named: Any,
) -> KernelRun:
    """Run a ``@triton.jit`` or ``@gluon.jit`` kernel as it is compiled for a GPU, without one: its PTX, lane by lane.

    kernel, grid, args, named  as in ``kernel[grid](*args, **named)``; arrays are NumPy's or CPU tensors of torch and
                are written in place; ``num_warps`` and other options of the compiler are among ``named``
    target      ``sm_80``, ``sm_86``, ``sm_89`` or ``sm_90``
    arithmetic  ``"chip"``: products and special functions as an H100 rounds them; ``"float32"``: as NumPy does
    addresses   whether the accesses' passes and sectors are counted
    strict      whether reads of shared memory that nobody wrote, misaligned accesses, and forgotten waits and fences
                raise (:class:`Unwaited`, :class:`Unfenced`: :mod:`kvlab.simt.order`)
    races       whether, if it is strict, a barrier that is missing between warps raises, too (:class:`Race`). Kernels
                may do without one on purpose, where both warps store the same values
    launch_before   for a launch that may begin while the one before still runs (``launch_pdl``): runs that one when
                the first thread waits for it, which is as late as it may be. A kernel that ends without such a wait
                raises :class:`Unwaited`: what waits for it does not wait for the launch before

    Accesses outside an argument raise :class:`~kvlab.memory.OutOfBounds`, with the line of the PTX and of the kernel;
    instructions that the machine does not have :class:`UnknownInstruction`, before anything runs. Torch and Triton must
    be there. ValueError for other targets and arguments.
    """
    from kvlab.triton_support.compile import compile_kernel, jit_function, options_of, signature_of

    _check(target, arithmetic)
    fn = jit_function(kernel)
    require(fn is not None, f"kernel is {shown(kernel)}", "a @triton.jit or @gluon.jit function")
    kernel = fn
    options = {name: named.pop(name) for name in options_of(target) if name in named and name not in kernel.arg_names}
    if len(args) > len(kernel.arg_names):
        raise ValueError(f"args are {len(args)}: {kernel.__name__} takes {len(kernel.arg_names)}")
    given = dict(zip(kernel.arg_names, args, strict=False))
    twice = sorted(set(given) & set(named))
    if twice:
        raise ValueError(f"{', '.join(twice)}: given by place and by name")
    given |= named
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(kernel.fn).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    given = {name: given.get(name, defaults.get(name)) for name in kernel.arg_names
             if name in given or name in defaults}
    missing = [name for name in kernel.arg_names if name not in given]
    unknown = sorted(set(named) - set(kernel.arg_names))
    if missing or unknown:
        raise ValueError(f"{kernel.__name__} takes {kernel.arg_names}; missing: {missing}, unknown: {unknown}")
    described = signature_of(kernel, **given)
    compiled = compile_kernel(kernel, target=target, **described, **options)
    constants = {p.name for p in kernel.params if p.is_constexpr}
    meta = iter(compiled.descriptors)
    leaves = [(path, _Described(value, next(meta, None)) if hasattr(value, "block_shape") else value)
              for name in kernel.arg_names if name not in constants
              for path, value in _leaves(name, given[name], described["constexprs"])]
    sizes = grid(given) if callable(grid) else grid
    return run_ptx(compiled.asm["ptx"], sizes, leaves, shared=compiled.shared, arithmetic=arithmetic,
                   addresses=addresses, strict=strict, races=races, contract=options.get("enable_fp_fusion", True),
                   launch_before=launch_before)


def _leaves(path: Any, value: Any, constants: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the run-time arguments in an argument, in the order of the PTX."""
    if path in constants:
        return
    if isinstance(value, tuple):
        head = path if isinstance(path, tuple) else (path,)
        for place, inner in enumerate(value):
            yield from _leaves((*head, place), inner, constants)
    else:
        name = path if isinstance(path, str) else f"{path[0]}{list(path[1:])}"
        yield name, value


def run_ptx(
    ptx: str, grid: Any, args: Sequence[Any], *, shared: int = 0, threads: int | None = None, arithmetic: str = "chip",
    addresses: bool = True, strict: bool = True, races: bool = False, contract: bool = True,
    launch_before: Callable[[], Any] | None = None,
) -> KernelRun:
    """Run the kernel of a PTX text on ``args``, one for each parameter, in order: arrays, numbers, and
    :class:`~kvlab.hardware.TmaDescriptor` for tensor maps.

    ``shared`` is in bytes a CTA, for the array whose size the launch says; ``threads`` of a CTA where the PTX does not
    require a number. ``contract``: whether a product that an addition alone uses is one fused operation with it, as
    ptxas makes it by default. Parameters past ``args`` are pointers to scratch memory of zeros. The rest as for
    :func:`run`.

    >>> x = np.arange(4, dtype=np.uint32)
    >>> ran = run_ptx(ADD_ONE, (1,), [x], threads=4)
    >>> x
    array([1, 2, 3, 4], dtype=uint32)
    >>> print(ran.table(by="ptx"))
    line  warps  wavefronts  ideal  conflicts  sectors  ideal  code
    9         1           0      0          0        1      1  ld.global.u32 %r2, [%rd3]
    11        1           0      0          0        1      1  st.global.u32 [%rd3], %r2
    >>> run_ptx(ADD_ONE, (1,), [x], threads=5)
    Traceback (most recent call last):
        ...
    kvlab.memory.OutOfBounds: argument 0: access of 4 bytes at address 1099511627792 is outside [1099511627776, \
1099511627792); at PTX line 9: `ld.global.u32 %r2, [%rd3]`
    """
    program = parse(ptx)
    _check(program.target, arithmetic)
    sizes = _grid(grid)
    lanes = program.threads or threads or 0
    if lanes < 1 or lanes > 1024:
        raise ValueError(f"threads is {threads!r}: must be 1 to 1024, where the PTX requires none")
    symbols, allocations, nbytes = symbols_of(program, shared)
    named = [a if isinstance(a, tuple) else (f"argument {i}", a) for i, a in enumerate(args)]
    tensor_maps: dict[int, TmaDescriptor] = {}
    parameters = _place(program, named, symbols, allocations, tensor_maps)
    start = time.perf_counter()
    code = Code(program, symbols, parameters, contract)
    trace = Trace(program, _arch(program.target), addresses)
    ctas, provisional = int(np.prod(sizes)), set(_provisional(program))
    together = max(1, _LANES // lanes)
    before = _Before(launch_before)
    with np.errstate(all="ignore"):
        for first in range(0, ctas, together):
            numbers = range(first, min(first + together, ctas))
            machine = SimtMachine(code, numbers, sizes, lanes, nbytes, allocations, tensor_maps, trace,
                                  arithmetic, strict, races, before)
            machine.run()
            provisional |= machine.provisional
    if launch_before is not None and not before.ran:
        raise Unwaited(f"{program.name} ends without a griddepcontrol.wait: what waits for it does not wait for the "
                       "launch before")
    seconds = time.perf_counter() - start
    facts = facts_of(program, trace, lambda at: code.block(at)[2])
    total = sum(lanes * (code.block(at)[2] - at) for at, lanes in trace.lanes.items())
    exact = arithmetic == "chip"
    return KernelRun(program.name, program.target, sizes, ptx, facts, total, seconds,
                     tuple(sorted(provisional)) if exact else ())


@dataclass
class _Before:
    """The launch before, run once."""

    launch: Callable[[], Any] | None
    ran: bool = False

    def __call__(self) -> None:
        if not self.ran and self.launch is not None:
            self.ran = True
            self.launch()


ADD_ONE = """.version 8.0
.target sm_80
.visible .entry add_one(.param .u64 add_one_param_0) {
  .reg .b32 %r<3>;
  .reg .b64 %rd<4>;
  ld.param.b64 %rd1, [add_one_param_0];
  mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd3, %r1, 4, %rd1;
  ld.global.u32 %r2, [%rd3];
  add.u32 %r2, %r2, 1;
  st.global.u32 [%rd3], %r2;
  ret;
}
"""


def _check(target: str, arithmetic: str) -> None:
    if not isinstance(target, str) or not target.startswith(("sm_80", "sm_86", "sm_89", "sm_90")):
        raise ValueError(f"target is {target!r}: must be sm_80, sm_86, sm_89 or sm_90")
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic is {arithmetic!r}: must be one of {', '.join(ARITHMETICS)}")


def _arch(target: str) -> str:
    return target.rstrip("a")


def _grid(grid: Any) -> tuple[int, int, int]:
    sizes = tuple(grid) if isinstance(grid, Sequence) else (grid,)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(n, int | np.integer) or n < 0 for n in sizes):
        raise ValueError(f"grid is {grid!r}: must be one to three integers from 0")
    x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True)
class _Described:
    """A TMA descriptor among the arguments, and the boxes that the compiler made of its blocks (None: pointers)."""

    value: Any
    boxes: Any


def _place(
    program: Program, args: list[tuple[str, Any]], symbols: dict[str, int], allocations: dict[int, Memory],
    tensor_maps: dict[int, TmaDescriptor],
) -> dict[str, bytes]:
    """The bytes of every parameter; arrays get addresses of their own among ``allocations``."""
    found: dict[str, bytes] = {}
    parameters = list(program.parameters)
    for name, value in args:
        if not parameters:
            raise ValueError(f"args are {len(args)}: {program.name} has {len(program.parameters)} parameters")
        parameter = parameters.pop(0)
        if isinstance(value, TmaDescriptor) and parameter.nbytes:
            tensor_maps[symbols[parameter.name]] = value
        elif isinstance(value, _Described):
            _place_descriptor(name, value, parameter, parameters, found, symbols, allocations, tensor_maps)
        elif isinstance(value, np.ndarray) or is_torch(value):
            found[parameter.name] = _allocate(name, value, allocations)[0].base.to_bytes(8, "little")
        else:
            found[parameter.name] = _number(name, parameter, value)
    for parameter in parameters:
        scratch, _ = _allocate("scratch memory", np.zeros(_SCRATCH, np.uint8), allocations)
        found[parameter.name] = scratch.base.to_bytes(8, "little")
    return found


def _allocate(name: str, value: Any, allocations: dict[int, Memory]) -> tuple[Memory, Any]:
    """The memory of an array, in a region of its own, and the array as NumPy's."""
    if on_gpu(value):
        raise ValueError(f"{name} is on a GPU: must be in CPU memory")
    view: Any = to_numpy(value) if is_torch(value) else value
    memory = Memory.over(view, name=name)
    region = max((n for n in allocations if n < GLOBALS), default=0) + 1
    memory.base, memory.space = (region << REGION) + _offset(value), AddressSpace.GLOBAL
    allocations[region] = memory
    return memory, view


def _place_descriptor(
    name: str, given: _Described, parameter: Parameter, rest: list[Parameter], found: dict[str, bytes],
    symbols: dict[str, int], allocations: dict[int, Memory], tensor_maps: dict[int, TmaDescriptor],
) -> None:
    """The parameters that a descriptor becomes: a tensor map, or a pointer with shape, strides and flags; behind these
    shape and strides."""
    memory, view = _allocate(name, given.value.base, allocations)
    sizes = [*given.value.shape, *given.value.strides]
    if parameter.nbytes:
        address = symbols[parameter.name]
        tensor_maps[address] = descriptor_over(memory, view, given.value, given.boxes)
    else:
        found[parameter.name] = memory.base.to_bytes(8, "little")
        flags = next(i for i, of in enumerate(rest[len(sizes) :]) if of.type != "u8")
        sizes = [*sizes, *[0] * flags, *sizes]
    for size in sizes:
        one = rest.pop(0)
        found[one.name] = _number(name, one, size)


def _offset(array: Any) -> int:
    """Bytes from the start of the allocation that an array is a view of: on a GPU that is aligned to 256 bytes and
    more."""
    if is_torch(array):
        return int(array.data_ptr() - array.untyped_storage().data_ptr()) % 256
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return int(array.ctypes.data - owner.ctypes.data) % 256


def _number(name: str, parameter: Parameter, value: Any) -> bytes:
    kind = parameter.type
    if parameter.nbytes or not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        raise ValueError(f"{name} is {shown(value)}: must be an array, a number or, for a tensor map, a TmaDescriptor")
    dtype = TYPES[kind]
    if dtype.kind in "iu" and isinstance(value, float | np.floating):
        if dtype.itemsize not in (4, 8):
            raise ValueError(f"{name} is {value!r}: must be an integer")
        return np.array(value, f"f{dtype.itemsize}").tobytes()
    if dtype.kind in "iu":
        return (int(value) % (1 << 8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
    return np.array(value, dtype).tobytes()


_NEAREST = ("lg2", "sin", "cos", "tanh", "sqrt", "rsqrt")
"""Functions whose bits were not recorded on a chip: here they are rounded to the nearest number."""


def _provisional(program: Program) -> Iterator[str]:
    for op in (instruction.op for instruction in program.instructions):
        if ("approx" in op and op[0] in _NEAREST) or (op[0] == "ex2" and op[-1] != "f32"):
            yield ".".join(op)
