"""Version of the installed Triton, and the tested ones.

Names that differ between the releases are looked up where they are needed by asking for the name; what a release is
asked for by number lies here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform

#: the releases that the tests run with: the oldest, the one that torch 2.13 names, the newest
TESTED = ("3.6.0", "3.7.1", "3.9.0")
OLDEST = TESTED[0]

#: the releases with which Gluon kernels are used, and those with which heads of 256 do not spill registers
GLUON = ("3.6.0", "3.7.1")
GLUON_WIDE = ("3.6.0",)


def _number(version: str) -> tuple[int, ...]:
    """
    >>> _number("3.10.0+git1a2b") > _number("3.9.1")
    True
    """
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


@functools.cache  # every call of an operation asks
def installed() -> str | None:
    """The version of the Triton that an import would load, None without one. Does not import it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache  # every call of an operation asks
def missing() -> tuple[str, ...]:
    """Names of torch and triton that an import would not find. Imports neither."""
    return tuple(name for name in ("torch", "triton") if importlib.util.find_spec(name) is None)


def hint() -> str:
    """Remedy for a Triton that is not there, on this system.

    >>> hint()
    "pip install -e '.[kernels]', in kvlab's own folder"
    """
    if platform.system() == "Linux":
        return "pip install -e '.[kernels]', in kvlab's own folder"
    return "Triton is made for Linux; NumPy arrays and torch's CPU tensors go to the emulator and the reference here"


def require() -> str:
    """The installed version; ImportError when torch or Triton is missing, or Triton older than :data:`OLDEST`. Newer
    ones are let pass."""
    version = installed()
    if version is None or missing():
        what = "Triton" if version is None or "triton" in missing() else "torch"
        raise ImportError(f"{what} is not installed; kvlab's kernels need it: {hint()}")
    if _number(version) < _number(OLDEST):
        raise ImportError(f"Triton {version} is installed; kvlab needs {OLDEST} or newer, tested: {', '.join(TESTED)}")
    return version


def has_smem_reinterpret() -> bool:
    """Tells whether Gluon's view of shared memory is called ``reinterpret`` (3.9.0), not ``_reinterpret``."""
    from triton.experimental.gluon import language as gl

    return hasattr(gl.shared_memory_descriptor, "reinterpret")


def holds_wgmma_rows() -> bool:
    """Tells whether the installed Triton keeps 64 rows of 512 columns in registers without spills: those before 3.9
    (True without one).
    """
    version = installed()
    return version is None or _number(version) < (3, 9)


def shares_amd_casts() -> bool:
    """Tells whether the installed Triton casts from e4m3, for the life of a process, as the first AMD GPU that it
    compiled for wants it: 3.6 does, and then gives gfx942 instructions that only gfx950 has.
    """
    version = installed()
    return version is not None and _number(version) < (3, 7)


def gluon_lacks(*, wide: bool = False) -> str | None:
    """Reason why Hopper's Gluon kernels are not used with the installed Triton: its names are not settled, and with
    3.9.0 the tiles of three consumers spill registers. None with the releases of :data:`GLUON`; ``wide`` asks for
    :data:`GLUON_WIDE`.
    """
    version, releases = installed(), GLUON_WIDE if wide else GLUON
    fits = version is not None and _number(version) in {_number(one) for one in releases}
    return None if fits else f"Triton {version}; its Gluon is used with {' and '.join(releases)}"
