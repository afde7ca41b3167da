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
# # 18. Linear layouts
#
# Triton's compiler knows one kind of layout, the *linear layout*: a matrix of bits. Which thread holds which element of a tensor, what lies where in shared
# memory, what a conversion has to move: all of it is read off such matrices, and TTGIR and Gluon's `DistributedLinearLayout` are full
# of them. This notebook reads them, reduces along them, and converts between them. NumPy only; no compiler is asked.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.exercises import ask, hint, predict
from kvlab.hardware import wavefronts
from kvlab.layout.encodings import (
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    SliceLayout,
    SwizzledSharedLayout,
)
from kvlab.viz import draw_linear_layout

# %% [markdown]
# ## Bits
#
# `BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0])` gives each thread 1 x 4 neighbours, a warp 8 x 4 threads, a program 2 x 1 warps; the
# last list says that columns come first. On a tensor of 16 x 16 all extents are powers of two. The linear layout says where the
# indices 1, 2, 4, ... of register, lane and warp go, its *basis vectors*; any other index is the exclusive or of these.

# %%
blocked = BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0]).to_linear_layout((16, 16))
blocked

# %% [markdown]
# The same basis vectors in binary digits. A column is a bit of an index, a row is a bit of a coordinate: lane 4 steps one row down.

# %%
draw_linear_layout(blocked, bits=True)

# %% [markdown]
# **Question 1.** Which element (row, column) has register 3 of lane 13 of warp 1? Take the numbers apart into bits, 13 = 8 + 4 + 1, and
# put their columns together.

# %% tags=["question"]
element = None  # your answer, e.g. (0, 0)

# %%
ask("18.element", element)

# %% [markdown]
# Shared memory has one index, the offset. A swizzle is a matrix, too: a bit of the row also changes bits of the column. That is why
# linear layouts add with exclusive or: `shape:stride` has no name for this one.

# %%
swizzled = SwizzledSharedLayout(8, 1, 8, [1, 0]).to_linear_layout((64, 64))
draw_linear_layout(swizzled, bits=True)

# %% [markdown]
# ## Build one
#
# `ldmatrix.x4` takes the address of a row of 8 numbers from each lane. For a tile of 16 x 16, lanes 0 to 15 point to the first 8 columns
# of rows 0 to 15, lanes 16 to 31 to the last 8 columns of the same rows.
#
# **Question 2.** Write the basis vectors of the lane, those of 1, 2, 4, 8 and 16, each as [row, column].

# %% tags=["question"]
bases = None  # your answer, e.g. [[0, 1], [0, 2], ...]

# %%
ask("18.bases", bases)

# %% [markdown]
# ## Reductions
#
# A row maximum of scores: 64 x 64 of them, as four warps hold them after `mma.sync`. Whoever reduces along the columns looks at the
# bits that step along the columns. Those of the register are added up within the thread, those of the lane by shuffles, one for each
# bit, those of the warp through shared memory.

# %%
accumulators = NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
scores = accumulators.to_linear_layout((64, 64))
draw_linear_layout(scores, bits=True)

# %% [markdown]
# **Guess.** How many shuffles does a row's maximum take?

# %%
guess = predict(0, 1, 2, 5)
guess

# %%
along = {name: [bit for bit, vector in enumerate(vectors) if vector[1]] for name, vectors in scores.bases.items()}
guess.compare(len(along["lane"]))
print("bits that step along the columns:", along)

# %% [markdown]
# The reduction itself, on random numbers: `held` is what each thread has, [warps, lanes, registers].

# %%
x = np.random.default_rng(18).standard_normal((64, 64))
warp, lane, register = (np.arange(scores.in_dims[name]) for name in ("warp", "lane", "register"))
held = x[scores(register=register, lane=lane[:, None], warp=warp[:, None, None])[:2]]
bits = held.reshape(4, 32, *[2] * len(scores.bases["register"]))  # register bits, the highest first
own = bits.max(axis=tuple(-1 - bit for bit in along["register"])).reshape(4, 32, -1)  # within the thread
for bit in along["lane"]:
    own = np.maximum(own, own[:, lane ^ (1 << bit)])  # a shuffle: each lane asks the lane whose number differs in this bit
print("of", held.shape[-1], "numbers a thread keeps", own.shape[-1], "maxima")
print("right:", bool(set(np.unique(own)) == set(x.max(axis=1))))

# %% [markdown]
# **Question 3.** How many numbers does a thread reduce by itself for one of its rows, before the first shuffle?

# %% tags=["question"]
alone = None  # your answer, a number

# %%
ask("18.alone", alone)

# %% [markdown]
# The result has a layout of its own, `SliceLayout`: the parent's without the reduced dimension. Bits that stepped along the columns step
# nowhere now, so the lanes hold copies: whoever asks for the maximum of a row has it already.

# %%
draw_linear_layout(SliceLayout(1, accumulators).to_linear_layout((64,)), bits=True)

# %% [markdown]
# ## Debug: a sum that is too large
#
# A program of four warps adds up all elements of a tile: each thread its own, then all threads together. The layout is a blocked one,
# and the tile is smaller than the layout reaches.

# %%
wide = BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
small = wide.to_linear_layout((16, 16))
place = small(register=np.arange(4), lane=lane[:, None], warp=warp[:, None, None])[:2]
print(f"all threads together: {x[place].sum():.4f}, the tile: {x[:16, :16].sum():.4f}")
draw_linear_layout(small, bits=True)

# %% [markdown]
# **Question 4.** By which number must the sum of all threads be divided for a tile of 8 x 16 with this layout?

# %% tags=["question"]
copies = None  # your answer, a number

# %%
ask("18.copies", copies)

# %% [markdown]
# ## Conversions
#
# `convert_layout` from A to B: who holds an element in A, who in B? A first, then B backwards: `A.invert_and_compose(B)` is the matrix
# from indices of A to indices of B. If no bit changes lane or warp, registers are renamed and nothing moves; if no bit changes the
# warp, shuffles do; else the tile goes through shared memory.

# %%
def way(a, b):
    """How elements come from layout a to layout b: "registers", "shuffles" or "shared memory"."""
    moves = a.invert_and_compose(b)
    stays = {
        name: all(v[axis] == (1 << bit) * (of == name) for of, vectors in moves.bases.items() for bit, v in enumerate(vectors))
        for axis, name in enumerate(moves.out_dims)
    }
    return "shared memory" if not stays["warp"] else "shuffles" if not stays["lane"] else "registers"


rows_of_8 = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]).to_linear_layout((64, 64))
rows_of_2 = BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]).to_linear_layout((64, 64))
operand = DotOperandLayout(0, accumulators, 2).to_linear_layout((64, 64))
print(f"rows of 8 to rows of 2: {way(rows_of_8, rows_of_2)}")
print(f"rows of 8 to the accumulators: {way(rows_of_8, scores)}")
print(f"the scores to the operand P: {way(scores, operand)}")

# %% [markdown]
# The last line is why attention on these instructions needs no shuffle (notebook 4). Its matrix is the identity:

# %%
draw_linear_layout(scores.invert_and_compose(operand), bits=True)

# %% [markdown]
# **Question 5.** The same kernel with `warps_per_cta=[2, 2]`: two warps share the columns of the scores, but each needs all columns of P
# as its operand. Which way do the scores go: "registers", "shuffles" or "shared memory"?

# %% tags=["question"]
path = None  # your answer, a text

# %%
ask("18.path", path)

# %% [markdown]
# ## Through shared memory, without a conflict
#
# `registers.invert_and_compose(shared)` is the way from registers to offsets, so it gives the addresses of every store and load. Rows of
# 8 numbers are written, 16 bytes a lane, and read as the accumulators are held, 4 bytes a lane.
#
# **Guess.** Without a swizzle: how many passes does such a load take?

# %%
load = predict(1, 2, 4, 8)
load

# %%
plain = SwizzledSharedLayout(1, 1, 1, [1, 0]).to_linear_layout((64, 64))


def passes(registers, shared, instruction):
    """Of the first instruction of warp 0."""
    offset = registers.invert_and_compose(shared)(register=0, lane=lane, warp=0)[0]
    return wavefronts(instruction, 2 * offset)


load.compare(passes(scores, plain, "ld.shared.b32").wavefronts)
for name, shared in {"plain": plain, "swizzled": swizzled}.items():
    store, read = passes(rows_of_8, shared, "st.shared.b128"), passes(scores, shared, "ld.shared.b32")
    print(f"{name:8} stores: {store.wavefronts} passes, ideal {store.ideal}; loads: {read.wavefronts}, ideal {read.ideal}")

# %% [markdown]
# The three numbers of `SwizzledSharedLayout(8, 1, 8)` are vectors of 8, another order each 1 row, 8 orders; the compiler picks them by
# the same rule: no two lanes of a phase in one bank. What it picked in a kernel of yours shows [15. X-ray](15_xray.ipynb);
# `kvlab.rosetta` reads layouts from the text of TTGIR.
