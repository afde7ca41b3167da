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
# # 1. Follow one token
#
# A language model has read a prompt of 299 tokens. For each of them it keeps a key and a value: the KV cache. When it
# writes its next word, every query head multiplies its query with every key. This notebook follows **one key vector** of
# a real model, SmolLM2-135M, from the page where it lies in DRAM to the lane of the tensor core that multiplies it, on a
# Hopper GPU (`sm_90`). Nothing here needs a GPU: it is NumPy, and every byte is where the hardware has it.
#
# The model has 9 query heads and 3 KV heads: heads 0 to 2 share the keys and values of KV head 0, and so on (*grouped-query
# attention*). A head's key has 64 numbers.
#
# Four questions stop you on the way. Write your answer into the cell; `ask` tells whether it is right, `hint` helps if you call
# it. Before some pictures you are asked for a guess: make it, it is kept until the picture has been seen.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import numpy as np

from kvlab.attention import explain, mha_decode
from kvlab.attention.mha_decode.reference import reference
from kvlab.data import load_smollm2
from kvlab.demo.pictures import byte_path
from kvlab.demo.steps import paged_cache
from kvlab.exercises import ask, hint, predict
from kvlab.hardware import wavefronts
from kvlab.staging import KVCacheIterator, MmaSyncShape, Traffic
from kvlab.viz import draw_atom, draw_cure, draw_page_table, draw_path_of_a_byte, draw_shared_memory

capture = load_smollm2()
LAYER, HEAD, TOKEN = 1, 2, 137  # the second captured layer (14 of the model), KV head 2, the 138th token
print(f"{capture.metadata['model']}: layers {capture.layers}")
print(f"K is {capture.k.shape} [layers, tokens, KV heads, head dimension], {capture.k.dtype}")

# %% [markdown]
# Here is the vector: 64 numbers of bfloat16, 128 bytes. Everything below is about where these 128 bytes are.

# %%
key = capture.k[LAYER, TOKEN, HEAD]
key[:8], key.nbytes

# %% [markdown]
# ## In DRAM: pages
#
# Serving systems do not keep the keys of a sequence in one piece. The cache is a pool of *pages* of 16 tokens; a *lookup
# table* says which page holds tokens 0 to 15, which 16 to 31, and so on. Our pool is shuffled on purpose, and every slot
# that no token has filled holds NaN, so that reading one would show.

# %% [markdown]
# **Question 1.** In which slot of its page does token 137 lie? (A page holds 16 tokens.)

# %% tags=["question"]
slot = None  # your answer, a number

# %%
ask("01.slot", slot)

# %% [markdown]
# The picture shows the table, the pages and, outlined, our token. Look at the order of the pages: it is not that of the tokens.

# %%
pool = paged_cache(capture, page_size=16)
keys = pool.get_key_cache(LAYER)
draw_page_table(
    pool.lookup_table, [capture.prompt_tokens], 16, pages=pool.total_num_pages, token=(0, TOKEN), names=["the prompt"]
)

# %% [markdown]
# The address follows from four *strides*, the steps from a page, a slot, a head and a number to the next:
#
# byte = 2 x (page x page stride + slot x token stride + head x head stride + number)
#
# Between two tokens of a page lie all heads; between two pages lie K and V of all captured layers. The byte is counted from the
# first key of our layer. Offsets are 64-bit: a pool easily has more than $2^{31}$ elements.

# %%
pointer = keys.block_paged_ptr(0, TOKEN, HEAD)
page, token, head, _ = keys.strides
print(f"2 x ({pool.lookup_table[0, TOKEN // 16]} x {page} + {TOKEN % 16} x {token} + {HEAD} x {head})", end=" = ")
print(f"byte {int(pointer.byte_address)}; the 128 bytes there are our key:", np.array_equal(pointer.load(64), key))

# %% [markdown]
# ## Into shared memory: a tile of keys
#
# A GPU runs a program as many *threads*; 32 of them are a *warp*, which executes one instruction at a time, and a thread's number
# in its warp is its *lane*. The threads of a program share a fast *shared memory*. Each thread has *registers* of its own, 32 bits
# each, and the *tensor core* multiplies small matrices that lie in the registers of a warp.
#
# So the decode kernel brings a *tile* of keys into shared memory first. `explain` tells what it would do with our query; `BN` is
# the number of keys of a tile. The tile with token 137 spans several pages: the instruction `cp.async` copies 16 bytes a lane, each
# lane from the page where its key lies.

# %%
q = capture.q[LAYER, capture.prompt_tokens - 1][None]  # the query of the last prompt token, [1, Hq, D]
at = pool.with_lengths(np.array([capture.prompt_tokens - 1], np.uint32), max_seq_length=1)
plan = explain(mha_decode, q, at, LAYER)
BN = plan.config.BN
print(f"a tile has {BN} keys and {plan.config.BM} rows of queries")

walk = KVCacheIterator(keys, BN, batch_idx=0, kv_head_idx=HEAD, end=capture.prompt_tokens)
walk.tile_start_row = TOKEN // BN * BN
tile = walk.next_tile()
row = TOKEN % BN
pages = tile.ptr_at_offset(row % 16, 0)[0]  # of row 9 in each page of the tile
print(f"the tile lies in {len(pages)} pages; token {TOKEN} is its row {row}, from byte {pages[row // 16]} as above")

# %% [markdown]
# Shared memory has 32 *banks*, each of which delivers 4 bytes in one *pass*; bytes 0 to 3 lie in bank 0, bytes 4 to 7 in bank 1,
# and so on, and byte 128 is in bank 0 again. The rows of our tile have 128 bytes: one row of the banks. The tensor core's
# *operand*, the matrix that it multiplies with, is read 8 keys at a time, 16 bytes of each, 128 bytes in all.

# %% [markdown]
# **Guess.** If the rows are stored one after the other, as they are: how many passes do these 8 times 16 bytes take?

# %%
passes = predict(1, 2, 4, 8)
passes

# %% [markdown]
# Now the tile as the kernel stores it. A vector is 16 bytes; vector `c` of row `r` lies at place `c ^ (r % 8)`: a *swizzle*. (`^` is the exclusive or of the binary digits:
# 5 ^ 1 = 101 ^ 001 = 100 = 4. The name that is printed below is read in notebook 3.) Each
# colour is one vector's column of the tile: follow one colour down the rows.

# %%
shape = MmaSyncShape(plan.config.BM, BN, capture.head_dim, plan.config.BD, capture.k.dtype)
place = shape.place("k")
print(place.swizzle)
draw_shared_memory(place)

# %% [markdown]
# **Question 2.** At which byte address of shared memory does the *first* 16-byte vector of our key start? The tile starts
# at address 0.

# %% tags=["question"]
address = None  # your answer, a byte address

# %%
ask("01.address", address)

# %% [markdown]
# ## The reading instruction
#
# `ldmatrix.x4` reads four such 8 x 8 matrices: lane *l* gives the address of row *l* % 8 of matrix *l* // 8. So it needs four
# passes at least, one for each matrix. Four warps share the keys: warp *w* reads keys 8 *w* to 8 *w* + 7 of every 32.

# %%
warp, instruction = row // 8 % 4, row // 32 * (shape.BD // 32)
name, addresses = shape.read_addresses("k")
access = wavefronts(name, addresses[instruction, warp], arch="sm_90")
print(access.explain())
draw_shared_memory(place, access=access)

# %% [markdown]
# The same read if nothing were swizzled, beside it as it is. Count for one matrix: a quarter of the passes.

# %%
_, plain = shape.read_addresses("k", swizzled=False)
conflict = wavefronts(name, plain[instruction, warp], arch="sm_90")
passes.compare(conflict.wavefronts // 4)
draw_cure(conflict, access, tiles=(place.plain(), place), names=("not swizzled", "swizzled"))

# %% [markdown]
# The rule behind these counts was measured on an H100, instruction by instruction; the emulator's counts equal the chip's.
#
# ## In registers: who multiplies
#
# `mma.sync.m16n8k16` multiplies 16 query rows with 8 keys, 16 columns at a time. Each lane holds four elements of the keys
# (operand B): the picture shows one lane's.

# %%
fragments = shape.fragment_map("k")
holders = np.argwhere((fragments.row == row) & (fragments.col == 0))
thread, register, element = holders[0]
lane = int(thread) % 32
print(f"column 0 of key {row}: warp {thread // 32}, lane {lane}, register {register}, element {element}")
draw_atom(shape.atom, lane=lane)

# %% [markdown]
# **Question 3.** Which lanes hold elements of our key? (The whole key, all 64 columns; give the list in ascending order.)

# %% tags=["question"]
lanes = None  # your answer, e.g. [0, 1, 2, 3]

# %%
ask("01.lanes", lanes)

# %% [markdown]
# ## The whole way
#
# One element of our key, number 37, at every stage. (In DRAM its byte is counted from the start of the whole pool here, with K and
# V of all layers, and not from the first key of our layer as above.)

# %%
draw_path_of_a_byte(byte_path(capture, pool, plan.config, LAYER, HEAD, TOKEN, element=37))

# %% [markdown]
# ## Debug: the wrong keys
#
# Somebody wrote the address of a key into a kernel of his own. It finds some keys; an `x` marks those that it does not.

# %%
def byte_of(page, slot, head, number):
    return 2 * (page * 18432 + slot * 64 + head * 64 + number)


slots, heads = np.arange(16), np.arange(3)[:, None]
right = keys.block_paged_ptr(0, slots, heads).byte_address
found = byte_of(int(pool.lookup_table[0, 0]), slots, heads, 0)
for head in range(3):
    print(f"head {head}, slots 0 to 15:", "".join(np.where(found[head] == right[head], ".", "x")))

# %% [markdown]
# **Question 4.** Mend it: write the function as it should be. It is tried on every slot and head of three pages.

# %% tags=["question"]
mended = None  # your answer: def mended(page, slot, head, number): return ...

# %%
ask("01.mended", mended)

# %% [markdown]
# ## Does it come out right?
#
# The emulator runs the whole decode step this way, for all heads and tiles. Compare with float64, and with what the model
# itself computed. The output is stored in bfloat16, whose numbers between 1 and 2 are 1/128 apart: up to half of that, 0.0039, is
# its rounding. (`SMEM` is shared memory.)

# %%
traffic = Traffic()
out = mha_decode(q, at, LAYER, scale=capture.scale, backend="emulator", arch="sm_90", traffic=traffic)
k, v = keys.blocks, pool.get_value_cache(LAYER).blocks
lengths = np.array([capture.prompt_tokens])
exact, _ = reference(q[:, None], k, v, pool.lookup_table, lengths, scale=capture.scale)
print("largest error against float64:", np.abs(out - exact[:, 0]).max())
print(
    "largest difference from the model:", np.abs(out - capture.o[LAYER, capture.prompt_tokens - 1].astype(float)).max()
)
print("bytes moved:", dict(traffic.moved))
print("passes of shared memory:", traffic.total("wavefronts"), "ideal", traffic.total("ideal"), end="; ")
print("without the swizzle", traffic.total("unswizzled"))

# %% [markdown]
# Next: [2. Layouts](02_layouts.ipynb): how strides become a language. `make demo` does all of this for three layers and eight steps, beside the Triton kernel that runs on the GPU, and shows both
# sources line by line.
