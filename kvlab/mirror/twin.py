"""Declaration of an operation's twins: kernel functions and the emulator functions that mirror them.

Standard library only, so that an operation's ``config.py`` may import it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def split_address(address: str, package: str | None = None) -> tuple[str, str]:
    """``("pkg.kernel", "attend")`` for ``"kernel:attend"`` in package ``pkg``; a dotted module is taken as absolute.

    >>> split_address("kernel:attend", "kvlab.attention.mha_decode")
    ('kvlab.attention.mha_decode.kernel', 'attend')
    >>> split_address("mine.kernels:attend", "kvlab.attention.mha_decode")
    ('mine.kernels', 'attend')
    """
    module, colon, function = address.partition(":")
    if not (module and colon and function):
        raise ValueError(f"{address!r} does not name a function; write 'module:function'")
    if package and "." not in module:
        module = f"{package}.{module}"
    return module, function


def module_file(module: str) -> str:
    """The source file of an importable module, found without importing it (its parent packages are imported)."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"module {module!r} is not importable: {error}") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"module {module!r} has no Python source file; a twin is checked from its source")
    return spec.origin


@dataclass(frozen=True)
class Twin:
    """A ``@triton.jit`` function and the NumPy function that mirrors it, each as ``"module:function"``.

    A module without a dot belongs to the operation's package; a dotted one is absolute. A warp-specialised kernel
    whose partitions are several functions lists them: ``"hopper:produce,consume"`` (checked, not run in lockstep).

    ``synonyms`` maps how one side spells a thing to how the other does: ``{"problem.batch": "batches"}``, expressions
    as source text; with them, if only ``{}``, the twins are compared statement by statement. ``held`` maps a helper to
    the names that one side passes to it and that the other side's machine holds: ``{"load_k": "key page slot"}``.

    >>> Twin("attend", kernel="kernel:attend", emulator="emulator:attend").name
    'attend'
    """

    name: str
    kernel: str
    emulator: str
    synonyms: Mapping[str, str] | None = None
    held: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split_address(self.kernel)
        split_address(self.emulator)

    @property
    def specialised(self) -> bool:
        """Tells whether the kernel's partitions are functions of their own."""
        return "," in self.kernel


@dataclass(frozen=True)
class Operation:
    """Twins with the two launch functions that run them on the same arguments.

    ``launch = (kernel side, emulator side)``: two functions with the same keyword arguments and the same results.
    ``tolerance`` maps an output's name to ``(value, reason)``, the value relative to the tensor's largest magnitude.

    >>> operation = Operation.load("mha_decode")
    >>> [twin.name for twin in operation.twins], operation.launch
    (['attend', 'hopper', 'merge'], ('kernel:launch', 'emulator:launch'))
    """

    twins: tuple[Twin, ...]
    launch: tuple[str, str] | None = None
    package: str | None = None
    tolerance: dict[str, tuple[float, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, op: str | Operation) -> Operation:
        """The operation that a package's ``config.py`` declares (``TWINS``, ``LAUNCH``, ``LOCKSTEP_TOLERANCE``).

        ``op`` is the name of a folder in ``kvlab.attention`` or the dotted name of any importable package."""
        if isinstance(op, Operation):
            return op
        module, package = cls._find_config(op)
        config: Any = importlib.import_module(module)
        twins = getattr(config, "TWINS", None)
        if not twins or not all(isinstance(twin, Twin) for twin in twins):
            raise ValueError(f"{module} declares no twins: TWINS is {twins!r}, must be a non-empty tuple of Twin")
        launch = getattr(config, "LAUNCH", None)
        return cls(tuple(twins), launch, package, dict(getattr(config, "LOCKSTEP_TOLERANCE", {})))

    @staticmethod
    def _find_config(op: str) -> tuple[str, str]:
        ours = (Path(__file__).parents[1] / "attention" / op / "config.py").is_file()
        package = f"kvlab.attention.{op}" if ours else op
        try:
            if importlib.util.find_spec(f"{package}.config"):
                return f"{package}.config", package
        except ModuleNotFoundError:
            pass
        raise ValueError(
            f"operation {op!r} is unknown: there is no {package}.config; name a folder of kvlab.attention or an "
            "importable package that has a config.py"
        )

    def pick(self, twin: str | None) -> tuple[Twin, ...]:
        """All twins, or the one called ``twin``."""
        chosen = tuple(t for t in self.twins if twin is None or t.name == twin)
        if not chosen:
            raise ValueError(f"twin={twin!r} is unknown; this operation has {', '.join(t.name for t in self.twins)}")
        return chosen

    def kernel(self, twin: Twin) -> tuple[str, str]:
        return split_address(twin.kernel, self.package)

    def emulator(self, twin: Twin) -> tuple[str, str]:
        return split_address(twin.emulator, self.package)
