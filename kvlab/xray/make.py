"""The way to an X-ray: types from a signature or from arguments, the compilation, the parts joined."""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.common.checks import count, is_integer, require, shown
from kvlab.triton_support.compile import TARGETS, Compiled, compile_kernel, jit_function, signature_of
from kvlab.xray.accesses import accesses, argument_values
from kvlab.xray.edges import allocations, edges
from kvlab.xray.llir import IrFunction, LaneValues, functions
from kvlab.xray.resources import Resources
from kvlab.xray.result import XRay
from kvlab.xray.ttgir import offsets, read

DIVISIBLE, ODD = 4096, 4099  #: what an integer argument is taken for that is a multiple of 16, or may be none


def xray(
    kernel: Any, signature_or_args: Mapping[str, Any] | Sequence[Any] | None = None, target: str = "sm_90", *,
    num_warps: int = 4, num_stages: int = 3, **options: Any,
) -> XRay:
    """X-ray of a kernel: what the compilers make of it, and what is slow in it; without a GPU and without a driver.

    kernel              a ``@triton.jit`` or ``@gluon.jit`` function, autotuned or with heuristics or not, or what
                        :func:`~kvlab.triton_support.compile.compile_kernel` returns
    signature_or_args   a value for each parameter, by name or in order: a type (``"*fp16"``, ``"i32"``, ``":16"``
                        behind it for a multiple of 16), or an example: an array, a tensor, a number, the value of a
                        constexpr. Pointers count as multiples of 16 bytes unless ``":1"`` is behind the type.
    target              sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, gfx942, gfx950
    num_warps, num_stages, options   as at a launch

    Addresses are followed for the first program and the first trip of each loop. An integer whose value is not given
    is taken for 4096, or 4099 where it may be no multiple of 16: ``XRay.assumed`` says so. What a kernel loads and then
    uses as an address counts as 0. ValueError for a target, a parameter or an option that there is none of, and for
    options of what is compiled already; what the compiler says of the kernel passes.

    >>> from kvlab.triton_support.stage_kernels import stage
    >>> types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "o_ptr": "*fp32", "tiles": "i32"}
    >>> found = xray(stage, {**types, "BM": 64, "BN": 32, "D": 64}, "sm_80")
    >>> [edge.ideal == edge.wavefronts > 0 for edge in found.edges if edge.operation == "ttg.local_load"]
    [True, True, True]
    """
    start, remake = time.perf_counter(), None
    given: dict[str, list[int | None]] = {}
    if isinstance(kernel, Compiled):
        stray = {"signature_or_args": signature_or_args} if signature_or_args is not None else options
        for name, value in stray.items():
            raise ValueError(f"{name} is {shown(value)}: must be left out, {kernel.name} is compiled already")
        made, fn = kernel, None
    else:
        if target not in tuple(TARGETS):
            raise ValueError(f"target is {target!r}: must be one of {', '.join(TARGETS)}")
        warps = is_integer(num_warps) and num_warps in (1, 2, 4, 8, 16, 32)
        require(num_warps is None or warps, f"num_warps is {shown(num_warps)}", "a power of two from 1 to 32")
        if num_stages is not None:
            count("num_stages", num_stages)
        fn = jit_function(kernel)
        require(fn is not None, f"kernel is {kernel!r}", "a @triton.jit or @gluon.jit function, or a Compiled")
        wanted, given = _wanted(fn, signature_or_args)
        remake = functools.partial(
            _again, kernel, signature_or_args, target=target, num_warps=num_warps, num_stages=num_stages, **options
        )
        made = compile_kernel(fn, target=target, num_warps=num_warps, num_stages=num_stages, **wanted, **options)
    compiled = time.perf_counter()
    module = read(offsets(made))
    function = functions(made.asm["llir"])[0]
    values, assumed = _values(function, fn, made, given)
    threads = max(module.warps, module.most_warps) * module.warp_size
    lanes = LaneValues(function, values, threads, module.warp_size)
    unread: list[str] = []
    found = accesses(function, lanes, made.target, unread, made.asm.get("ptx", ""))
    pieces = allocations(module, made.shared)
    ways = edges(module, found, pieces, made.target)
    held = {(access.place, access.instruction) for edge in ways for access in edge.accesses}
    spills = made.spills if made.stack else 0
    resources = Resources(made.target, made.registers, spills, made.stack, made.shared, made.num_warps)
    result = XRay(
        made.name, made.target, made, module, function, resources, tuple(ways), tuple(pieces),
        tuple(access for access in found if (access.place, access.instruction) not in held), assumed, (0.0, 0.0),
        _source(fn), remake, tuple(unread),
    )
    _ = result.findings, result.histogram
    object.__setattr__(result, "seconds", (compiled - start, time.perf_counter() - compiled))
    return result


def _again(kernel: Any, signature_or_args: Any, **options: Any) -> XRay:
    """Another X-ray; an option of None is left out."""
    return xray(kernel, signature_or_args, **{name: value for name, value in options.items() if value is not None})


def _wanted(
    fn: Any, given: Mapping[str, Any] | Sequence[Any] | None
) -> tuple[dict[str, Any], dict[str, list[int | None]]]:
    """Arguments of the compilation, and of each argument at run time the numbers in it, None for what is none."""
    names = list(fn.arg_names)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) <= len(names)
        require(listed, f"signature_or_args is {shown(given)}", f"a mapping, or a list of at most {names}")
        given = dict(zip(names, given, strict=False))
    values = dict(given)
    for parameter in fn.params:
        if parameter.name not in values and parameter.has_default:
            values[parameter.name] = parameter.default
    missing, stray = [n for n in names if n not in values], [n for n in values if n not in names]
    if missing or stray:
        raise ValueError(
            f"signature_or_args is {dict(given)!r}: must have {names}; missing: {missing}, unknown: {stray}"
        )
    constexprs = {p.name for p in fn.params if p.is_constexpr}
    kinds = {name: value for name, value in values.items() if isinstance(value, str) and name not in constexprs}
    examples = {name: value for name, value in values.items() if name not in kinds}
    wanted = signature_of(fn, **examples)
    for name, kind in kinds.items():
        base, _, multiple = kind.partition(":") if not kind.startswith("tensordesc") else (kind, "", "")
        fits = _is_type(base) and multiple in ("", "1", "16")
        require(fits, f"{name} is {kind!r}", "a type as '*fp16', 'i32' or 'i32:16'")
        wanted["signature"][name] = base
        if multiple == "16" or (base.startswith("*") and multiple != "1"):
            wanted["divisible"].append(name)
    return wanted, {name: list(_numbers(kind, examples.get(name))) for name, kind in wanted["signature"].items()}


def _numbers(kind: Any, value: Any) -> Iterator[int | None]:
    """The number in each leaf of an argument that is one at run time; None for another, or one that is not given."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, value, strict=True):
            yield from _numbers(inner, part)
    elif kind != "constexpr":
        yield value if type(value) is int else None


def _is_type(kind: str) -> bool:
    """Tells whether Triton knows a type by this name."""
    import triton.language as tl

    try:
        tl.str_to_ty(kind, None)
    except (KeyError, ValueError, IndexError):
        return False
    return True


def _values(
    function: IrFunction, fn: Any, made: Compiled, given: Mapping[str, Sequence[int | None]]
) -> tuple[list[int], dict[str, int]]:
    """A value for each argument of the compiled function, and those that were assumed, by name."""
    import re

    head = re.search(r"tt\.func public @[\w.$-]+\((.*?)\) attributes", made.asm["ttgir"])
    texts = re.findall(r"%([\w.$-]+): ([^%]*)", head[1]) if head else []
    values, assumed = {}, {}
    seen: Counter[str] = Counter()
    for place, (text, kind) in enumerate(texts[: len(function.arguments)]):
        told = re.search(r'loc\("(\w+)"', kind)
        name = told[1] if told else text
        leaf, leaves = seen[name], given.get(name, ())
        seen[name] += 1
        number = leaves[leaf] if leaf < len(leaves) else None
        if kind.startswith(("!tt.ptr", "!tt.tensordesc")):
            aligned = "divisibility" in kind
            values[place] = ((place + 1) << 40) + (0 if aligned or not kind.startswith("!tt.ptr") else 4)
        elif number is not None:
            values[place] = number
        elif re.match(r"i\d+", kind):
            values[place] = DIVISIBLE if "divisibility = 16" in kind else 1 if kind.startswith("i1 ") else ODD
            assumed[f"{name}[{leaf}]" if len(leaves) > 1 else text] = values[place]
    return argument_values(function, values), assumed


def _source(fn: Any) -> dict[int, str]:
    """The lines of the kernel's file, by number; none where there is no source."""
    if fn is None:
        return {}
    try:
        lines, first = inspect.getsourcelines(fn.fn)
    except (OSError, TypeError):
        return {}
    return dict(enumerate((line.rstrip("\n") for line in lines), first))
