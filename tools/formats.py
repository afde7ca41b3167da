"""docs/formats.md, from the catalogue of formats.

    python tools/formats.py    # writes it; tests/formats/test_page.py says when it is not up to date
"""

from __future__ import annotations

from pathlib import Path

from kvlab.formats import CATALOGUE, STORED, known_format

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"

HEAD = """\
# Formats of KV caches

Which byte of a cache holds which element, as data: `kvlab.formats`. A format is a line of text; `Format.parse` reads
it, `Format.print` writes it, `encode` and `decode` go from values to bytes and back, `draw` shows a page or a row.

```python
from kvlab.formats import Format, known_format

row = known_format("mla.656", pages=4, page_size=64)
stored = row.encode(latent, rope)          # uint8 [row.nbytes]
row.where("rope", page=1, slot=2, dim=3)   # a byte
row.at(540)                                # what lies there, in words
row.draw(row=True)
```

Formats of 4 bits, [kvlab.nvfp4](#nvfp4-rows), [kvlab.int4](#int4-rows) and [kvlab.uint4](#uint4-rows), are written by
`kv_store_paged` and read by `mha_decode_paged` and `attend_paged`: values and scales are stored to the bit as `encode`
gives them; so are [flashinfer.nvfp4](#nvfp4-page) and [lmdeploy.int4](#int4-per-token), given as strided views.

`agree(writer, reader)` proves from the strides that two formats put every element at the same place, or names the first
that differs. `convert(a, b)` plans the byte copies between them, to pages of another size too; it refuses where bytes
would be lost. `identify` finds the formats that read `markers` out of the raw bytes after an engine has stored them.

```python
from kvlab.formats import agree, convert, identify, known_format, markers

agree(known_format("vllm.blocks_first"), known_format("vllm.hnd")).words
plan = convert(known_format("vllm.LBNHC"), known_format("vllm.x_split"))
plan.apply(stored)                         # or plan.apply_in_place(stored)
plan.apply(pool, out=other)                # tensors on a GPU: a Triton kernel
identify(raw, pages=2, page_size=16, heads=2, dim=64)
```

`transfer` gives the byte copies that bring a sequence from ranks with one format, page size and tensor-parallel degree
to ranks with others. Replicated heads and MLA rows are sent once to each rank that holds them, by the ranks that have
them in turns.

```python
from kvlab.formats import transfer

plan = transfer(prefill, decode, degrees=(4, 8), tokens=1000, source_pages=[7, 2, ...], target_pages=[0, 5, ...])
plan.proof()                               # every byte arrives exactly once
plan.pairs[0, 1]                           # source, target, length of each copy of a pair, in bits
plan.message((0, 1), mine)                 # what rank 0 sends to rank 1; plan.receive puts it in place
```

`audit` holds a cache, NumPy or torch, against its table and its lengths: NaN, infinity and poison by (layer, page,
slot, head, dim), slots that nobody wrote, scales out of range, stale entries behind a sequence's pages, pages of two
owners, lengths beyond the table. In the tests of an engine `Watch`, or the fixture `kv_watch`, poisons the unused slots
and looks after each step.

```python
from kvlab.formats import audit

found = audit(engine.k_cache, engine.table, engine.lengths)
print(found.report())

pytest_plugins = ["kvlab.integrations.pytest_fixtures"]   # in conftest.py

def test_decode(kv_watch):
    watch = kv_watch(engine.k_cache, engine.table, engine.lengths)
    engine.step()
    watch.step(engine.table, engine.lengths)
```

The grammar is in the docstring of `kvlab.formats.Format`: axes from the outermost to the innermost, groups of fields,
element types. Scales belong to the values of their name: value = code * scale + min. Several tensors (K and
V, scales) are one format, one after the other, in the order in which the text names them.

Each format below has its own anchor, which stays. Facts are from the named sources; the bytes are tested against the
shapes that they state.

## Element types

| name | bits | largest |
|---|---|---|
"""

MIDDLE = """

`s4`, `u4`, `b4` and `e2m1` are half bytes: of two neighbours the first is the low half; `-dim:2` turns that round. `b4`
is stored as the number plus 8. `e8m0` is a power of two.

## The formats

`L` layers, `P` pages, `N` slots of a page, `H` KV heads, `D` dims; `R` are the D/2 + D/16 bytes of a row, `Q` is D/4.
Bytes of a token count all heads of one layer for 8 heads of 128 dims, pages of 64 tokens, with scales and padding.

| format | bytes of a token |
|---|---|
"""


def page() -> str:
    """The whole page."""
    types = [f"| `{one.name}` | {one.bits} | {one.largest:g} |" for one in STORED.values()]
    index, told = [], []
    for name, known in CATALOGUE.items():
        size = known_format(name, page_size=64).bytes_per_token
        index.append(f"| [{name}](#{known.anchor}) | {size:g} |")
        told.append(
            f'\n<a id="{known.anchor}"></a>\n\n### {name}\n\n{known.words[0].upper()}{known.words[1:]}.\n\n'
            f"```\n{known.text}\n```\n\nSource: {known.source}.\n"
        )
    return HEAD + "\n".join(types) + MIDDLE + "\n".join(index) + "\n" + "".join(told)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
