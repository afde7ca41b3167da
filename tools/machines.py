"""docs/machines.md, from the table of CTA models and from what is known of GPUs.

    python tools/machines.py    # writes it; tests/attention/machines/test_table.py says when it is not up to date
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvlab.attention.machines import MACHINES, Machine
from kvlab.attention.machines.gpu import converts_e4m3, family, multiplies_e4m3, shared_limit
from kvlab.attention.machines.table import LISTED
from kvlab.attention.mha_decode.hopper_cta import HopperDecodeCTA
from kvlab.attention.mha_prefill.hopper_cta import HopperPrefillCTA
from kvlab.attention.mla_decode.hopper_cta import HopperMLACTA
from kvlab.hardware.arch_table import ARCHS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "machines.md"

HOPPER = (
    Machine(("mha_prefill",), ("sm_90",), ("16 bits", "e4m3"), HopperPrefillCTA),
    Machine(("mha_decode",), ("sm_90",), ("16 bits", "e4m3"), HopperDecodeCTA),
    Machine(("mla_decode",), ("sm_90",), ("16 bits",), HopperMLACTA),
)

HEAD = """\
# Machines

`arch=` of an operation says whose CTA the emulator computes. `python tools/machines.py` makes this page from
`MACHINES` in `kvlab/attention/machines/table.py`, of which `choose(arch, dtype, operation)` gives a row: where two rows
take a tile, the upper one. What no row takes is refused there as well, by `check_emulated`.

`kv_store` and `merge_states` have no CTA model: they are emulated on every architecture of
`kvlab/hardware/arch_table.py`. How to add a machine: [recipes](recipes.md).

## What is emulated
"""

MIDDLE = """
With `backend="hopper"`, the twins of the kernels that are written for sm_90:
"""

GATHERED = """
With `indices`, lists of slots instead of pages, besides:
"""

GPUS = """
## What runs on a GPU

The portable kernel, with tiles of the GPU's own or of one that multiplies as it does (`family` in
`kvlab/attention/machines/gpu.py`), chosen by `choose_config` of each operation's `config.py`. On sm_90 calls that
Hopper's kernels can do go to them.
"""


def page() -> str:
    """The whole page."""
    gpus = ["| GPU | tiles of | shared memory of a CTA | e4m3 is |", "|---|---|---|---|"]
    for arch in ARCHS:
        e4m3 = "multiplied" if multiplies_e4m3(arch) else "converted" if converts_e4m3(arch) else "not taken"
        gpus.append(f"| {arch} | {family(arch)} | {shared_limit(arch) // 1024} KiB | {e4m3} |")
    gathered = [GATHERED, *_table(row for row in LISTED if row not in MACHINES)]
    return "\n".join([HEAD, *_table(MACHINES), MIDDLE, *_table(HOPPER), *gathered, GPUS, *gpus, ""])


def _table(rows: Iterable[Machine]) -> list[str]:
    heads = "arch", "K and V", "operation", "takes", "CTA", "K and V come by", "P between the products"
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        takes = [f"tiles from {row.rows} query rows"] if row.rows else []
        takes += [f"{row.columns.what} {row.columns.words}"] if row.columns else []
        cta = f"[{row.cta.__name__}](../{row.cta.__module__.replace('.', '/')}.py)"
        operations = ", ".join(f"`{name}`" for name in row.operations)
        cells = ", ".join(row.archs), ", ".join(row.kinds), operations, ", ".join(takes) or "all", cta
        lines.append(f"| {' | '.join((*cells, row.buffer, row.p_path))} |")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
