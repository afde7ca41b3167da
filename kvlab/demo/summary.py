"""The demo's table: one line a layer and step."""

from __future__ import annotations

from .steps import ARCHS, Step

_ERRORS = (*ARCHS, "triton", "gpu", "model")
_NAMES = {"triton": "Triton", "gpu": "GPU"}


def _columns(steps_have_gpu: bool) -> tuple[str, ...]:
    return tuple(name for name in _ERRORS if name != "gpu" or steps_have_gpu)


def head(gpu: bool) -> str:
    """Two header lines."""
    errors = "".join(f"{_NAMES.get(name, name):>9}" for name in _columns(gpu))
    first = f"{'':18}{'largest error against float64':^{len(errors) + 9}}  {'KiB moved (sm_90)':^18}  "
    second = f"{'layer':>5}{'step':>5}{'keys':>7} {errors}{'allowed':>9}  {'DRAM>SMEM>regs':^18}  "
    first += f"{'wavefronts sm_90':^24}  {'wavefronts gfx950*':^24}  {'lockstep:'}"
    second += 2 * f"{'swizzled   plain   ideal':^24}  " + "first difference"
    return f"{first}\n{second}"


def line(step: Step, gpu: bool) -> str:
    """The line of a step."""
    errors = "".join(f"{step.errors[name]:9.1e}" if name in step.errors else f"{'-':>9}" for name in _columns(gpu))
    moved = step.traffic.get("sm_90")
    edges = f"{moved.moved['DRAM->SMEM'] / 1024:7.0f} > {moved.moved['SMEM->registers'] / 1024:7.0f}" if moved else "-"
    passes = "  ".join(f"{_passes(step, arch):>24}" for arch in ARCHS)
    start = f"{step.layer:5}{step.step:5}{step.keys:7} {errors}{step.allowed:9.1e}"
    return f"{start}  {edges:^18}  {passes}  {step.difference}"


def notes(steps: list[Step], gpu: str | None) -> list[str]:
    """Notes on the table's columns and its omissions."""
    said = [
        "allowed: 1e-5 for float32 storage, otherwise 1e-5 + 2x the error of softmax(q k^T scale) v by PyTorch in it",
        "model: the model's own output, computed before q, k and v were rounded to storage, so not held to the bound",
        "wavefronts: passes of shared memory over all CTAs; plain = the same accesses without the swizzle",
        "* provisional: no chip has confirmed the AMD rule",
        f"GPU: the compiled kernel on {gpu}" if gpu else "no GPU found: the kernel ran in Triton's interpreter only",
    ]
    left_out = {f"{arch}: not emulated: {reason}" for step in steps for arch, reason in step.notes.items()}
    return said + sorted(left_out)


def _passes(step: Step, arch: str) -> str:
    if arch not in step.traffic:
        return "-"
    t = step.traffic[arch]
    return "".join(f"{t.total(kind):8}" for kind in ("wavefronts", "unswizzled", "ideal"))
