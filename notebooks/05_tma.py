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
# # 5. TMA
#
# The Tensor Memory Accelerator of Hopper copies whole boxes of a tensor into shared memory. One thread starts it; the
# engine computes the addresses, swizzles, fills with zeros what lies outside, and tells a barrier how many bytes have arrived.
# What it does was recorded on an H100, and the copies below give the same bytes.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.exercises import ask, hint, predict
from kvlab.hardware import (
    RaggedTMA3DTile,
    SharedMemBarrier,
    TmaDescriptor,
    create_kv_tile,
    create_tma_tile_gather4,
    tile_layout_k_major,
    tile_to_descriptor,
    tma,
    wavefronts,
)
from kvlab.memory import Memory, UnwrittenRead, bfloat16
from kvlab.viz import draw_tma_box

# %% [markdown]
# ## The descriptor
#
# A *descriptor* is made once, before the kernel: the tensor, the box of one copy, the swizzle. Here: boxes of 16 rows and
# 64 columns of a tensor of 64 x 128 numbers of float16. A row of the box is 128 bytes, which just fits the 128-byte swizzle.
# One copy names the element where its box begins, here row 16, column 64:

# %%
tensor = np.arange(64 * 128, dtype=np.float16).reshape(64, 128)
descriptor = TmaDescriptor.of(tensor, (16, 64), "128B")
draw_tma_box(descriptor, (16, 64))

# %% [markdown]
# The lower part is shared memory after the copy: `1,0` is vector 0 of row 1 of the box, and it lies at place 1, because the
# 128-byte mode is `Sw<3,4,3>` on byte addresses (notebook 3).
#
# **Guess.** How many passes does `ldmatrix.x4` take to read 16 rows of it, 32 bytes of each?

# %%
guess = predict(4, 8, 16, 32)
guess

# %%
image = descriptor.image(0)  # byte address of every element of the box
lane = np.arange(32)
read = wavefronts("ldmatrix.x4", image[lane % 16, lane // 16 * 8])
guess.compare(read.wavefronts)
read

# %% [markdown]
# The hardware has rules, and a broken one usually shows as an unspecific error, or as wrong numbers. Here each is named:

# %%
for box, swizzle in (((16, 64), "64B"), ((300, 64), "128B"), ((16, 4), "none")):
    try:
        TmaDescriptor.of(tensor, box, swizzle)
    except ValueError as error:
        print(error)

# %% [markdown]
# **Question 1.** Which is the longest row of a box of float32, in elements, under the 64-byte swizzle?

# %% tags=["question"]
longest = None  # your answer, a number of elements

# %%
ask("05.longest", longest)

# %% [markdown]
# ## Outside the tensor
#
# A box may hang over the edge, on any side. What is outside arrives as zeros, and is never read. The barrier counts the full
# box nevertheless: the kernel waits for the same number of bytes in every case.

# %%
smem, barrier = Memory(descriptor.image_bytes, name="shared memory"), SharedMemBarrier()
barrier.expect_bytes(descriptor.transaction_bytes)
tma.load(descriptor, (56, 64), smem, 0, barrier)
column_0 = smem.load(descriptor.image(0)[:, 0], np.float16, 1)[:, 0]
print("column 0 of the box:", column_0.astype(int))
barrier.wait(0)  # would raise if a single byte were missing
print("the barrier got its", descriptor.transaction_bytes, "bytes")
draw_tma_box(descriptor, (56, 64))

# %% [markdown]
# **Question 2.** The box starts at row -4 and column 0. How many of its 16 rows are zeros?

# %% tags=["question"]
zero_rows = None  # your answer, a number

# %%
ask("05.zero_rows", zero_rows)

# %% [markdown]
# ## Absolute addresses
#
# The swizzle reads the bits of the absolute address. A box at a multiple of 1024 bytes sees the pattern from its start; 128
# bytes further every row uses the pattern of the next one. The copy is correct either way, if whoever reads does the same.

# %%
draw_tma_box(TmaDescriptor.of(tensor, (8, 64), "128B"), address=1024 + 128)

# %% [markdown]
# A box narrower than its swizzle is legal, and a trap: its rows still lie a swizzle width apart, with gaps that nobody writes.

# %%
narrow = TmaDescriptor.of(tensor, (8, 16), "128B")
draw_tma_box(narrow)

# %% [markdown]
# ## Debug: bytes that nobody wrote
#
# A kernel reads that box as if its rows of 32 bytes lay one after another: vector `vector`, 0 or 1, of row `row` of the box.

# %%
def byte_of(row, vector):
    return row * 32 + vector * 16


smem = Memory(narrow.image_bytes, name="shared memory")
tma.load(narrow, (0, 0), smem, 0)
r, v = np.indices((8, 2))
try:
    smem.load(byte_of(r, v), np.float16, 8)
except UnwrittenRead as error:
    print(error)

# %% [markdown]
# **Question 3.** Write the function as it should be. The box starts at byte 0.

# %% tags=["question"]
mended = None  # your answer: def mended(row, vector): return ...

# %%
ask("05.mended", mended)

# %% [markdown]
# ## Tiles of a KV cache
#
# Keys are a tensor `[tokens, heads, depth]`. A tile of one head is `[BN, 1, BK]`: 8 tokens, one head, 128 columns. In bfloat16 a
# row of it is 256 bytes, twice the swizzle, so two boxes of 64 columns fill the tile, one after another in shared memory. At the end
# of the cache the tokens that do not exist arrive as zeros.

# %%
keys = np.random.default_rng(5).normal(size=(36, 2, 128)).astype(bfloat16)
kv = create_kv_tile(keys, BN=8, BK=128)
print("boxes start at elements", kv.offsets, "of the tile; bytes for the barrier:", kv.transaction_bytes)
draw_tma_box(kv, (32, 1, 0))

# %% [markdown]
# **Question 4.** At which byte of the tile's shared memory does vector 9 (columns 72 to 79) of token 1 of the tile start? Read
# it off the picture, or calculate: which box, which row, which place.

# %% tags=["question"]
byte = None  # your answer, a number

# %%
ask("05.byte", byte)

# %% [markdown]
# The tensor core finds the tile through a *matrix descriptor* (notebook 4). Both must agree about every byte. They do: the
# addresses that `wgmma` reads are those that the TMA wrote.

# %%
layout = tile_layout_k_major(bfloat16, 8, 64, "128B")
operand = tile_to_descriptor(layout, bfloat16, "128B")
written = kv.descriptor.image(0)[:, 0, :16]
print("the same bytes:", np.array_equal(operand.addresses(8, 16, bfloat16), written))
operand

# %% [markdown]
# ## Ragged ends
#
# Sequences of a batch are stored one after another, so the row after the end of one belongs to the next: no edge of the tensor is there
# to stop a store. The trick is a tensor that starts too early, and one dimension that counts the rows left. The hardware's
# own bounds check then drops the rest. Here a tile of 8 rows stores only 5 of them, from row 3 on:

# %%
out = np.zeros((12, 1, 8), np.float32)
tile = RaggedTMA3DTile.of(out, BM=8, BN=8, swizzle="32B")
smem = Memory(8 * 8 * 4)
smem.store(0, np.arange(1, 65, dtype=np.float32))
tile.async_copy_from_col(0, smem, 0, ragged_idx=3, dynamic_dim=5, middle_idx=0)
print("rows that were written:", np.flatnonzero(out[:, 0, 0]))

# %% [markdown]
# Along a row the edge is coarser. A store writes whole chunks of 16 bytes: the innermost extent is rounded up, whatever the
# swizzle (120 stores of an H100 show it). A view of 61 columns of float16 ends 6 bytes inside a chunk, and the three numbers
# behind each of its rows are lost. A load is clipped to the element. So a kernel may store by TMA where rows end with a
# multiple of 16 bytes, as heads of 64 or 128 numbers do, and nowhere else.

# %%
storage = np.full((8, 64), 7, np.float16)
view = TmaDescriptor.of(storage[:, :61], (4, 16), "32B")
smem = Memory(view.image_bytes)
smem.store(view.image(0), np.ones((4, 16, 1), np.float16))
tma.store(view, (2, 48), smem, 0)
print("row 2 from column 58 on:", storage[2, 58:], "   a store writes", view.stored_extent, "columns of", view.shape[1])
draw_tma_box(view, (2, 48))

# %% [markdown]
# ## Gathered rows
#
# Blackwell's TMA takes four row numbers instead of a box: rows from anywhere, in any order, as sparse attention
# wants them, 64 columns of each here. The image is the same as that of a box.

# %%
gather = create_tma_tile_gather4(tensor, 64, "128B", tile_height=8)
draw_tma_box(gather, rows=[3, 1, 40, 1, 5, 9, 2, 6])

# %% [markdown]
# **Question 5.** How many bytes does a barrier have to expect for a gather of 16 such rows?

# %% tags=["question"]
expected = None  # your answer, a number

# %%
ask("05.expected", expected)

# %% [markdown]
# This was the last of the notebooks about layouts. Next: [6. KV caches](06_kv_caches.ipynb), the pages that the tiles come from.
