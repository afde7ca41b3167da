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
# # 2. Layouts
#
# Memory is one long row of bytes, a matrix is a table. A **layout** says which place of the row each entry of the table
# has. GPU kernels are full of layouts: of a tensor in DRAM, of a tile in shared memory, of the registers of 128 threads.
# This notebook reads them, draws them and calculates with them. It needs NumPy only.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.exercises import ask, hint, predict
from kvlab.layout import (
    Layout,
    TileTensor,
    blocked_product,
    coalesce,
    complement,
    compose,
    right_inverse,
    zipped_divide,
)
from kvlab.viz import draw, draw_layout, draw_thread_values

# %% [markdown]
# ## Shape and stride
#
# A layout is written `shape:stride`, one of each for every direction (*mode*). The offset of a coordinate is the sum of
# coordinate times stride. In `(4,8):(8,1)` a step down costs 8, a step to the right costs 1: a row-major matrix of 4 rows
# and 8 columns. Every layout draws itself; rest the pointer on a cell to read its details.

# %%
Layout("(4,8):(8,1)")

# %% [markdown]
# The same shape with other strides is another picture: `(4,8):(1,4)` counts down the columns first.

# %%
column_major = Layout.col_major(4, 8)
print(column_major, "entry (2, 3) is at", column_major(2, 3))
column_major

# %% [markdown]
# **Question 1.** A row-major matrix of 64 rows and 128 columns: at which offset is entry (3, 5)?

# %% tags=["question"]
offset = None  # your answer, a number

# %%
ask("02.offset", offset)

# %% [markdown]
# Arrays of coordinates give arrays of offsets: nothing here loops over elements.

# %%
column_major(np.arange(4), 3)

# %% [markdown]
# ## Modes of modes
#
# A mode may itself be a table. `((2,2),8):((1,16),2)` has 4 rows, but they come in two pairs: the two rows of a pair are
# 1 apart, the pairs 16. Such *nested* layouts describe blocked storage; no stride for four rows in one mode would do it.

# %%
blocked = Layout("((2,2),8):((1,16),2)")
print("row 3 is row", (3 % 2, 3 // 2), "-> offset", blocked(3, 0), "=", blocked((1, 1), 0))
blocked

# %% [markdown]
# A single number is a coordinate too: it counts through the modes, the first one fastest. `idx2crd` tells which entry
# a number means.

# %%
[(i, blocked.idx2crd(i), blocked(i)) for i in (0, 1, 2, 4, 13)]

# %% [markdown]
# `size` is how many coordinates there are, `cosize` one more than the largest offset: how much memory the layout needs.
# They differ when there are holes (padding), or when several coordinates share an offset (stride 0, a broadcast).
#
# **Guess.** `(4,8):(0,1)` has 32 coordinates, and a row costs nothing. How much memory does it need?

# %%
guess = predict(1, 4, 8, 32)
guess

# %%
padded, broadcast = Layout("(4,8):(9,1)"), Layout("(4,8):(0,1)")
guess.compare(broadcast.cosize)
for layout in (padded, broadcast):
    print(layout, "size", layout.size, "cosize", layout.cosize)
padded

# %% [markdown]
# **Question 2.** How many numbers must be allocated for a tile of 32 rows and 33 columns whose rows are padded to 40?

# %% tags=["question"]
numbers = None  # your answer, a number

# %%
ask("02.numbers", numbers)

# %% [markdown]
# ## Debug: a tile that overwrites itself
#
# A kernel keeps 32 rows of 33 numbers in shared memory. Its author gave them this layout, and reads other numbers than he wrote:

# %%
crowded = Layout("(32,33):(32,1)")
print(crowded.size, "entries have", len(np.unique(crowded.offsets())), "places")

# %% [markdown]
# **Question 3.** Write the layout that has a place for each entry, row after row, and no more places than it needs.

# %% tags=["question"]
mended = None  # your answer: a Layout, or its text

# %%
ask("02.mended", mended)

# %% [markdown]
# ## Views: tile, vectorize, distribute
#
# A `TileTensor` is a memory seen through a layout. Three steps take a kernel from the whole tensor to what one thread
# moves; none of them copies anything. First `tile`: the block number (1, 1) of 4 rows and 8 columns. The picture shows
# it inside the whole.

# %%
tensor = TileTensor.from_numpy(np.arange(8 * 16, dtype=np.float32).reshape(8, 16))
tensor.tile((4, 8), (1, 1))

# %% [markdown]
# Then `vectorize`: hardware moves up to 16 bytes at once, which is 4 numbers of float32.

# %%
tensor.vectorize(1, 4)

# %% [markdown]
# Then `distribute`: a layout of threads is dealt out over the vectors, like cards, until all are given away. Sixteen
# threads, as 4 rows of 4, cover half of this tensor in a round, so each gets two vectors.

# %%
threads = Layout.row_major(4, 4)
shares = tensor.vectorize(1, 4).distribute(threads, np.arange(16))
shares

# %%
print("thread 5 loads", shares.load()[5].reshape(-1))

# %% [markdown]
# **Question 4.** Deal the same vectors out to sixteen threads that stand as `(8,2)` row-major. Which two columns of the
# tensor do the vectors of thread 3 start at?

# %% tags=["question"]
columns = None  # your answer, a list of two numbers

# %%
ask("02.columns", columns)

# %%
draw(tensor.vectorize(1, 4).distribute(Layout.row_major(8, 2), np.arange(16)))

# %% [markdown]
# ## Calculating with layouts
#
# Layouts are functions, so they can be put one after another. **Composition** `compose(a, b)` is "first b, then a": b
# chooses coordinates of a, and the result is a layout again. Here b takes every second column of a row-major matrix; `None` leaves
# the rows as they are.

# %%
matrix = Layout.row_major(4, 8)
every_second = compose(matrix, (None, Layout("4:2")))
print(every_second)
inside = np.zeros((4, 8), bool)
inside[:, ::2] = True
draw_layout(matrix, inside=inside, title=f"{every_second} inside {matrix}")

# %% [markdown]
# `coalesce` writes the same function with as few modes as possible: a matrix without holes, read in its own order, is just
# a row.

# %%
print(coalesce(Layout.col_major(4, 8)), "but", coalesce(Layout("(4,8):(1,8)")))

# %% [markdown]
# **Complement** is "what is missing": together with the layout it reaches every offset exactly once. A thread that takes
# `4:2` (offsets 0, 2, 4, 6) leaves these starts to the others, up to 24:

# %%
taken = Layout("4:2")
rest = complement(taken, 24)
print(rest, "->", [rest(i) for i in range(rest.size)])
sums = (taken.offsets()[:, None] + rest.offsets().ravel()[None, :]).ravel()
print("every offset once:", np.array_equal(np.sort(sums), np.arange(24)))

# %% [markdown]
# **Divide** uses both to cut a layout into tiles: mode 0 walks inside a tile, mode 1 from tile to tile. This is what
# `tile` did above.

# %%
tiles = zipped_divide(Layout.row_major(8, 16), (4, 8))
print(tiles)
print("tile 3 starts at", tiles(0, 3), "and its second row at", tiles(1, 3))
draw_layout(tiles, tiles=True)

# %% [markdown]
# **Product** is the other direction: a block, repeated.

# %%
blocked_product(Layout.row_major(2, 4), Layout.row_major(2, 3))

# %% [markdown]
# **Question 5.** In the product above, at which offset does the block in the lower right corner start?

# %% tags=["question"]
start = None  # your answer, a number

# %%
ask("02.start", start)

# %% [markdown]
# **Inverse**: from the offset back to the number of the coordinate.

# %%
row_major = Layout.row_major(4, 8)
inverse = right_inverse(row_major)
print(inverse, all(row_major(inverse(i)) == i for i in range(row_major.size)))

# %% [markdown]
# ## Layouts of threads
#
# A tensor core leaves its result spread over the registers of a warp. That is a layout too: from (thread, value) to the
# entry of a 16 x 8 matrix, counted down the columns. Thread 5 is picked out.

# %%
accumulator = Layout("((4,8),(2,2)):((32,1),(16,8))")
draw_thread_values(accumulator, (16, 8), thread=5)

# %% [markdown]
# ## Build one
#
# **Question 6.** A tile of 8 rows and 32 columns is stored row by row, each row padded to 40 numbers. Write the layout of its
# *transpose* over the same memory: it takes (column, row). All 256 entries are tried.

# %% tags=["question"]
transposed = None  # your answer: a Layout, or its text, as "(2,3):(3,1)"

# %%
ask("02.transposed", transposed)

# %% [markdown]
# Next: [3. Swizzles and banks](03_swizzles_and_banks.ipynb): why a row-major tile in shared memory can need eight times the passes,
# and the one XOR that repairs it.
