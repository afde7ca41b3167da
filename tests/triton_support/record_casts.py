"""Record what compiled casts give on this machine's GPU: ``python tests/triton_support/record_casts.py OUT.json``."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys

import interpreted_kernels
import numpy as np
import torch
import triton

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def inputs() -> np.ndarray:
    """float32 values that casts get wrong: ties, their neighbours, overflow, subnormals, infinity, NaN; random ones."""
    rng = np.random.default_rng(2026)
    chosen = []
    for name in FORMATS:
        dtype = getattr(torch, name)
        bits = rng.choice(2 ** (8 * dtype.itemsize), 100, replace=False)
        low = torch.from_numpy(bits).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype).double()
        high = torch.from_numpy(bits + 1).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype).double()
        tie = ((low + high) / 2).float().numpy()
        chosen += [tie, np.nextafter(tie, np.float32(np.inf)), np.nextafter(tie, np.float32(-np.inf))]
    limits = [
        240,
        448,
        464,
        479,
        480,
        500,
        57344,
        61440,
        61441,
        65504,
        65519,
        65520,
        3.3895e38,
        3.4e38,
        1e-45,
        1e-40,
        np.inf,
    ]
    chosen.append(np.float32([0.0, -0.0, np.nan, -np.nan, *limits, *(-x for x in limits)]))
    chosen.append(rng.integers(0, 2**32, 400, dtype=np.uint32).view(np.float32))
    return np.concatenate(chosen)


def main(path: str) -> None:
    x = inputs()
    gpu = torch.from_numpy(x).cuda()
    integers = np.random.default_rng(1).integers(-(2**31), 2**31, 200).astype(np.int32)
    out = {name: interpreted_kernels.cast(gpu, name) for name in FORMATS}
    out |= {f"{name} rtz": interpreted_kernels.cast(gpu, name, "rtz") for name in FORMATS[:2]}
    out["int32 bfloat16"] = interpreted_kernels.cast(torch.from_numpy(integers).cuda(), "bfloat16")
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    record = {
        "origin": {
            "what": "bits of Triton casts, compiled and run on the GPU; hexadecimal, little endian",
            "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
            "versions": {"triton": triton.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "date": datetime.date.today().isoformat(),
            "command": "python tests/triton_support/record_casts.py OUT.json",
        },
        "float32": x.tobytes().hex(),
        "int32": integers.tobytes().hex(),
        **{name: t.cpu().view(torch.uint8).numpy().tobytes().hex() for name, t in out.items()},
    }
    with open(path, "w") as file:
        json.dump(record, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
