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
# # 6. KV caches
#
# A model that writes text keeps a key and a value of every token it has read: the KV cache. A serving system holds the
# caches of many sequences in one pool of memory. This notebook looks at the pool: which byte holds which number, what
# changes when the numbers are quantised to 8 bits, and how a kernel picks single tokens out of it. NumPy only.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection, PagePool, from_dense
from kvlab.exercises import ask, hint, predict
from kvlab.memory import Memory, as_dtype
from kvlab.viz import draw_gather4, draw_page_table, draw_quantised_page, explore

# %% [markdown]
# ## A page table
#
# Three sequences of different lengths, a model of two layers with two KV heads of 64 numbers. Nobody knows how long a
# sequence will become, so none gets one large piece of memory. The pool is cut into *pages* of 16 tokens, and the *lookup
# table* says which page holds tokens 0 to 15 of a sequence, which 16 to 31, and so on. `from_dense` builds such a pool out
# of plain arrays; it shuffles the pages and fills every slot that nobody should read with NaN.

# %%
LAYERS, HEADS, D, PAGE = 2, 2, 64, 16
lengths = [37, 11, 64]
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, LAYERS, len(lengths), max(lengths), HEADS, D)).astype(as_dtype("bf16"))
pool = from_dense(k, v, lengths, PAGE, shuffle=4, spare_pages=3)
print(pool)
print(pool.lookup_table[:, :6])
draw_page_table(pool.lookup_table, lengths, PAGE, pages=pool.total_num_pages)

# %% [markdown]
# A row of the table is longer than the sequence needs. What stands behind the last page is a *sentinel*, here 11: the number of
# pages that the pool deals. Memory has one more, the *null page*, full of NaN: a kernel that goes there meets nobody's keys, and all
# is 12 pages in what is printed. In NumPy it is an error:

# %%
keys = pool.get_key_cache(1)  # K of layer 1: a view, nothing is copied
try:
    keys.load(bs=1, head_idx=0, tok_idx=16, head_dim_idx=0)
except ValueError as error:
    print(error)

# %% [markdown]
# **Question 1.** In which page of the pool, and in which slot of it, does token 40 of sequence 2 lie? The picture has the
# answer.

# %% tags=["question"]
page_and_slot = None  # your answer, e.g. (3, 5)

# %%
ask("06.page_and_slot", page_and_slot)

# %% [markdown]
# ## The byte of a number
#
# All pages of all layers are one array, `[pages, K or V, layers, slots, heads, dims]`. K of one layer is a view of it. From
# a token to the next lie all heads.
#
# **Guess.** A page of K of one layer has 16 x 2 x 64 numbers. How many times as far is it to the next page of K of that layer?

# %%
guess = predict(1, 2, 4, 8)
guess

# %%
guess.compare(keys.strides[0] // (PAGE * HEADS * D))
print("storage        ", pool.blocks.shape, pool.blocks.dtype)
print("view of K      ", keys.blocks.shape)
for name, stride in zip(("page", "token", "head", "dim"), keys.strides, strict=True):
    print(f"from {name:5} to the next: {stride:6} elements, {2 * stride:6} bytes")

# %% [markdown]
# From a page to the next lie K *and* V of *all* layers. So the byte of (token, head, dim) is a sum of products. `block_paged_ptr` makes the same sum and gives a pointer that knows
# its memory and refuses to leave it. Its bytes count from the first of the view.

# %%
sequence, token, head, dim = 0, 36, 1, 5
page = int(pool.lookup_table[sequence, token // PAGE])
place = (page, token % PAGE, head, dim)
by_hand = 2 * sum(index * stride for index, stride in zip(place, keys.strides, strict=True))
pointer = keys.block_paged_ptr(sequence, token, head, dim)
print("page, slot, head, dim:", place)
print(f"byte {by_hand} of the view; the pointer says {int(pointer.byte_address)}")
print("the number there:", pointer.load(1).item(), " in k:", k[1, sequence, token, head, dim])

# %% [markdown]
# Choose another token, head or number, and watch the sum:

# %%
explore(pool, layer=1)

# %% [markdown]
# All indices may be arrays. One call finds every number of a sequence, whichever pages they are in:

# %%
everything = keys.load(2, np.arange(HEADS), np.arange(64)[:, None], 0, width=D)  # [tokens, heads, dims]
print(everything.shape, "equal to the dense keys:", bool((everything == k[1, 2]).all()))

# %% [markdown]
# **Question 2.** How many bytes lie between head 0 of token 15 of sequence 2 and head 0 of its token 16? (Their pages are
# in the picture. The number is negative if token 16 lies before token 15.)

# %% tags=["question"]
distance = None  # your answer, in bytes

# %%
ask("06.distance", distance)

# %% [markdown]
# ## Who owns a page
#
# `PagePool` deals the pages. Two answers to the same prompt share its pages until one of them writes into a shared page:
# then it gets a copy (*copy on write*). `0:1 +1` is page 1 of sequence 0, and one more sequence has it.

# %%
owners = PagePool(num_pages=8, page_size=PAGE)
prompt, _ = owners.allocate(37)
answer = owners.fork(prompt)
copies = owners.append(answer, 1)  # token 37 would go into slot 5 of a page that both hold
print(copies)
draw_page_table(owners.lookup_table([prompt, answer]), [37, 38], PAGE, pages=8, names=["prompt", "answer"])

# %% [markdown]
# ## A quantised page
#
# 8 bits for a number instead of 16 halve what attention reads. `float8_e4m3fn` has 3 bits of mantissa and ends at 448, so
# every group of numbers is divided by a *scale* of its own before it is rounded. Here 64 dims share a scale: two for each
# head of 128 numbers.

# %%
GROUP, D8 = 64, 128
fp8 = as_dtype("fp8")
small = PagedKVCacheCollection.allocate(
    KVCacheStaticParams(num_heads=2, head_size=D8),
    num_pages=4,
    page_size=PAGE,
    num_layers=1,
    batch_size=1,
    max_length=40,
    dtype=fp8,
    scale_dtype="float32",
    quantization_granularity=GROUP,
)
small.lookup_table[0, :2] = [3, 0]
quantised = small.with_lengths([27], 0).get_key_cache(0)

x = rng.standard_normal((27, 2, D8)).astype(np.float32)  # [tokens, heads, dims]
x[5, 0, 70] *= 6  # an outlier
scale = np.abs(x.reshape(27, 2, 2, GROUP)).max(axis=-1) / 448
tokens, heads = np.arange(27)[:, None], np.arange(2)
quantised.store(0, heads, tokens, 0, (x / np.repeat(scale, GROUP, axis=-1)).astype(fp8))
quantised.store_scale(0, heads, tokens, 0, scale)
draw_quantised_page(quantised, page=0, mark=(5, 70))

# %% [markdown]
# The outlier costs its neighbours precision: the scale of its group is larger, so their stored numbers are smaller. The
# other group of the same token does not notice; that is what groups are for.
#
# A load multiplies for you. It takes **one** scale, that of its first element, so it must stay in a group:

# %%
print("stored ", quantised.load_quantized(0, 0, 5, 68, width=4))
print("loaded ", quantised.load(0, 0, 5, 68, width=4, output_dtype="float32"))
print("exact  ", x[5, 0, 68:72])
try:
    quantised.load(0, 0, 5, 60, width=8, output_dtype="float32")
except ValueError as error:
    print(error)

# %% [markdown]
# **Question 3.** How many bytes does K of one token take, for both heads together, scales included?

# %% tags=["question"]
nbytes = None  # your answer

# %%
ask("06.nbytes", nbytes)

# %% [markdown]
# ## Gathering single tokens
#
# Sparse attention asks for a list of single tokens. An index of that list is `page * page_size + slot`. Blackwell's TMA
# fetches four arbitrary rows of a matrix with one instruction, *gather4*. The matrix is the pool from the first token of our layer
# on, a row for each token; `get_tma_row` turns the index into its row. Between two pages of this layer lie those of the other
# layers, so the row is not the index. (The cache is that of a DeepSeek model: one head of 512 + 64 numbers, no V.)

# %%
latent = PagedKVCacheCollection.allocate(
    KVCacheStaticParams(num_heads=1, head_size=576, is_mla=True),
    num_pages=6,
    page_size=PAGE,
    num_layers=3,
    batch_size=1,
    max_length=80,
)
latent.blocks[...] = rng.standard_normal(latent.blocks.shape).astype(latent.dtype)
cache = latent.get_key_cache(1)
wanted = np.array([53, 2, 89, 17, 3, 69, 50, 55])
tile = cache.create_gather4_tma_tile(tile_width=576, tile_height=8, swizzle_mode="128B")
draw_gather4(cache, tile, wanted)

# %% [markdown]
# **Question 4.** The pool has three layers. Which row is index 37, page 2, slot 5, counted as in the picture?

# %% tags=["question"]
row = None  # your answer

# %%
ask("06.row", row)

# %% [markdown]
# ## Debug: tokens of another layer
#
# Somebody gathers from the whole pool, whose row 0 is that of layer 0; he wants layer 1. He thought that a token's three rows lie side
# by side:

# %%
def row_of(index):
    return index * 3 + 1


rows = latent.blocks.reshape(-1, 576)  # the whole pool, a row for each token and layer
page, slot = np.divmod(wanted, PAGE)
for index, p, s in zip(wanted[:4], page, slot, strict=False):
    right = (rows[row_of(index)] == cache.blocks[p, s, 0]).all()
    print(f"index {index:2}: row {row_of(index):3}, {'right' if right else 'wrong'}")

# %% [markdown]
# **Question 5.** Write the function as it should be. It is tried on all 96 tokens of the pool.

# %% tags=["question"]
mended = None  # your answer: def mended(index): return ...

# %%
ask("06.mended", mended)

# %% [markdown]
# And executed: eight rows of 1152 bytes land in shared memory, in nine groups of 64 columns, each swizzled. We read them
# back by undoing the swizzle, vector `c` of row `r` is at place `c ^ (r % 8)`, and compare with the pool.

# %%
smem = Memory(tile.transaction_bytes, name="shared memory")
tile.async_copy_gather4_tile(smem, 0, cache.get_tma_row(wanted))
image = smem.image("bf16").reshape(9, 8, 8, 8)  # [column groups, rows, places, elements of 16 bytes]
r, c = np.arange(8)[:, None], np.arange(8)
gathered = image[:, r, c ^ r].transpose(1, 0, 2, 3).reshape(8, 576)
print("bytes:", tile.transaction_bytes)
print("equal to the tokens:", bool((gathered == cache.blocks[wanted // PAGE, wanted % PAGE, 0]).all()))

# %% [markdown]
# Next: [7. KVBuffer](07_kv_buffer.ipynb): how a whole tile of keys travels from these pages into shared memory.
