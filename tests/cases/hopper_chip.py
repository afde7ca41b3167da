"""What the tests of Hopper's kernels share: where they run, a first launch that ends, the emulator beside the chip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.attention.tiles.online_softmax import OUTPUT_TIE

NO_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(NO_HOPPER, reason="a kernel for sm_90")]


def run_apart(program: str) -> None:
    """Run a program in a process of its own, for three minutes at most."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=180, env={**os.environ, "PYTHONPATH": path})


def assert_alike(
    emulated: tuple[Any, Any], on_chip: tuple[Any, Any], *, error: float = OUTPUT_TIE[0], lse_error: float | None = None
) -> None:
    """(out, lse) of the emulator, and of the chip as float32: ``error`` is a share of the largest output, ``lse_error``
    a bound, None for a 1e-5th of the largest.
    """
    (ours, our_lse), (chip, chip_lse) = emulated, on_chip
    assert np.abs(ours.astype(np.float32) - chip).max() <= error * np.abs(chip).max()
    assert (np.isneginf(our_lse) == np.isneginf(chip_lse)).all()
    seen = ~np.isneginf(chip_lse)
    bound = 1e-5 * np.abs(chip_lse[seen]).max() if lse_error is None else lse_error
    assert np.abs(our_lse - chip_lse)[seen].max() <= bound
