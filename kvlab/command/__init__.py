"""The command ``kvlab``: layouts drawn and counted, calls explained, kernels checked, from a shell.

``kvlab --help`` lists what it does. A subcommand prints one result to the standard output, with ``--json`` as JSON, and
ends with 0, with 1 where the answer is no (conflicts, a difference, something that does not work), with 2 for bad input
or a missing package; errors are one line on the standard error. It needs the extra ``command`` (typer), which ``import
kvlab`` does not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]
REFUSED = (
    ValueError, TypeError, IndexError, OSError, ImportError, MemoryError, RecursionError, SyntaxError,
)
"""What bad input raises: one line on the standard error."""


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Ends with SystemExit, whose code is 0, 1 or 2.

    >>> main(["conflicts", "16x64", "--dtype", "bf16", "--access", "ldmatrix.x4", "--json"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    SystemExit: 1
    """
    try:
        app = importlib.import_module("kvlab.command.app").app
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("kvlab"):
            raise
        print(f"kvlab: needs {missing.name}: pip install -e '.[command]', in kvlab's own folder", file=sys.stderr)
        sys.exit(2)
    try:
        app(args=None if argv is None else list(argv), prog_name="kvlab")
    except REFUSED as error:
        print(f"kvlab: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
