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
# Three questions stop you on the way. Write your answer into the cell; `check` tells whether it is right.

# %%
import numpy as np

from kvlab.attention import explain, mha_decode
from kvlab.attention.mha_decode.reference import reference
from kvlab.data import load_smollm2
from kvlab.demo.pictures import byte_path
from kvlab.demo.steps import paged_cache
from kvlab.exercises import ask
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

# %%
pool = paged_cache(capture, page_size=16)
keys = pool.get_key_cache(LAYER)
draw_page_table(
    pool.lookup_table, [capture.prompt_tokens], 16, pages=pool.total_num_pages, token=(0, TOKEN), names=["the prompt"]
)

# %% [markdown]
# **Question 1.** In which slot of its page does token 137 lie? (A page holds 16 tokens.)

# %% tags=["question"]
slot = None  # your answer, a number

# %%
ask("01.slot", slot)

# %% [markdown]
# The address follows: page, slot, head. Between two tokens of a page lie all heads; between two pages lie K and V of all
# captured layers. The byte is counted from the first key of our layer. Offsets are 64-bit: a pool easily has more than
# $2^{31}$ elements.

# %%
pointer = keys.block_paged_ptr(0, TOKEN, HEAD)
print("page", pool.lookup_table[0, TOKEN // 16], "slot", TOKEN % 16, "-> byte", int(pointer.byte_address))
print("strides in elements (page, token, head, dim):", keys.strides)
np.array_equal(pointer.load(64).reshape(-1), key)

# %% [markdown]
# ## Into shared memory: a tile of keys
#
# The decode kernel does not fetch one key but a *tile*. `explain` tells what it would do with our query; `BN` is the number
# of keys of a tile. The tile with token 137 spans several pages: `cp.async` copies 16 bytes a lane, each lane from the
# page where its key lies.

# %%
q = capture.q[LAYER, capture.prompt_tokens - 1][None]  # the query of the last prompt token, [1, Hq, D]
at = pool.with_lengths(np.array([capture.prompt_tokens - 1], np.uint32), max_seq_length=1)
plan = explain(mha_decode, q, at, LAYER)
BN = plan.config.BN
print(plan)

walk = KVCacheIterator(keys, BN, batch_idx=0, kv_head_idx=HEAD, end=capture.prompt_tokens)
walk.tile_start_row = TOKEN // BN * BN
tile = walk.next_tile()
row = TOKEN % BN
print(f"token {TOKEN} is row {row} of a tile of {BN} keys, from byte {tile.ptr_at_offset(row, 0)[0]} as above")

# %% [markdown]
# In shared memory the tile has rows of 128 bytes, which is one row of the 32 banks. The tensor core reads 8 keys at a time,
# 16 bytes of each: were the rows stored as they are, these would all lie in the same four banks, and shared memory would
# need 8 passes instead of one. So vector `c` of row `r` is stored at place `c ^ (r % 8)`: a *swizzle*.

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
# `ldmatrix.x4` reads four 8 x 8 matrices: lane *l* gives the address of row *l* % 8 of matrix *l* // 8. Four warps share the
# keys: warp *w* reads keys 8 *w* to 8 *w* + 7 of every 32.

# %%
warp, instruction = row // 8 % 4, row // 32 * (shape.BD // 32)
name, addresses = shape.read_addresses("k")
access = wavefronts(name, addresses[instruction, warp], arch="sm_90")
print(access.explain())
draw_shared_memory(place, access=access)

# %% [markdown]
# The same read if nothing were swizzled, beside it as it is:

# %%
_, plain = shape.read_addresses("k", swizzled=False)
conflict = wavefronts(name, plain[instruction, warp], arch="sm_90")
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
# One element of our key, number 37, at every stage (in DRAM its byte is counted from the start of the pool):

# %%
draw_path_of_a_byte(byte_path(capture, pool, plan.config, LAYER, HEAD, TOKEN, element=37))

# %% [markdown]
# ## Does it come out right?
#
# The emulator runs the whole decode step this way, for all heads and tiles. Compare with float64, and with what the model
# itself computed.

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
# Next: `make demo` does this for three layers and eight steps, beside the Triton kernel that runs on the GPU, and shows both
# sources line by line.
