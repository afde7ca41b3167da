"""Compile a Triton kernel for a GPU that is not there, and read what the compiler made of it.

Works on any Linux machine: Triton's wheel carries the compilers and the disassembler. The process must not be an
interpreted one. Numbers come from the artefacts themselves: shared memory from Triton's metadata, registers and stack
from ``cuobjdump --dump-resource-usage`` or the AMD kernel descriptor, spills from ``ptxas -v`` or that descriptor,
instructions from the disassembly.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import multiprocessing
import pickle
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.triton_support.child import pickled
from kvlab.triton_support.interpreter import is_interpreted
from kvlab.triton_support.sass import jump_tables, unwritten
from kvlab.triton_support.versions import require, shares_amd_casts

#: our name of a target -> Triton's backend, architecture and warp size
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}

#: NumPy's and torch's names of element types -> Triton's
_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bool": "i1",
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for ``target``.

    ``asm`` holds the text of every stage (``ttir``, ``ttgir``, ``llir``, ``ptx`` or ``amdgcn``) and the binary
    (``cubin`` or ``hsaco``, bytes); ``shared`` is in bytes a CTA; ``num_warps`` counts the warps of specialised
    partitions too. ``descriptors`` are the boxes of the TMA descriptors among the arguments, in order: ``block_size``,
    ``swizzle`` (0 to 3) and more; none where the target has no TMA.
    """

    name: str
    target: str
    asm: Mapping[str, Any]
    shared: int
    num_warps: int
    descriptors: tuple[Mapping[str, Any], ...] = ()

    @functools.cached_property
    def sass(self) -> str:
        """The disassembly for an NVIDIA target."""
        return self._cuobjdump("--dump-sass")

    @functools.cached_property
    def instructions(self) -> Counter[str]:
        """Count of each instruction in the code: SASS names without modifiers, or whole AMD mnemonics."""
        if "cubin" in self.asm:
            return Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)", self.sass, re.M))
        return Counter(re.findall(r"^\s+((?:v|s|ds|buffer|global|flat|scratch)_\w+)", self.asm["amdgcn"], re.M))

    @property
    def sass_counts(self) -> Counter[str]:
        """:attr:`instructions` of an NVIDIA target, for instance ``sass_counts["LDSM"]`` (absent ones count 0)."""
        if "cubin" not in self.asm:
            raise ValueError(f"{self.name} was compiled for {self.target}, which has no SASS; see .instructions")
        return self.instructions

    @functools.cached_property
    def unwritten(self) -> list[str]:
        """The SASS instructions that read a uniform register which was not written: none, unless ptxas is at fault."""
        return unwritten(self.sass, self.jump_tables)

    @functools.cached_property
    def jump_tables(self) -> dict[int, list[int]]:
        """Targets of the branches through tables, by their addresses in the SASS."""
        return jump_tables(self._cuobjdump("--dump-elf"))

    @functools.cached_property
    def registers(self) -> int:
        """Registers a thread; on AMD vector registers, accumulation registers included."""
        return self._usage["REG"] if "cubin" in self.asm else self._descriptor("vgpr_count")

    @functools.cached_property
    def stack(self) -> int:
        """Bytes of local (AMD: scratch) memory a thread."""
        return self._usage["STACK"] if "cubin" in self.asm else self._descriptor("private_segment_fixed_size")

    @functools.cached_property
    def spills(self) -> int:
        """Spilled registers: on NVIDIA the bytes of all spill stores and loads, on AMD the number of vector
        registers."""
        if "cubin" not in self.asm:
            return self._descriptor("vgpr_spill_count")
        if not self.stack:  # what is spilled lies there: ptxas, which alone tells how often, need not run again
            return 0
        from triton.backends.nvidia.compiler import get_ptxas

        arch = re.search(r"^\.target (sm_(\d+)\w*)", self.asm["ptx"], re.M)
        assert arch is not None
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.ptx")
            source.write_text(self.asm["ptx"])
            command = [get_ptxas(int(arch[2])).path, "-v", f"--gpu-name={arch[1]}", "-o", f"{folder}/out", str(source)]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))

    @functools.cached_property
    def _usage(self) -> dict[str, int]:
        text = self._cuobjdump("--dump-resource-usage")
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}

    def _descriptor(self, key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", self.asm["amdgcn"])
        assert found is not None, key
        return int(found[1])

    def _cuobjdump(self, option: str) -> str:
        if "cubin" not in self.asm:
            raise ValueError(f"{self.name} was compiled for {self.target}: there is no cubin to look into")
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def jit_function(kernel: Any) -> Any:
    """The ``@triton.jit`` or ``@gluon.jit`` function beneath autotuning and heuristics; None if ``kernel`` is none."""
    while kernel is not None and not (hasattr(kernel, "arg_names") and hasattr(kernel, "params")):
        kernel = getattr(kernel, "fn", None)
    return kernel


@functools.cache
def options_of(target: str) -> list[str]:
    """Names of the compiler's options for a target, one of :data:`TARGETS`: ``num_warps``, ``maxnreg``, ..."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return [one.name for one in dataclasses.fields(make_backend(GPUTarget(*TARGETS[target])).parse_options({}))]


def compile_kernel(
    fn: Any, signature: Mapping[str, Any], constexprs: Mapping[str, Any] | None = None, target: str = "sm_90", *,
    divisible: Iterable[str] | None = None, num_warps: int = 4, num_stages: int = 2, **options: Any,
) -> Compiled:
    """Compile the ``@triton.jit`` function ``fn`` for ``target`` (one of :data:`TARGETS`), without a GPU.

    ``signature`` gives the type of every run-time argument (``"*bf16"``, ``"i32"``, ``"fp32"``, of a tuple a tuple of
    them), ``constexprs`` the value of the others. An element of a tuple is called by the argument's name and its place,
    ``("features", 3)``; one of type ``"constexpr"`` has its value in ``constexprs``. ``divisible`` names the arguments
    that are multiples of 16 (in bytes for pointers); all pointers if not given. Without it the compiler finds no wide
    or asynchronous loads. ``options`` are the backend's
    (``waves_per_eu=2``, ...). :func:`signature_of` derives all three from example arguments.

    A bad target, argument name or option raises ValueError, an interpreted process RuntimeError; the compiler's errors
    pass.
    """
    if target not in TARGETS:
        raise ValueError(f"target is {target!r}: must be one of {', '.join(TARGETS)}")
    if is_interpreted():
        raise RuntimeError("Triton is interpreted in this process (TRITON_INTERPRET=1) and cannot compile here")
    require()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place, known = GPUTarget(*TARGETS[target]), options_of(target)
    for option in options:
        if option not in known:
            raise ValueError(f"{option} is {options[option]!r}: {target} has no such option, must be one of {known}")
    while not hasattr(fn, "arg_names") or not hasattr(fn, "params"):  # autotuned, heuristics
        fn = fn.fn
    names, constants = list(fn.arg_names), dict(constexprs or {})
    pointers = [path for name in signature for path, kind in _leaves(name, signature[name]) if kind.startswith("*")]
    divisible = pointers if divisible is None else list(divisible)
    given = set(signature) | {name for name in constants if isinstance(name, str)}
    twice = sorted(set(signature) & set(constants))
    missing, unknown = sorted(set(names) - given), sorted(given - set(names))
    if missing or unknown or twice:
        raise ValueError(
            f"{fn.__name__} takes {names}; missing: {missing}, unknown: {unknown}, as value and as type: {twice}"
        )
    stray = sorted(str(name) for name in divisible if (name if isinstance(name, str) else name[0]) not in signature)
    if stray:
        raise ValueError(f"divisible {stray} are no run-time arguments of {fn.__name__}; those are {sorted(signature)}")
    source = _source_class(fn, ASTSource)(
        fn, {name: signature.get(name, "constexpr") for name in names},
        {_place(names, name): value for name, value in constants.items()},
        {_place(names, name): [["tt.divisibility", 16]] for name in divisible},
    )
    wanted = {"num_warps": num_warps, "num_stages": num_stages, **options}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = _cache_folder()
        build = functools.partial(triton.compile, source, target=place, options=wanted)
        if TARGETS[target][0] == "hip" and shares_amd_casts():
            _in_fork(build)  # fills the cache, from which the next line reads
        kernel = build()
        asm = {key: kernel.asm[key] for key in kernel.asm}
    boxes = tuple(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    return Compiled(fn.__name__, target, asm, kernel.metadata.shared, kernel.metadata.num_warps, boxes)


def _leaves(path: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """(path, leaf) of a value that may be a tuple: of such a one its name and the places in it."""
    if isinstance(value, tuple):
        head = path if isinstance(path, tuple) else (path,)
        for place, inner in enumerate(value):
            yield from _leaves((*head, place), inner)
    else:
        yield path, value


def _place(names: Sequence[str], path: Any) -> tuple[int, ...]:
    """Place of an argument, or of an element of it, among ``names``."""
    name, *rest = path if isinstance(path, tuple) else (path,)
    return (names.index(name), *rest)


def _in_fork(build: Callable[[], Any]) -> None:
    """Call ``build`` in a forked process; an exception there is raised here."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def work() -> None:
        try:
            build()
            theirs.send_bytes(b"")
        except Exception as error:
            theirs.send_bytes(pickled(error))

    process = fork.Process(target=work)
    process.start()
    theirs.close()
    try:
        said = ours.recv_bytes()
    except EOFError:
        said = pickle.dumps(RuntimeError("the process in which Triton compiled ended without a word"))
    process.join()
    if said:
        raise pickle.loads(said)


def _source_class(fn: Any, portable: Any) -> Any:
    """Class that describes a kernel to the compiler: Gluon has a class of its own."""
    if not fn.is_gluon():
        return portable
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def signature_of(fn: Any, **arguments: Any) -> dict[str, Any]:
    """``signature``, ``constexprs`` and ``divisible`` for :func:`compile_kernel`, as a launch with ``arguments``
    would have them.

    An argument is an array or tensor (of any device), a TMA descriptor, a number, a tuple of such, or a value of a
    ``tl.constexpr`` parameter. As at a launch, None and the integer 1 become constants and multiples of 16 are noted,
    except where the kernel says that it is not to be specialised.
    """
    constants: dict[Any, Any] = {}
    divisible: list[Any] = []
    constexprs = {p.name for p in fn.params if p.is_constexpr}
    general = {p.name for p in fn.params if p.do_not_specialize}

    def kind_of(path: Any, value: Any) -> Any:
        name = path[0] if isinstance(path, tuple) else path
        if isinstance(value, tuple):
            head = path if isinstance(path, tuple) else (path,)
            kinds = [kind_of((*head, place), inner) for place, inner in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        if value is None or (type(value) is int and value == 1 and name not in general):
            constants[path] = value
            return "constexpr"
        if hasattr(value, "block_shape"):
            element, block = _TYPES[str(value.base.dtype).removeprefix("torch.")], list(value.block_shape)
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            return f"tensordesc<{element}{block}{layout}>"
        if hasattr(value, "dtype"):
            address = value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data
            if address % 16 == 0:
                divisible.append(path)
            return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]
        if isinstance(value, bool):
            return "i1"
        if isinstance(value, int):
            if value % 16 == 0 and name not in general:
                divisible.append(path)
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, float):
            return "fp32"
        where = name if path == name else f"{name}{list(path[1:])}"
        raise ValueError(f"{where}={value!r}: must be an array, a number, None or the value of a constexpr")

    constants.update({name: value for name, value in arguments.items() if name in constexprs})
    signature = {name: kind_of(name, value) for name, value in arguments.items() if name not in constexprs}
    signature = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    return {"signature": signature, "constexprs": constants, "divisible": divisible}


@functools.cache
def _cache_folder() -> str:
    """Compiler cache of this process."""
    folder = tempfile.mkdtemp(prefix="kvlab-compile-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
