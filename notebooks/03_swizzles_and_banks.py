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
# # 3. Swizzles and banks
#
# Shared memory is fast as long as 32 *banks* work at once. A row-major tile makes them queue; one XOR of address bits
# removes the queue. This notebook measures both with the rule of an H100: the counts below are those that the chip's own
# counters show.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.exercises import ask, hint, predict
from kvlab.hardware import SubTileLoaderLDS, best_swizzle, coalescing, wavefronts
from kvlab.layout import ComposedLayout, Layout, Swizzle
from kvlab.viz import CopyPlan, draw_copy_plan, draw_cure, draw_layout, draw_punch_card, explore

# %% [markdown]
# ## Banks
#
# Bytes 0 to 3 of shared memory lie in bank 0, bytes 4 to 7 in bank 1, and so on; after bank 31 comes bank 0 again, so
# the bank of a byte address is `address // 4 % 32`. A bank delivers one 4-byte word in one pass (*wavefront*). Two lanes
# that want different words of one bank need two passes; two lanes that want the same word share it.
#
# Here each of 32 lanes reads one float of a row: 32 lanes, 32 banks, one pass.

# %%
lane = np.arange(32)
wavefronts("ld.shared.b32", lane * 4)

# %% [markdown]
# Now each lane reads the first float of its own row, the rows being 128 bytes long.
#
# **Guess.** How many passes does that take?

# %%
guess = predict(1, 4, 8, 32)
guess

# %%
column = wavefronts("ld.shared.b32", lane * 128)
guess.compare(column.wavefronts)
column

# %% [markdown]
# All of these floats lie in bank 0. The old remedy is padding: rows of 132 bytes. It costs memory, and 16-byte accesses lose their alignment.

# %%
print(wavefronts("ld.shared.b32", lane * 132))

# %% [markdown]
# **Question 1.** The lanes read floats that are 8 bytes apart (`lane * 8`). How many wavefronts does that take?

# %% tags=["question"]
passes = None  # your answer, a number

# %%
ask("03.passes", passes)

# %% [markdown]
# ## Wide accesses come in phases
#
# A lane may load 16 bytes at once. 32 lanes then want 512 bytes, and shared memory delivers 128 in a pass: the warp is
# served in four *phases* of 8 lanes. Four passes are ideal; only lanes of the same phase can collide. (NVIDIA's phases are
# neighbours. AMD's gfx942 and gfx950 group the lanes of a 16-byte read otherwise: [notebook 7](07_kv_buffer.ipynb).)

# %%
rows_of_16 = wavefronts("ld.shared.b128", lane * 16)
rows_of_16

# %% [markdown]
# `ldmatrix`, which feeds the tensor cores, works the same way: it reads 8 x 8 matrices of 16-bit numbers, 8 rows of 16
# bytes in a phase. Each row may lie anywhere. In a row-major tile with rows of 128 bytes, 8 rows of one column of
# matrices all lie in the same four banks.
#
# **Guess.** `ldmatrix.x4` reads four matrices, so it takes four passes at least. How many from this tile?

# %%
of_a_tile = predict(4, 8, 16, 32)
of_a_tile

# %%
tile_rows, row_bytes = 16, 128
row, vector = lane % 16, lane // 16  # which row, and which 16 bytes of it, each lane asks for
plain = wavefronts("ldmatrix.x4", row * row_bytes + vector * 16)
of_a_tile.compare(plain.wavefronts)
draw_punch_card(plain)

# %% [markdown]
# ## The swizzle
#
# A swizzle `Sw<B,M,S>` XORs *B* bits of an address, those from bit *M* on, with the *B* bits that stand *S* higher. So
# `Sw<3,4,3>` XORs three bits of a byte address, from bit 4 on, with the three bits that stand 3 higher. Bits 4 to 6
# say which 16-byte vector of a 128-byte row; bits 7 to 9 say which row. So vector *v* of row *r* goes to place
# `v ^ (r % 8)`: every row keeps its bytes, in another order.

# %%
swizzle = Swizzle(3, 4, 3, "byte")
swizzle

# %% [markdown]
# **Question 2.** To which byte address does `Sw<3,4,3>` send byte address 400?

# %% tags=["question"]
sent_to = None  # your answer, a number

# %%
ask("03.sent_to", sent_to)

# %% [markdown]
# The swizzle undoes itself: applying it twice changes nothing. That is why the same formula serves for writing and for
# reading.

# %%
address = np.arange(4096)
print(np.array_equal(swizzle(swizzle(address)), address))

# %% [markdown]
# With it, the same `ldmatrix` needs its four ideal passes. The conflict and its cure, card by card and tile by tile; the lanes of
# the first phase are outlined.

# %%
swizzled = wavefronts("ldmatrix.x4", swizzle(row * row_bytes + vector * 16))
r, v = np.divmod(np.arange(tile_rows * 8), 8)
slots = np.empty((tile_rows * 8, 2), int)
slots[swizzle(r * row_bytes + v * 16) // 16] = np.stack([r, v], axis=1)
draw_cure(plain, swizzled, tiles=(np.stack([r, v], axis=1), slots), names=("not swizzled", "swizzled"))

# %% [markdown]
# Now with knobs: fewer bits, another row, another instruction, and the passes one by one. (Without the package `anywidget` the picture
# stands still.) Set `bits` to 2: how many passes does each matrix take, and why?

# %%
explore(swizzle)

# %% [markdown]
# ## Bringing the tile in
#
# Someone has to write the tile there. On NVIDIA each lane copies 16 bytes with `cp.async`, from any address to any
# address: the *destination* is swizzled. A warp takes four rows at a time; compare the lanes' order left and right.

# %%
copied_row, copied_vector = np.divmod(np.arange(tile_rows * 8).reshape(-1, 32), 8)  # [instructions, lanes]
landing = swizzle(copied_row * row_bytes + copied_vector * 16)
draw_copy_plan(CopyPlan.of_cp_async(copied_row, copied_vector * 8, landing, (tile_rows, 64), "bf16"))

# %% [markdown]
# Global memory does not mind the order of the lanes. It moves *sectors* of 32 bytes, and here every byte that moves is
# wanted:

# %%
coalescing(copied_row[0] * 4096 + copied_vector[0] * 16, 16)  # rows 4096 bytes apart in DRAM

# %% [markdown]
# AMD's copy engine cannot choose: lane after lane lands side by side in LDS (its shared memory, with 64 banks on gfx950; a warp
# has 64 lanes there). So the *source* is swizzled: lane 16 fetches the vector that belongs where lane 16 lands.

# %%
draw_copy_plan(SubTileLoaderLDS("bf16", Swizzle(3, 0, 4, "vector")), (32, 32))

# %% [markdown]
# ## The unit
#
# The three numbers of a swizzle mean nothing without what they count. The swizzle above counts bytes. A kernel that
# calculates with elements of bfloat16, or with 16-byte vectors, writes the same permutation with another middle number.
# Mixing them up is the most frequent mistake with swizzles; here the unit is part of the type.

# %%
for unit in ("byte", "bf16", "fp32", "vector"):
    print(f"{unit:7}", swizzle.to(unit))

# %% [markdown]
# **Question 3.** CUTLASS, NVIDIA's library of kernels, writes `Sw<2,4,3>`, in bytes, for tiles with rows of 64 bytes. What is the
# middle number in elements of 2 bytes?

# %% tags=["question"]
middle = None  # your answer, a number

# %%
ask("03.middle", middle)

# %% [markdown]
# A layout with a swizzle after it is a `ComposedLayout`; in elements of bfloat16, with the banks as colours:

# %%
tile = ComposedLayout(Layout.row_major(8, 64), Swizzle(3, 3, 3, "bf16"))
tile

# %% [markdown]
# Slices keep the swizzle exact. Adding an offset *after* the swizzle instead would be another function; row 2 of the
# tile shows it:

# %%
row_2 = tile[2, :]
print(row_2)
print("exact:", row_2(np.arange(0, 64, 8)))
print("wrong:", 2 * 64 + Swizzle(3, 3, 3, "bf16")(np.arange(0, 64, 8)))

# %% [markdown]
# ## Absolute addresses
#
# Hopper's copy engine (TMA, notebook 5) and its `wgmma` (notebook 4) swizzle by themselves. They XOR the bits of the *absolute*
# address in shared memory, not of the offset in the tile.
# A tile that starts at a multiple of 1024 sees the pattern from its beginning. One that starts 256 bytes later does
# not: vector 0 of its row 0 lies at place 2.

# %%
for base in (1024, 1024 + 256):
    first_vectors = swizzle(base + np.arange(8) * row_bytes) - base - np.arange(8) * row_bytes
    print(f"tile at byte {base}: vector 0 of its rows lies at places", first_vectors // 16)

# %% [markdown]
# ## Which swizzle for my tile?
#
# Narrower rows need fewer bits, longer rows another distance. `best_swizzle` tries all swizzles, smallest first, and
# counts the passes of the whole tile: the first one without conflicts is the answer, and the count is its proof.

# %%
for pitch in (16, 32, 64, 128):
    best = best_swizzle((16, pitch), "fp16", "ldmatrix.x4")
    print(f"rows of {2 * pitch:3} bytes: {best.swizzle}, {best.wavefronts} passes; without {best.unswizzled}")

# %% [markdown]
# It takes any access. A transpose through shared memory writes rows and reads columns of 32 x 32 floats; both shall be
# free of conflicts.

# %%
transpose = best_swizzle((32, 32), "fp32", [("st.shared.b32", 0, np.arange(32)), ("ld.shared.b32", np.arange(32), 0)])
print(transpose)
draw_layout(ComposedLayout(Layout.row_major(32, 32), transpose.swizzle), element_bytes=4)

# %% [markdown]
# ## Debug: the wrong numbers
#
# A kernel keeps 16 rows of 64 floats, 256 bytes a row, and reads 16-byte vectors of them by `ldmatrix`. Its author had seen
# `Sw<3,4,3>` in a paper, about bytes and rows of 128 of them, and counts float32:

# %%
taken_over = Swizzle(3, 4, 3, "fp32")
floats = row * 64 + vector * 4
column = wavefronts("ldmatrix.x4", 4 * taken_over(floats))
print(column)
draw_punch_card(column)

# %% [markdown]
# **Question 4.** Which `Swizzle(bits, base, shift, "fp32")` takes four passes, whichever vectors are read?

# %% tags=["question"]
mended = None  # your answer: Swizzle(..., "fp32")

# %%
ask("03.mended", mended)

# %% [markdown]
# ## Build one
#
# **Question 5.** A tile of 16 rows of 64 bytes: a row has four vectors of 16 bytes, two rows fill one row of the banks. Write the function that
# says at which place of its row, 0 to 3, a vector is stored, so that `ldmatrix.x4` takes four passes. `row` and `vector` are
# arrays. All 64 vectors are tried.

# %% tags=["question"]
place = None  # your answer: def place(row, vector): return ...

# %%
ask("03.place", place)

# %% [markdown]
# Next: [4. Fragments](04_fragments.ipynb): what the lanes hold after they have read.
