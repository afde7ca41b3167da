"""Speed of the machine that runs compiled kernels without a GPU, in lane-instructions a second.

    python benchmarks/simt.py

kvlab's decode and prefill as a launch on an H100 has them (``chip_bits.py``), for sm_80: with the chip's arithmetic and
all accesses counted, with NumPy's and none counted. A line a run; compilation is not in it.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from chip_bits import CALLS

from kvlab.common.arrays import to_torch
from kvlab.simt import run


class _Caught:
    """In place of a kernel: ``kernel[grid](**arguments)`` keeps both."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.launch = fn, ((), {})

    def __getitem__(self, grid: Any) -> Any:
        def keep(*args: Any, **named: Any) -> None:
            self.launch = grid, dict(zip(self.fn.arg_names, args, strict=False)) | named
        return keep


def main() -> None:
    for name in ("decode-triton-bf16", "prefill-triton-bf16"):
        call = next(call for call in CALLS if str(call) == name)
        home, arrays, named = call.launched()
        module: Any = importlib.import_module(f"{home}kernel")
        module.attend = caught = _Caught(module.attend)
        tensors = [to_torch(x) if isinstance(x, np.ndarray) else x for x in arrays]
        module.launch(*tensors, **named, out=to_torch(call.output(arrays)))
        grid, arguments = caught.launch
        for options in ({"arithmetic": "chip"}, {"arithmetic": "float32", "addresses": False}):
            ran = run(caught.fn, grid, target="sm_80", **arguments, **options)
            print(f"{name} {options['arithmetic']}: {ran.lane_instructions} lane-instructions in {ran.seconds:.2f} s, "
                  f"{ran.rate:.3g} a second", flush=True)


if __name__ == "__main__":
    main()
