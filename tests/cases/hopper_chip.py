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
from prefill_cases import Inputs
from yardsticks import assert_accurate

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


def assert_right(x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The lse to float32's rounding; with a softcap to tanh's 2^-11 on the chip. Of e4m3 to that of scores summed in 14
    digits, as wgmma does.
    """
    fp8 = x.case.dtype == "fp8"
    exact, loose = x.exact()[1], x.case.softcap > 0 or fp8
    if fp8:
        _, exact = x.call(return_lse=True, backend="hopper", arithmetic="chip")
    assert_accurate(x, out.cpu(), None if loose else lse.cpu())
    seen, found = ~np.isneginf(exact), lse.cpu().numpy()
    assert (np.isneginf(found) == ~seen).all()
    error = x.case.softcap * 2.0**-11 + (1e-4 if x.case.softcap else 1e-5 * max(1, np.abs(exact[seen]).max()))
    assert not loose or np.abs(found[seen] - exact[seen]).max() <= error
