"""``python -m kvlab.demo``: decode captured steps of a model with every sibling, print a table, write a page."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvlab.data import Capture, load_capture, load_smollm2
from kvlab.data.capture import SCHEMA
from kvlab.demo import summary as table
from kvlab.triton_support.versions import hint, missing

from .page import write_page
from .steps import Step, decode, gpu_name, paged_cache


def main(argv: list[str] | None = None) -> int:
    """The command line. 0 if every sibling agrees, 1 if not, 2 for bad input or missing packages."""
    options = _parser().parse_args(argv)
    if missing():
        print(f"kvlab demo: needs {' and '.join(missing())}: {hint()}", file=sys.stderr)
        return 2
    try:
        capture = load_capture(options.input) if options.input else load_smollm2()
        options.output.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before the work
        return _run(capture, options.page_size, options.output)
    except (ValueError, OSError, MemoryError) as error:
        print(f"kvlab demo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.demo",
        description="Follow a KV cache from DRAM through shared memory into registers, next to the production kernel.",
        epilog=f"FILE.npz holds\n\n{SCHEMA}", formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", metavar="FILE.npz", help="your own q, k, v instead of the embedded SmolLM2 capture")
    parser.add_argument(
        "--output", metavar="DIR", default="demo", type=Path, help="where index.html goes (default: demo)"
    )
    parser.add_argument("--page-size", metavar="N", default=16, type=_positive, help="tokens of a page (default: 16)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _run(capture: Capture, page_size: int, output: Path) -> int:
    started, gpu = time.monotonic(), gpu_name()
    layers = ", ".join(map(str, capture.layers))
    heads = f"{capture.query_heads}/{capture.kv_heads} heads x {capture.head_dim} {capture.dtype}"
    print(f"kvlab: {capture.metadata.get('model', 'your capture')}")
    tokens = f"{capture.prompt_tokens} prompt tokens, {capture.decode_steps} decode steps"
    print(f"kvlab: layers {layers}; {tokens}; {heads}")
    pool = paged_cache(capture, page_size)
    print(f"kvlab: {pool!r}, pages shuffled, unused slots NaN")
    print("kvlab: each step: float64 reference, emulator (sm_90, gfx950), Triton kernel, and both in lockstep\n")
    print(table.head(bool(gpu)), flush=True)
    steps: list[Step] = []
    for step in decode(capture, pool):
        steps.append(step)
        print(table.line(step, bool(gpu)), flush=True)
    print("\n" + "\n".join(table.notes(steps, gpu)))
    page = write_page(output, capture, pool, steps, gpu)
    ok = all(step.ok for step in steps)
    verdict = "every sibling is within its bound and no step differs" if ok else "NOT all siblings agree, see above"
    print(f"\nkvlab: {verdict}; {page} written; {time.monotonic() - started:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
