# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13. On the chip
#
# Everything in these notebooks was computed by an emulator: where a byte lies in shared memory, which register holds an
# element, how many passes an access takes. This one holds it against an H100. `benchmarks/hardware_truth.py` asked the chip;
# its answers are the files under `tests/data/hardware`, with card, driver, versions, date and command. NumPy only.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; the chip's answers, which this
# notebook reads, are in a checkout alone.*

# %%
import base64
import gzip
import json
import re
import zlib
from pathlib import Path
from unittest import mock

import numpy as np

from kvlab.attention import mha_decode_paged, mha_prefill
from kvlab.attention.mha_prefill.hopper_cta import HopperPrefillCTA
from kvlab.exercises import ask, hint, predict
from kvlab.hardware import COPIES, TmaDescriptor, copy_wavefronts, count_wavefronts, get_atom, wavefronts
from kvlab.memory import bfloat16
from kvlab.staging import Hazard, Traffic
from kvlab.viz import RooflinePoint, draw_atom, draw_roofline, draw_shared_memory, draw_shares

DATA = Path("../tests/data")


def read(name):
    return json.loads((DATA / "hardware" / f"{name}.json").read_text())


def unpack(text):
    """Integers of a record: differences of neighbours, compressed."""
    return np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4"), dtype=np.int64)


fragments, accesses, kernels = map(read, ("fragments", "accesses", "kernels"))
for record in (fragments, accesses, kernels):
    print(record["card"], "| driver", record["driver"], "|", record["date"], "|", record["command"])

# %% [markdown]
# ## Where the bytes lie
#
# TMA copied a box of a 64 x 128 matrix whose elements are their own numbers; shared memory was read back word by word. Here
# rows 8 to 23 and 64 of their elements of 16 bits, with the 128-byte swizzle. The picture is drawn from the dump.

# %%
boxes = json.loads(gzip.decompress((DATA / "h100_tma.json.gz").read_bytes()))["cases"]
case = next(c for c in boxes if c["swizzle"] == "128B" and c["box"] == [16, 64] and c["coord"] == [8, 0])
dump = np.array(case["words"])

row, column = np.divmod(dump[::8], 128)  # which 16-byte vector of the matrix each slot of 16 bytes holds
draw_shared_memory(np.stack([row - 8, column // 8], axis=-1), title="The chip's shared memory after a TMA copy")

# %% [markdown]
# The emulator's descriptor says at which byte each element of the box should stand.
#
# **Guess.** Of the 1,024 elements of this box, how many stand elsewhere on the chip?

# %%
guess = predict(0, 1, 64, 1024)
guess

# %%
matrix = np.arange(64 * 128, dtype=np.uint16).reshape(64, 128)
image = TmaDescriptor.of(matrix, (16, 64), "128B").image(0)
guess.compare(int((dump[image // 2] != matrix[8:24, :64]).sum()))
print("boxes on record:", len(boxes))

# %% [markdown]
# **Question 1.** At which byte does element (row 5, column 16) of the box stand? A row has 128 bytes; its vectors of 16 bytes are
# permuted by the row.

# %% tags=["question"]
byte = None  # your answer

# %%
ask("13.byte", byte)

# %% [markdown]
# ## Debug: the wrong mode
#
# Another box, 16 rows of 64 bytes. Somebody's emulator has no swizzle for it, and most vectors lie elsewhere on the chip. This is the
# chip's image:

# %%
other = boxes[40]
words = np.array(other["words"])
row, column = np.divmod(words[::8], 128)
plain_image = TmaDescriptor.of(matrix, (16, 32), "none").image(0)
print("elements that lie elsewhere:", int((words[plain_image // 2] != matrix[8:24, :32]).sum()), "of", words.size)
draw_shared_memory(np.stack([row - 8, column // 8], axis=-1), title="The chip's shared memory after another TMA copy")

# %% [markdown]
# **Question 2.** Which mode did the descriptor have?

# %% tags=["question"]
mode = None  # your answer: "32B", "64B" or "128B"

# %%
ask("13.mode", mode)

# %% [markdown]
# ## Which lane holds what
#
# `mma.sync` was fed with small integers straight from registers, and gave its accumulators back. If the emulator put one
# operand's element into another lane or register, the sums would differ. Lane 9 of the `m16n8k16` atom:

# %%
atom = get_atom("mma.sync.m16n8k16.bf16")
draw_atom(atom, lane=9)


# %%
def pool(count, seed):
    """The inputs on record: integers of -4 .. 4 by a fixed recurrence."""
    state, out = seed * 7919 + 12345, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 40) % 9 - 4)
    return np.array(out)


a, b, c = (
    pool(32 * n, seed).reshape(32, n).astype(dtype)
    for n, seed, dtype in (
        (atom.regs_a, 1, atom.dtype),
        (atom.regs_b, 2, atom.dtype),
        (atom.regs_c, 3, atom.dtype_c),
    )
)
chip = unpack(fragments["mma.sync"][atom.name]).reshape(32, atom.regs_c)
print("lane 9, the chip:    ", chip[9].tolist())
print("lane 9, the emulator:", atom.mma(a, b, c)[9].astype(int).tolist())
print("on record:", len(fragments["matrices"]), "matrix loads and stores,", len(fragments["mma.sync"]), "mma.sync atoms,",
      len(fragments["wgmma"]), "wgmma")

# %% [markdown]
# **Question 3.** Which (row, column) of the 16 x 8 result is register 2 of lane 9?

# %% tags=["question"]
place = None  # your answer, e.g. (0, 0)

# %%
ask("13.place", place)

# %% [markdown]
# ## What an access costs
#
# A kernel held one instruction 104 times, each time with other addresses, and a second kernel 104 more; Nsight Compute counted the
# passes of shared memory of each. The lanes of an *atomic* never share a word, and a compare and swap takes every pass twice. A
# *copy* has two sides: lanes get in each other's way where they write the same bank of shared memory, or read the same bank of the
# cache.

# %%
START = 4 * 65 * 104  # the copies read from here on, in bytes
totals = {}
for key, counted in accesses["lanes"].items():
    op = key.split(",")[0]
    address, source = (unpack(counted[side]).reshape(-1, 32) for side in ("address", "source"))
    if op in COPIES:
        predicted, _ = copy_wavefronts(op, address, START + source, counted["mask"])
    else:
        predicted, _, _ = count_wavefronts(op, address, counted["mask"])
    wrong = int((predicted != counted["wavefronts"]).sum())
    totals[op] = np.add(totals.get(op, 0), [predicted.sum(), counted["all_wavefronts"], wrong])

print(f"{'instruction':22} {'predicted':>9} {'measured':>9} {'wrong':>6}   (208 accesses)")
for op, (predicted, measured, wrong) in totals.items():
    print(f"{op:22} {predicted:9} {measured:9} {wrong:6}")

# %%
lane = np.arange(32)
print(wavefronts("ld.shared.b32", 0 * lane))
print(wavefronts("atom.shared.add.u32", 0 * lane))

# %% [markdown]
# **Question 4.** How many passes does `atom.shared.cas.b32` take when lanes 0 to 7, and no others, want the same word?

# %% tags=["question"]
passes = None  # your answer

# %%
ask("13.passes", passes)

# %% [markdown]
# Tensor cores read 128 bytes of shared memory in a pass, whatever the swizzle: `wgmma.m64n64k16` 64 x 32 bytes of A and as
# many of B, 32 passes. TMA moves each 4-byte word of the banks once.

# %%
by_atom = {}
for name, counted in accesses["wgmma"].items():
    by_atom.setdefault(name.split(",")[0], []).append(tuple(counted))
for atom_and_form, counts in by_atom.items():
    (passes_taken, conflicts), *others = set(counts)
    assert not others  # whatever the swizzle and the strides
    print(f"{passes_taken:3} passes, {conflicts} conflicts in {len(counts)} layouts: {atom_and_form}")

# %% [markdown]
# ## A whole kernel
#
# MHA decode, 2 sequences of 2048 keys, 4 KV heads of 128 numbers, bfloat16. The emulator moves every byte and counts; the chip's counters
# saw the compiled kernel on the same problem, with cold caches.

# %%
size = kernels["decode"]["problem"]
rng = np.random.default_rng(0)
pages = size["batch"] * size["keys"] // size["page"]
q = rng.standard_normal((size["batch"], size["q_heads"], size["head_dim"]), np.float32).astype(bfloat16)
k, v = rng.standard_normal((2, pages, size["page"], size["kv_heads"], size["head_dim"]), np.float32).astype(bfloat16)
table = rng.permutation(pages).reshape(size["batch"], -1).astype(np.int32)
traffic = Traffic()
mha_decode_paged(q, k, v, table, np.full(size["batch"], size["keys"]), num_splits=1, traffic=traffic)

counters = kernels["decode"]["counters"]
predicted = {
    "dram_read_bytes": traffic.moved["DRAM->SMEM"],
    "l2_read_sectors": traffic.moved["DRAM->SMEM"] // 32,
    "store_sectors": traffic.moved["registers->DRAM"] // 32,
}
for name, ours in predicted.items():
    print(f"{name:18} predicted {ours:9,}  measured {counters[name]:9,}  {counters[name] / ours - 1:+.2%}")
print(f"The kernel's code has {kernels['decode']['code_bytes']:,} bytes: most of what DRAM reads beyond K, V and Q.")
print("Each of the 8 programs stores 16 bytes of lse: a sector of 32, of which the prediction counts half.")

# %% [markdown]
# And instruction by instruction: what the emulator's reads and writes take, and the counters of the compiled code's.

# %%
roles = {  # (opcode, in shared memory from, to)
    "k read": ("LDSM.16.M88.4", 0, 0x4000),
    "v read": ("LDSM.16.MT88.4", 0x4000, 0x8000),
    "q read": ("LDSM.16.M88.4", 0x8000, 0x9000),
    "p read": ("LDSM.16.M88.4", 0x9000, 0x9800),
    "p write": ("STSM.16.M88.4", 0x9000, 0x9800),
}
print(f"{'':8} {'instructions: predicted':>24} {'measured':>9}   {'passes: predicted':>18} {'measured':>9}")
for role, (opcode, low, high) in roles.items():
    executed = passes = 0
    for sass, count, taken in kernels["decode"]["listing"]:
        offset = re.search(r"\+0x([0-9a-f]+)\]", sass)
        if opcode in sass and low <= int(offset[1] if offset else "0", 16) < high:
            executed, passes = executed + count, passes + taken
    print(f"{role:8} {traffic.instructions[role]:24,} {executed:9,}   {traffic.wavefronts[role]:18,} {passes:9,}")

# %% [markdown]
# **Question 5.** K and V are read once. How many bytes are they, together?

# %% tags=["question"]
nbytes = None  # your answer

# %%
ask("13.nbytes", nbytes)

# %% [markdown]
# ## Every kernel
#
# The other kernels were counted likewise, each on a small problem. From DRAM comes every operand once, and the code; the rest
# is the launch. In the L1 caches arrive the sectors, of 32 bytes, that the emulator copies, and those of page numbers,
# lengths and counters. L2 is asked for less where neighbouring processors read the same keys at the same time: their reads are
# put together on the way.

# %%
def operands(name, size):
    """Bytes of q, keys, values and the page table."""
    if "prefill" in name:
        return 3 * 2 * size["batch"] * size["tokens"] * size["q_heads"] * size["head_dim"]
    table = 4 * size["batch"] * (size["keys"] // size["page"] + 1)
    if "mla" in name:
        return 2 * size["batch"] * (size["q_heads"] + size["keys"]) * (size["latent"] + size["rope"]) + table
    keys = (1 if "fp8" in name else 2) * 2 * size["keys"] * size["kv_heads"] * size["head_dim"]
    return size["batch"] * (keys + 2 * size["q_heads"] * size["head_dim"]) + table


every = {name: kernel for name, kernel in kernels.items() if "counters" in kernel}
print(f"{'':21} {'operands, code':>14} {'from DRAM':>10}          {'into L1':>8} {'L2 asked':>8} {'together':>8}   sectors")
for name, kernel in every.items():
    found, bytes_once = kernel["counters"], operands(name, kernel["problem"]) + kernel["code_bytes"]
    beyond = found["dram_read_bytes"] / bytes_once - 1
    print(f"{name:21} {bytes_once:14,} {found['dram_read_bytes']:10,} {beyond:+8.2%} {found['l1_read_sectors']:9,}"
          f" {found['l2_read_sectors']:8,} {found['coalesced_sectors']:8,}")

# %% [markdown]
# The passes of shared memory above are those that Nsight Compute makes out of the addresses of each instruction. The chip has
# counters of its own, of all that its load and store unit and its tensor cores take. A copy past L1 costs the unit nothing;
# copies of zeros, behind the last tile, and the order in which copies and stores arrive, are the rest.

# %%
print(f"{'':21} {'reads: by address':>17} {'the unit':>9}   {'wgmma: by address':>17} {'the unit':>9}")
for name, kernel in every.items():
    reads = sum(passes for sass, _, passes in kernel["listing"] if re.search(r"\bLDS", sass))
    products = sum(passes for sass, _, passes in kernel["listing"] if "GMMA" in sass)
    found = kernel["counters"]
    print(f"{name:21} {reads:17,} {found['shared_wavefronts_loads']:9,}   {products:17,} {found['gmma_wavefronts']:9,}")

# %% [markdown]
# ## A race, predicted and then seen
#
# The Hopper prefill kernel has two consumer warpgroups, which multiply the same tile of V. Rows of V that no query sees may hold
# anything, and 0 * NaN is NaN: each consumer zeroes them before it multiplies, eight rows at a time, read and stored anew. A
# window leaves such rows before the first key that is seen, the end of a sequence behind the last. Here each consumer cleans
# first one end, then the other; of 23 keys the last row sees one, and both ends lie in the same eight rows.


# %%
def one_end_after_the_other(cta, me, role, b, first, end):
    clean_rows(cta, me, role, b, 0, end)
    clean_rows(cta, me, role, b, first, cta.C.BN)


clean_rows = HopperPrefillCTA.clean_rows
q, k, v = (rng.standard_normal((n, 1, 64), np.float32).astype(bfloat16) for n in (3, 23, 23))
ragged = {"cu_seqlens_q": np.array([0, 3]), "cu_seqlens_k": np.array([0, 23]), "window": 1, "backend": "hopper"}
with mock.patch.object(HopperPrefillCTA, "clean_rows", one_end_after_the_other):
    try:
        mha_prefill(q, k, v, **ragged)
    except Hazard as hazard:
        print(hazard)

# %% [markdown]
# Consumer 1 reads eight rows while row 19 is still NaN; consumer 0 zeroes row 19; consumer 1 stores what it had read, and
# consumer 0 multiplies NaN. The emulator's record of who knows what said so before anybody had seen it: in its own run the
# consumers take turns, and the values are right. Then the kernel as it was got 5,040 calls on an H100 (64 sequences, one query
# and 23 keys each, 16 heads, windows of 1 to 6 keys, head dimensions 64 and 128, NaN in the rows that no query sees): 138 of
# them, 2.7 %, had NaN in their outputs. The cure costs no barrier. Both ends are cleaned at once, so that all consumers store
# the same, in whatever order. On an H200 690 of 2,520 calls had NaN before, none of 5,040 since
# (`tests/data/hardware/h200_prefill.json`):

# %%
out = mha_prefill(q, k, v, **ragged)
print("nothing to report; the rows are those of V:", bool(np.array_equal(out, v[20:])))

# %% [markdown]
# ## How near to the ceiling
#
# The record of `benchmarks/side_by_side.py`, of an H100 80GB HBM3: every kernel beside its peers, measured in turns in one run,
# outputs checked, the caches flushed. FA3 is the FlashAttention 3 and FlashMLA the kernel of vLLM's build, cuDNN the one behind
# PyTorch; FlashInfer brings kernels of its own, on FA3's and FA2's lines: the faster counts.

# %%
NAMES = {
    "kvlab": "kvlab", "fa3": "FA3", "flashinfer_fa3": "FlashInfer", "flashinfer_fa2": "FlashInfer",
    "sdpa_cudnn": "cuDNN", "flashmla": "FlashMLA", "vllm_append": "vLLM",
}
FAMILIES = {"decode_fp8": "decode, fp8", "decode": "decode", "mla": "MLA decode", "prefill_fp8": "prefill, fp8"}
run = json.loads(Path("../benchmarks/results/attention_peers_h100.json").read_text())
tasks = {}
for task, found in run["tasks"].items():
    done = found["implementations"]
    ran = [(label, done[name]) for name, label in NAMES.items() if done.get(name)]
    tasks[task] = dict(sorted(ran, key=lambda one: -one[1]["ms"]))  # of two kernels the faster
    tasks[task] = {label: tasks[task][label] for label in NAMES.values() if label in tasks[task]}

draw_shares([(task, {who: x["fraction"] for who, x in done.items()}) for task, done in tasks.items()])

# %% [markdown]
# `python benchmarks/report.py` prints the goals beside these figures. The tasks that compute something, under the roof: the
# append to the cache does not, it copies. Prefill of e4m3 has a roof of its own: its products are of 8 bits.

# %%
points = []
ceilings = run["ceilings"]["start"]
for task, done in tasks.items():
    ours = done["kvlab"]
    if not ours["tflops"]:
        continue
    seconds = ours["ms"] / 1e3
    peers = tuple((who, x["ms"] / 1e3) for who, x in done.items() if who != "kvlab")
    family = next((family for start, family in FAMILIES.items() if task.startswith(start)), "prefill")
    compute = ceilings["gemm_fp8_tflops"] * 1e12 if family == "prefill, fp8" else None
    work = ours["tflops"] * 1e12 * seconds, ours["gbs"] * 1e9 * seconds
    points.append(RooflinePoint(task, *work, seconds, family, peers, compute))
draw_roofline(points, bandwidth=ceilings["read_gbs"] * 1e9, compute=ceilings["gemm_tflops"] * 1e12)
