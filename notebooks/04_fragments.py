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
# # 4. Fragments
#
# A tensor core multiplies small matrices that are spread over the registers of a warp. Which lane holds which element is
# fixed by the instruction; a kernel has to bring every element there. This notebook shows the maps of four
# instructions, and multiplies real matrices through them.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.exercises import ask, hint, predict
from kvlab.hardware import (
    SmemDescriptor,
    arithmetic,
    get_atom,
    ldmatrix,
    mma_sum,
    tile_layout_k_major,
    tile_to_descriptor,
)
from kvlab.layout import LinearLayout
from kvlab.layout.encodings import NVMMADistributedLayout
from kvlab.memory import Memory, bfloat16, float8_e4m3fn
from kvlab.viz import draw_atom, draw_descriptor, draw_linear_layout, explore

rng = np.random.default_rng(4)

# %% [markdown]
# ## mma.sync: one warp
#
# `mma.sync.m16n8k16` computes `C[16, 8] += A[16, 16] B[16, 8]`: m rows, n columns, k products in each sum. Such an instruction,
# with the maps of its operands, is called an *atom*. The picture has A at the left, B on top and C in the
# corner, as on paper. `T5 a2–3` means: lane 5 of the warp holds these two numbers as its elements 2 and 3 of A, the two halves of one 32-bit
# register.
#
# **Guess.** Lane 0 holds C[0, 0] and C[0, 1], lane 1 the next two numbers of the row, and so on. Which lane holds C[1, 0], the number
# below the first?

# %%
guess = predict(1, 4, 8, 16)
guess

# %% [markdown]
# Four neighbouring lanes (one hue) share a row of A and of C, and a column of B. All that lane 5 holds is outlined:

# %%
mma = get_atom("mma.sync.m16n8k16.bf16")
rows, columns = mma.c(np.arange(32), 0)  # where register 0 of each lane is
guess.compare(int(np.flatnonzero((rows == 1) & (columns == 0))[0]))
draw_atom(mma, lane=5)

# %% [markdown]
# The maps are one line each: from lane and register to row and column, where every element counts as a register, as in Triton. They
# work on arrays as well.

# %%
print("A, lane 5:", [mma.a(5, register) for register in range(mma.regs_a)])
print("C, register 0 of lanes 0 to 7:", *mma.c(np.arange(8), 0))

# %% [markdown]
# **Question 1.** Which lane holds C[10, 5]?

# %% tags=["question"]
holder = None  # your answer, a number

# %%
ask("04.holder", holder)

# %% [markdown]
# Do the maps really multiply? Take two matrices apart into fragments `[lanes, registers]`, multiply the fragments, and put the result together again.

# %%
A = rng.normal(size=(16, 16)).astype(bfloat16)
B = rng.normal(size=(16, 8)).astype(bfloat16)
a, b, zero = mma.fragment_a(A), mma.fragment_b(B), np.zeros((32, mma.regs_c), np.float32)
C = mma.tile_c(mma.mma(a, b, zero))
print("fragment of A:", a.shape, "largest error:", np.abs(C - A.astype(float) @ B.astype(float)).max())

# %% [markdown]
# ## ldmatrix: from shared memory into a fragment
#
# `ldmatrix.x4` reads four 8 x 8 matrices. Lane *l* gives the address of row `l % 8` of matrix `l // 8`; afterwards every
# lane holds two neighbouring elements of each matrix. With the right addresses this is the fragment of A.

# %%
smem = Memory(A.nbytes, name="shared memory")
smem.store(0, A.reshape(-1))
lane = np.arange(32)
address = (lane % 16) * 32 + (lane // 16) * 16  # rows of 32 bytes; lanes 16 to 31 read the right half
registers = ldmatrix(smem, address, 4)
print(registers.shape, "equal to the fragment of A:", np.array_equal(registers, a))

# %% [markdown]
# **Question 2.** B is stored row by row, 16 rows of 8 elements, but its fragment runs down the columns. `ldmatrix` with
# `trans=True` turns each 8 x 8 matrix around. Which addresses do lanes 0 to 15 have to give (`.x2`, lane *l* the row *l*,
# 16 bytes a row)? Write an expression of `lane`.

# %% tags=["question"]
addresses = None  # your answer: an array of 32 byte addresses (those of lanes 16 to 31 are ignored)

# %%
ask("04.addresses", None if addresses is None else np.asarray(addresses)[:16])

# %% [markdown]
# (With them, `ldmatrix(smem_b, addresses, 2, trans=True)` is the fragment of B. Try it.)

# %%
smem_b = Memory(B.nbytes, name="B in shared memory")
smem_b.store(0, B.reshape(-1))

# %% [markdown]
# ## Why attention needs no shuffle
#
# Attention multiplies twice: `S = Q K^T`, then `O = P V`, where P comes from S element by element. The first product leaves
# P in the layout of C, the second wants it in the layout of A. For this instruction two C tiles side by side *are* an A
# fragment: nothing has to move.

# %%
P = rng.normal(size=(16, 16)).astype(bfloat16)
left, right = mma.fragment_c(P[:, :8]), mma.fragment_c(P[:, 8:])
np.array_equal(np.concatenate([left, right], axis=1), mma.fragment_a(P))

# %% [markdown]
# See it move: `slide C onto A` lays C over A, lane upon lane. Rest the pointer on a number: all that its lane holds lights up.

# %%
explore(mma)

# %% [markdown]
# ## Debug: a result in the wrong places
#
# A kernel writes the four numbers of C that each lane holds to a row-major `[16, 8]` in memory, each at the offset that this
# function says. Below is what lands there, beside what should:

# %%
def offset_of(lane, register):
    return lane // 4 * 8 + lane % 4 * 2 + register


numbered = np.arange(128.0).reshape(16, 8)
held, landed = mma.fragment_c(numbered), np.full(128, np.nan)
landed[offset_of(np.arange(32)[:, None], np.arange(4))] = held
print("row 0:", landed[:8], "should be", numbered[0])
print("row 8:", landed[64:72], "should be", numbered[8])
print("never written:", int(np.isnan(landed).sum()), "places of 128")

# %% [markdown]
# **Question 3.** Write the function as it should be.

# %% tags=["question"]
mended = None  # your answer: def mended(lane, register): return ...

# %%
ask("04.mended", mended)

# %% [markdown]
# ## Bits: the same map as a LinearLayout
#
# All extents are powers of two, so the map is *linear over the bits* of register, lane and warp: it is enough to know where
# 1, 2, 4, ... go; any other index is the XOR of these. Triton's compiler describes every layout this way. Here are four
# warps, two along M and two along N:

# %%
accumulators = LinearLayout.from_atom(mma, "c", warps=(2, 2))
accumulators

# %% [markdown]
# **Question 4.** Use the table of basis vectors: which element (row, column) does register 2 of lane 6 of warp 1 hold?

# %% tags=["question"]
element = None  # your answer, e.g. (0, 0)

# %%
ask("04.element", element)

# %% [markdown]
# Operand B does not depend on the row of warps: warps 2 and 3 hold the same elements as warps 0 and 1. A basis vector of zeros
# says so.

# %%
draw_linear_layout(LinearLayout.from_atom(mma, "b", warps=(2, 2)))

# %% [markdown]
# Triton's own names for such layouts draw themselves too, on the smallest tensor that shows their pattern, or with
# `draw(layout, shape=...)` on yours. Its accumulators of this instruction, with the same four warps:

# %%
NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8])

# %% [markdown]
# ## wgmma: four warps, operands in shared memory
#
# Hopper's *wgmma* lets a *warpgroup* of 128 threads multiply 64 rows at once, and reads B straight from shared memory.
# Warp *w* has rows 16 *w* to 16 *w* + 15, each as in `mma.sync`.

# %%
draw_atom(get_atom("wgmma.m64n16k16.bf16"), lane=37)

# %% [markdown]
# Where B lies is told by a 64-bit *descriptor*: a start address and two strides, in units of 16 bytes, and the swizzle. `128B` is
# `Sw<3,4,3>` of notebook 3, for rows of 128 bytes. This B is *K-major*: the numbers along K, which are summed, are neighbours, and a
# row of shared memory is a column of B. Eight such rows are 1024 bytes; SBO, the *stride byte offset*, leads to the next eight. LBO, the
# *leading byte offset*, is not used here.

# %%
descriptor = SmemDescriptor(start_address=16384, leading_bytes=16, stride_bytes=1024, swizzle="128B")
descriptor

# %% [markdown]
# The next step along K is 16 elements of bfloat16, 32 bytes, further, inside the swizzled row. Only the start address changes:

# %%
draw_descriptor(descriptor.advance(32))

# %% [markdown]
# The hardware XORs *absolute* address bits. A tile that was permuted by bits of its own, counted from its first byte, must
# therefore start at a multiple of 1024 bytes, eight rows of 128, or say in the *base offset* how many rows behind one it starts:

# %%
canonical = tile_layout_k_major("bf16", 64, 64, "128B")
moved = tile_to_descriptor(canonical, "bf16", "128B", start_address=4480, pattern_start=4480)
print(moved.explain().splitlines()[-1])
at_zero = tile_to_descriptor(canonical, "bf16", "128B").addresses(64, 16, "bf16")
np.array_equal(moved.addresses(64, 16, "bf16"), at_zero + 4480)

# %% [markdown]
# **Question 5.** What is the base offset of such a tile that starts at byte 8832?

# %% tags=["question"]
base_offset = None  # your answer, a number

# %%
ask("04.base_offset", base_offset)

# %% [markdown]
# ## What 14 digits cost
#
# The accumulator C is float32, but a tensor core does not round as float32 does. One instruction cuts its products and C to
# multiples of one small number, which the largest of them sets, and cuts their sum to 24 binary digits; with 8-bit operands,
# to **14**, however wide C is. Nothing is rounded to nearest: an H100 was measured, and the rule gives every bit. Inside
# `arithmetic("chip")` atoms compute so. `e4m3` is a number of 8 bits, of which 4 are the exponent; 8193.5 + 32 should be 8225.5:

# %%
one, start = np.ones((64, 32)), np.full((128, 4), 8193.5, np.float32)
for name, dtype in (("wgmma.m64n8k32.e4m3", float8_e4m3fn), ("wgmma.m64n8k16.bf16", bfloat16)):
    atom = get_atom(name)
    operands = atom.fragment_a(one[:, : atom.shape[2]].astype(dtype)), np.ones((atom.shape[2], 8), dtype)
    with arithmetic("chip"):
        print(f"8193.5 + {atom.shape[2]} by {name}:", atom.mma(*operands, start)[0, 0])

# %% [markdown]
# Where all products are positive, nothing makes up for what is cut. The longer the sum, the larger it is against its next
# product:

# %%
a, b = rng.uniform(0.5, 1, (64, 8192)), rng.uniform(0.5, 1, (8192, 8))
print("K       bfloat16    e4m3")
for K in (128, 1024, 8192):
    lost = []
    for dtype in (bfloat16, float8_e4m3fn):
        rows, columns = a[:, :K].astype(dtype), b[:K].astype(dtype)
        exact = rows.astype(float) @ columns.astype(float)
        lost.append(np.abs(mma_sum(rows, columns, np.zeros((64, 8), np.float32)) / exact - 1).max())
    print(f"{K:5}   {lost[0]:.1e}     {lost[1]:.1e}")

# %% [markdown]
# ## MFMA: AMD's 64 lanes
#
# `mfma.16x16x32` of AMD's CDNA chips works with 64 lanes. A lane holds 8 neighbouring elements of a row of A: exactly one 16-byte load.
# C is the other way round: a lane holds four *rows* of one column.

# %%
mfma = get_atom("mfma.16x16x32.bf16")
draw_atom(mfma, lane=21)

# %% [markdown]
# **Question 6.** Which lane holds C[5, 3] here?

# %% tags=["question"]
amd_holder = None  # your answer, a number

# %%
ask("04.amd_holder", amd_holder)

# %%
A, B = rng.normal(size=(16, 32)).astype(bfloat16), rng.normal(size=(32, 16)).astype(bfloat16)
C = mfma.tile_c(mfma.mma(mfma.fragment_a(A), mfma.fragment_b(B), np.zeros((64, 4), np.float32)))
print("largest error:", np.abs(C - A.astype(float) @ B.astype(float)).max())

# %% [markdown]
# Next: [5. TMA](05_tma.ipynb): the copy engine that fills shared memory by itself, swizzle included.
