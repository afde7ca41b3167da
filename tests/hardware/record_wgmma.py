"""Record where this machine's wgmma finds its operands: ``python tests/hardware/record_wgmma.py OUT.json.gz``.

Every 16-bit element of shared memory holds its number, the other operand is an identity, and the product tells which
elements the instruction took. A GPU of compute capability 9.0, torch and Triton (for its assembler) are needed.
"""

from __future__ import annotations

import ctypes
import datetime
import gzip
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

NUMBERED = 32768  # bytes of numbered elements; behind them stands the identity: 64 x 16, K-major, not swizzled
SHARED = NUMBERED + 4096
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def kernel(trans_a: int, trans_b: int) -> str:
    """PTX: bytes to shared memory, one wgmma through two descriptors, the accumulator out."""
    accumulators = [f"%f{i}" for i in range(32)]
    return f"""
.visible .entry probe{trans_a}{trans_b}(.param .u64 src, .param .u64 out, .param .u64 da, .param .u64 db)
{{
  .reg .pred %p<3>; .reg .b32 %r<16>; .reg .b64 %rd<16>; .reg .f32 %f<32>;
  ld.param.u64 %rd1, [src]; ld.param.u64 %rd2, [out]; ld.param.u64 %rd3, [da]; ld.param.u64 %rd4, [db];
  cvta.to.global.u64 %rd1, %rd1; cvta.to.global.u64 %rd2, %rd2;
  mov.u32 %r2, smem; mov.u32 %r3, %tid.x; mov.u32 %r4, %r3;
COPY:
  setp.ge.u32 %p1, %r4, {SHARED // 16};
  @%p1 bra COPIED;
  mul.wide.u32 %rd5, %r4, 16; add.s64 %rd6, %rd1, %rd5;
  ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%rd6];
  shl.b32 %r5, %r4, 4; add.u32 %r5, %r5, %r2;
  st.shared.v4.u32 [%r5], {{%r6, %r7, %r8, %r9}};
  add.u32 %r4, %r4, 128;
  bra COPY;
COPIED:
  fence.proxy.async;
  bar.sync 0;
  shr.u32 %r10, %r2, 4; cvt.u64.u32 %rd7, %r10;
  add.s64 %rd3, %rd3, %rd7; add.s64 %rd4, %rd4, %rd7;
  {" ".join(f"mov.f32 {f}, 0f00000000;" for f in accumulators)}
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16
    {{{", ".join(accumulators)}}}, %rd3, %rd4, 0, 1, 1, {trans_a}, {trans_b};
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  mul.wide.u32 %rd8, %r3, 128; add.s64 %rd9, %rd2, %rd8;
  {" ".join(f"st.global.f32 [%rd9+{4 * i}], {f};" for i, f in enumerate(accumulators))}
  ret;
}}
"""


class Probe:
    """The kernels of this process, and where one descriptor leads."""

    def __init__(self) -> None:
        text = ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
        text += "".join(kernel(a, b) for a, b in itertools.product((0, 1), repeat=2))
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "probe.ptx"), Path(folder, "probe.cubin")
            source.write_text(text)
            subprocess.run([get_ptxas(90).path, "-arch=sm_90a", str(source), "-o", str(target)], check=True)
            image = target.read_bytes()
        torch.zeros(1, device="cuda")  # makes the context
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(self.module), image))
        number = np.arange(NUMBERED // 2)
        identity = np.zeros((SHARED - NUMBERED) // 2, np.float16)
        k = np.arange(16)
        identity[(k // 8 * 256 + k % 8 * 16 + k // 8 * 128) // 2 + k % 8] = 1  # LBO 128, SBO 256
        halves = (number % 2048, number // 2048)  # which float16 holds exactly
        self.sources = [torch.from_numpy(np.concatenate([h.astype(np.float16), identity])).cuda() for h in halves]
        self.out = torch.zeros(128, 32, device="cuda")

    def check(self, code: int) -> None:
        if code:
            raise SystemExit(f"CUDA error {code}")

    def product(self, source: torch.Tensor, a: int, b: int, trans: tuple[int, int]) -> np.ndarray:
        """``[64, 64]``: A through descriptor ``a`` times B through ``b``."""
        function = ctypes.c_void_p()
        name = f"probe{trans[0]}{trans[1]}".encode()
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), self.module, name))
        values = [ctypes.c_uint64(v) for v in (source.data_ptr(), self.out.data_ptr(), a, b)]
        pointers = (ctypes.c_void_p * 4)(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
        self.check(self.cuda.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, SHARED, None, pointers, None))
        t, r = np.arange(128)[:, None], np.arange(32)
        full = np.empty((64, 64), np.float32)
        full[t // 32 * 16 + t % 32 // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2] = self.out.cpu()
        return full

    def addresses(
        self, operand: str, major: str, start: int, leading: int, stride: int, mode: str, base_offset: int
    ) -> np.ndarray:
        """``[64, 16]`` byte addresses, counted from shared memory's first byte (a multiple of 1024)."""
        tested = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | MODES[mode] << 62
        identity = NUMBERED >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
        transposed = int(major == "MN")
        found = []
        for source in self.sources:
            if operand == "A":
                found.append(self.product(source, tested, identity, (transposed, 0))[:, :16])
            else:
                found.append(self.product(source, identity, tested, (0, transposed))[:16].T)
        return (found[0] + 2048 * found[1]).astype(np.int64) * 2


def cases() -> list[tuple[str, str, int, int, int, str, int]]:
    """(operand, major, start, LBO, SBO, swizzle, base offset)."""
    chosen: list[tuple[str, str, int, int, int, str, int]] = []
    for mode, width in (("128B", 128), ("64B", 64), ("32B", 32)):
        for row, step, base in itertools.product(range(8), (0, 32, 64, 96), range(8)):
            chosen.append(("A", "K", 4096 + 128 * row + step, 16, 8 * width, mode, base))
        for row, base in itertools.product(range(8), range(8)):
            start = 4096 + 128 * row
            chosen.append(("B", "K", start, 16, 8 * width, mode, base))
            chosen.append(("A", "K", start, 16, 8 * width + 1024, mode, base))
            chosen += [(operand, "MN", start, 4096, 2048, mode, base) for operand in "AB"]
            chosen.append(("A", "MN", start, 1024, 3072, mode, base))
        chosen += [("A", "K", start, 16, 8 * width, mode, 0) for start in (4112, 4144, 4240)]
        chosen += [("A", "K", 4096, leading, 8 * width, mode, 0) for leading in (0, 512, 4096)]
    for operand, major in itertools.product("AB", ("K", "MN")):
        for leading, stride in ((128, 256), (2048, 128), (1024, 2048), (128, 2048)):
            for start, base in ((4096, 0), (4112, 0), (4240, 0), (4096, 3)):
                chosen.append((operand, major, start, leading, stride, "none", base))
    return chosen


def main(path: str) -> None:
    probe = Probe()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    origin = {
        "what": "byte addresses [64 mn, 16 k] of an operand of one wgmma.m64n64k16.f16, from shared memory's start, "
        "by its descriptor; the first 16 digits of the sha256 of each int32 table, the table itself of every 16th",
        "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "versions": {"triton": triton.__version__, "torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
        "command": "python tests/hardware/record_wgmma.py OUT.json.gz",
    }
    found = []
    for number, case in enumerate(cases()):
        table = probe.addresses(*case).astype("<i4")
        record = {"descriptor": case, "sha256": hashlib.sha256(table.tobytes()).hexdigest()[:16]}
        found.append(record if number % 16 else {**record, "table": table.ravel().tolist()})
    fields = ["operand", "major", "start", "leading", "stride", "swizzle", "base_offset"]
    with gzip.open(path, "wt") as file:
        json.dump({"origin": origin, "descriptor": fields, "cases": found}, file)
    print(len(found), "descriptors")


if __name__ == "__main__":
    main(sys.argv[1])
