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
# # 15. X-ray
#
# A kernel is right, and slow. What the compiler made of it can be read without a GPU: the layouts it chose, the instructions that
# touch memory, how many passes and sectors each of them takes, registers, spills. `xray` compiles a Triton or Gluon kernel for a
# GPU that is not there, counts, and says what helps. This notebook needs Triton: in a checkout `make demo` has
# installed it, or `%pip install -e "..[kernels]"` does.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton besides, on Linux,
# and `kernels_to_debug.py` beside this notebook.*

# %%
from kernels_to_debug import every_fourth, through_shared
from triton.experimental.gluon import language as gl

from kvlab.exercises import ask, hint, predict
from kvlab.xray import diff, xray

# %% [markdown]
# ## Memory
#
# `every_fourth` copies every fourth float. Global memory moves *sectors* of 32 bytes, eight floats. The compiler gives each thread
# four floats that follow one another, so the lanes of one instruction are 64 bytes apart.
#
# **Guess.** How many sectors does an instruction move for each one that would do if the floats were neighbours?

# %%
guess = predict(1, 2, 4, 8)
guess

# %%
floats = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
strided = xray(every_fourth, {**floats, "BLOCK": 1024}, "sm_90")
load = next(edge for edge in strided.edges if edge.operation == "tt.load")
guess.compare(load.sectors // load.ideal_sectors)
strided

# %% [markdown]
# **Question 1.** The kernel wants 1024 floats. How many bytes does its load move, all its instructions together? A sector moves for each
# instruction that asks for it.

# %% tags=["question"]
moved = None  # your answer, a number

# %%
ask("15.moved", moved)

# %% [markdown]
# ## Debug: right, and slow
#
# `through_shared` writes a tile of 64 x 64 numbers of bfloat16 into shared memory, row by row, and reads it as the operand of a
# matrix product, by `ldmatrix`.

# %%
along = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
operand = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2)
tile = {"x_ptr": "*bf16", "out_ptr": "*bf16", "ROWS": 64, "COLUMNS": 64, "COPY": along, "READ": operand}
plain = xray(through_shared, {**tile, "SHARED": gl.SwizzledSharedLayout(1, 1, 1, [1, 0])}, "sm_90")

# %% [markdown]
# **Question 2.** How many passes does each matrix of `ldmatrix` take here, where one would do? A row has 128 bytes, and nothing is swizzled.

# %% tags=["question"]
passes = None  # your answer, a number

# %%
ask("15.passes", passes)

# %% [markdown]
# `SwizzledSharedLayout(vec, per_phase, max_phase, order)` moves pieces of `vec` elements: in row r, piece p lies at place
# `p ^ (r // per_phase % max_phase)`. `ldmatrix` reads pieces of 8 elements, 16 bytes.
#
# **Question 3.** With `vec` = 8, which `(per_phase, max_phase)` gives the pieces of one column in eight rows eight places?

# %% tags=["question"]
phases = None  # your answer, e.g. (4, 2)

# %%
ask("15.phases", phases)

# %%
plain

# %% [markdown]
# The finding has a cure, and the count that proves it. It is taken over into the kernel; `diff` says what became of it.

# %%
cure = plain.findings[0].cures[0].layout
cured = xray(
    through_shared, {**tile, "SHARED": gl.SwizzledSharedLayout(cure.vec, cure.per_phase, cure.max_phase, [1, 0])}, "sm_90"
)
diff(plain, cured)

# %% [markdown]
# **Question 4.** How many wavefronts of shared memory does the cure save, stores and loads together?

# %% tags=["question"]
saved = None  # your answer, a number

# %%
ask("15.saved", saved)

# %% [markdown]
# ## The same tile, staged by Triton
#
# Notebook 7 has followed a tile of keys into shared memory by hand. What does a compiler make of the same way? `compiler_staging` compiles a small Triton kernel, attention without its
# softmax, for a GPU that is not there. Its TTGIR, the compiler's last form with layouts, says where K and V lie in shared
# memory and in registers. `match_staging` holds the byte address of every element, and the elements of every thread, against
# an emulated buffer. All tiles here are whole: 128 tokens.

# %%
from dataclasses import replace

import numpy as np
from IPython.display import Markdown

from kvlab.cache import from_dense
from kvlab.hardware import wavefronts
from kvlab.layout import Swizzle
from kvlab.layout.encodings import SharedLinearLayout
from kvlab.memory import as_dtype
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeStreamingKVBuffer,
    KVBuffer,
    KVBufferParams,
    NvidiaKVParams,
    TmaKVBuffer,
    slots_of,
)
from kvlab.triton_support.staged_tile import compiler_staging, staging_as
from kvlab.triton_support.staging_match import match_staging
from kvlab.viz import draw_cure, draw_tiles_beside

DEPTH = 128
rng = np.random.default_rng(0)
of_both = {"dtype": "bf16", "depth": DEPTH, "kv_num_heads": 1, "transpose": True}
of_max = {**of_both, "BK": 32, "num_threads": 256}
params = KVBufferParams(mma_shape=(32, 32, 16), swizzle=Swizzle(3, 0, 4, "vector"), BN=64, WN=64, **of_max)
streaming_params = KVBufferParams(mma_shape=(16, 16, 32), swizzle=Swizzle(3, 0, 3, "vector"), BN=128, WN=32, **of_max)
nvidia = NvidiaKVParams(BN=32, **of_both)

whole = from_dense(*rng.standard_normal((2, 1, 1, 128, 1, DEPTH)).astype(as_dtype("bf16")), [128], page_size=128)
caches = {"K": whole.get_key_cache(0), "V": whole.get_value_cache(0)}


def emulated(kind, params, role, **change):
    """A buffer that has loaded its first tile of K or V."""
    buffer = kind(replace(params, transpose=role == "K", **change), caches[role], batch_idx=0, head_idx=0, end=128)
    buffer.load_from_dram(0)
    return buffer


def emulated_strip(params, role, **change):
    """A streaming buffer that has loaded its first strip of K or V."""
    params = replace(params, transpose=role == "K", **change)
    buffer = DecodeStreamingKVBuffer(params, caches[role], batch_idx=0, head_idx=0, num_keys=128)
    buffer.load_from_dram(0, buffer.iterator().next_tile())
    return buffer


wgmma = replace(nvidia, BN=64, arch="sm_90")
compiled = {
    "sm_80": compiler_staging("sm_80", BM=16, BN=32, D=DEPTH),
    "sm_90": compiler_staging("sm_90", BM=64, BN=64, D=DEPTH),
    "gfx950": compiler_staging("gfx950", BM=128, BN=64, D=DEPTH),
    "gfx950, a strip": (
        compiler_staging("gfx950", BM=16, BN=128, D=32)[0],
        compiler_staging("gfx950", BM=16, BN=32, D=DEPTH)[1],
    ),
}
buffers = {
    "sm_80": [emulated(CpAsyncKVBuffer, nvidia, role) for role in caches],
    "sm_90": [emulated(TmaKVBuffer, wgmma, role) for role in caches],
    "gfx950": [emulated(KVBuffer, params, "K"), emulated(KVBuffer, params, "V", swizzle=None)],
    "gfx950, a strip": [
        emulated_strip(streaming_params, "K"),
        emulated_strip(streaming_params, "V", swizzle=None),
    ],
}
matches = {
    (machine, role): match_staging(buffer, tile)
    for machine in compiled
    for role, buffer, tile in zip(caches, buffers[machine], compiled[machine], strict=True)
}

# %% [markdown]
# The table has the result. *Same byte* counts elements; *passes* are the wavefronts that all warps take to read the tile,
# with the least possible in brackets (AMD's are provisional).

# %%
why = {
    ("sm_80", "K"): "`ldmatrix` reads 8 rows of one column: both XOR the number of the vector with that of the row",
    ("sm_80", "V"): "the same, transposed by `ldmatrix.trans`",
    ("sm_90", "K"): "neither has a choice: `wgmma` reads the 128-byte swizzle of TMA, in panels of 64 columns",
    ("sm_90", "V"): "the same",
    ("gfx950", "K"): "MAX's DMA fills blocks of 32 columns in lane order; Triton keeps rows whole and XORs 16 vectors",
    ("gfx950", "V"): "MAX leaves V's blocks plain; Triton XORs pieces of 8 bytes, or (3.9) pads after 1,024 bytes",
    ("gfx950, a strip", "K"): "four warps of MAX share the keys; in Triton's every warp reads all of them",
    ("gfx950, a strip", "V"): "MAX reads two bytes at a time, keys in plain order; Triton transposes four keys at once",
}
lines = ["| tile | emulated | compiled | same byte | same registers | passes: emulated | compiled | why |", "|-" * 8 + "|"]
for (machine, role), match in matches.items():
    buffer, tile = buffers[machine]["KV".index(role)], compiled[machine]["KV".index(role)]
    held = {True: "yes", False: "no", None: "none hold it"}[match.registers]
    passes = [f"{n} ({least})" for n, least in zip(match.passes, match.ideal, strict=True)] or ["–", "–"]
    where = f"all {match.same:,}" if match.same == match.emulated.size else f"{match.same} of {match.emulated.size:,}"
    swizzle = str(getattr(buffer.params, "swizzle", None) or "").split(" ")[0]
    lines.append(
        f"| {machine}: {role} | {type(buffer).__name__} {swizzle} | {tile} | {where} | {held} "
        f"| {passes[0]} | {passes[1]} | {why[machine, role]} |"
    )
Markdown("\n".join(lines))

# %% [markdown]
# On NVIDIA the emulated buffers and the compiler agree in every byte and every register. (That is no accident: the buffers
# follow what kvlab's own kernels compile to.) First sm_80, then sm_90 with its panels:

# %%
both = [slots_of(where, 2) for where in (matches["sm_80", "K"].emulated, matches["sm_80", "K"].compiled)]
draw_tiles_beside(*both, names=("CpAsyncKVBuffer", f"Triton's {compiled['sm_80'][0]}"), rows=8)

# %%
both = [slots_of(where, 2) for where in (matches["sm_90", "K"].emulated, matches["sm_90", "K"].compiled)]
draw_tiles_beside(*both, names=("TmaKVBuffer", f"Triton's {compiled['sm_90'][0]}"), rows=8)

# %% [markdown]
# On gfx950 the two have gone different ways to the same end. The threads hold the same elements of K. In shared memory
# only eight vectors have the same place, and yet no read of either has a conflict:

# %%
both = [slots_of(where, 2) for where in (matches["gfx950", "K"].emulated, matches["gfx950", "K"].compiled)]
draw_tiles_beside(*both, names=("MAX's KVBuffer", f"Triton's {compiled['gfx950'][0]}"), banks=64)

# %% [markdown]
# V shows a difference that costs: the first read of wave 0, through both layouts. Sixteen lanes ask for four keys, four
# pieces of 8 bytes of each. MAX's blocks have rows of 64 bytes, so four keys lie side by side in the banks. In Triton's tile
# a row is as long as all 64 banks; up to 3.7 the XOR moves the pieces of four keys around in the same places, where the
# four keys meet. The padding of 3.9 moves neighbouring keys apart.

# %%
reads = [compiled["gfx950"][1].read_addresses(), buffers["gfx950"][1].read_addresses(0, bk_tile=0)]
first_reads = [wavefronts(name, addresses[0, 0], arch="gfx950") for name, addresses in reads]
both = [slots_of(where, 2, 8) for where in (matches["gfx950", "V"].compiled, matches["gfx950", "V"].emulated)]
draw_cure(*first_reads, tiles=both, slot_bytes=8, names=("in Triton's layout", "in MAX's"))

# %% [markdown]
# ## MAX's layout, told to Gluon
#
# Triton has no name for MAX's image, but it is linear over bits: where the elements number 1, 2, 4, 8, ... of shared memory
# come from says all, any other is the XOR of these. As a `SharedLinearLayout` Gluon takes it, and compiles.

# %%
match = matches["gfx950", "K"]
layout = SharedLinearLayout.from_offsets(match.emulated // 2)
told = staging_as("gfx950", (64, DEPTH), layout, compiled["gfx950"][0].registers)
print("element 2^i of shared memory is (key, column):", *layout.offset_bases)
print("the compiled kernel and MAX, the same byte:", int((told.addresses() == match.emulated).sum()), "of", 64 * DEPTH)

# %% [markdown]
# The proof on bytes: the compiled kernel's addresses, followed in the memory that MAX's buffer has filled, find the keys.

# %%
found = buffers["gfx950"][0].smem.load(told.addresses()[None], "bf16", 1)[0, ..., 0]
print("found == keys:", bool((found == caches["K"].blocks[0, :64, 0]).all()))

# %% [markdown]
# **Question 5.** Which key's first vector lies 1,024 bytes (512 elements) behind the beginning, where without a swizzle key 16
# would begin?

# %% tags=["question"]
key = None  # your answer

# %%
ask("15.key", key)

# %% [markdown]
# On the command line: `kvlab xray FILE.py:kernel x_ptr=*fp32 out_ptr=*fp32 BLOCK=1024`. Next: [16. In your stack](16_in_your_stack.ipynb).
