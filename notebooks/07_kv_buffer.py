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
# # 7. KVBuffer: from DRAM to shared memory
#
# Between the pages of the cache and the matrix instruction lies shared memory (AMD: LDS). MAX's kernels for gfx950 manage it
# with one structure, `KVBuffer`: it brings tiles of keys from DRAM, without a detour through registers, swizzles them on
# the way, keeps several *stages* so that one tile can arrive while another is used, and hands fragments to the lanes. Every
# byte below is where the compiled kernel puts it. NumPy only.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
import warnings
from dataclasses import replace

import numpy as np

from kvlab.cache import from_dense
from kvlab.exercises import ask, hint, predict
from kvlab.hardware import SubTileLoaderLDS, best_swizzle, get_arch, wavefronts
from kvlab.layout import Swizzle
from kvlab.memory import AddressSpace, Memory, as_dtype
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeStreamingKVBuffer,
    Hazard,
    Hazards,
    KVBuffer,
    KVBufferParams,
    KVCacheIterator,
    NvidiaKVParams,
    Timeline,
    Traffic,
    WarpSlices,
)
from kvlab.viz import (
    Pipeline,
    draw_copy_plan,
    draw_cure,
    draw_kv_buffer,
    draw_kv_tile,
    draw_tile_film,
    draw_timeline,
    explore,
)

# %% [markdown]
# ## A tile in DRAM
#
# A sequence of 100 tokens, one KV head of 128 numbers of bfloat16, in pages of 64 tokens. The kernel takes the keys in tiles
# of BN = 64. `KVCacheIterator` walks over them: each tile knows where its rows are, and how many of them exist.
#
# **Guess.** How many rows of the second tile exist?

# %%
guess = predict(28, 36, 64)
guess

# %%
DEPTH, LENGTH = 128, 100
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 1, 1, LENGTH, 1, DEPTH)).astype(as_dtype("bf16"))
pool = from_dense(k, v, [LENGTH], page_size=64, shuffle=1, spare_pages=1)

walk = KVCacheIterator(pool.get_key_cache(0), 64, batch_idx=0, kv_head_idx=0, end=LENGTH)
walk.increment()  # pass over the first tile
tile = walk.next_tile()
guess.compare(int(tile.valid_rows[0]))
print(tile)  # a tile tensor in DRAM with `valid_rows`
draw_kv_tile(tile)

# %% [markdown]
# ## The buffer
#
# The parameters are MAX's, by MAX's names. `mma_shape` is the instruction's M, N, K; `transpose=True` says K; the 256 threads are four
# *waves*, AMD's warps of 64 lanes, of which each multiplies `WN` keys. The *depth*, the 128 numbers of a key, is cut into *blocks* of BK =
# 32 columns; a stage of shared memory is one block after the other, each 64 rows of 64 bytes. The rest follows:

# %%
params = KVBufferParams(
    "bf16",
    mma_shape=(32, 32, 16),
    swizzle=Swizzle(3, 0, 4, "vector"),
    BN=64,
    WN=64,
    BK=32,
    num_threads=256,
    depth=DEPTH,
    kv_num_heads=1,
    transpose=True,
)
print(params.num_smem_stages, "stages of", 2 * params.smem_stage_size, "bytes in", params.blocks_per_stage, "blocks;")
print("a thread fills one with", params.vm_instrs_per_load, "copies of 16 bytes")

keys = KVBuffer(params, pool.get_key_cache(0), batch_idx=0, head_idx=0, end=LENGTH)
keys.load_from_dram(0)
keys

# %% [markdown]
# Stage 1 is still as it was found: nobody wrote there, and to read it would be an error. In stage 0 each cell is a vector
# of 16 bytes, named *row, vector*.
#
# ## The swizzle is in the source
#
# The *DMA* instruction copies from DRAM into shared memory without registers. It has no choice where it writes: lane *l* of a wave fills 16 bytes at *base + 16 l*. It does choose
# what it fetches. So lane *l* fetches the vector that belongs there, number `swizzle(l)`. The warp tile has 32 rows of 64
# bytes, two instructions of 64 lanes:

# %%
draw_copy_plan(SubTileLoaderLDS("bf16", params.swizzle), (32, 32))

# %% [markdown]
# The rule in one line: `LDS_vec[v] = TILE_vec[swizzle(v)]`, where *v* counts the vectors of a block's 32 rows. Since
# the swizzle undoes itself, vector *t* of the tile is at place `swizzle(t)`.

# %%
block = keys.smem.image("bf16")[0].reshape(8, 2, 128, 8)[1, 0]  # block 1, its first 32 rows: [vectors, 8]
page = int(pool.lookup_table[0, 0])
tile = pool.get_key_cache(0).blocks[page, :32, 0, 32:64].reshape(128, 8)
print("LDS_vec[v] == TILE_vec[swizzle(v)]:", bool((block == tile[params.swizzle(np.arange(128))]).all()))

# %% [markdown]
# **Question 1.** At which byte of stage 0 does the vector of row 20, columns 40 to 47, lie? `params.swizzle(...)` is
# yours to use.

# %% tags=["question"]
byte = None  # your answer

# %%
ask("07.byte", byte)

# %% [markdown]
# ## The end of the sequence
#
# The second tile has 36 keys only. The buffer resource ends after them, and what lies past its end arrives as zeros. No
# lane has to ask whether its key exists.

# %%
keys.load_from_dram(1)
draw_kv_buffer(keys, stage=1)

# %% [markdown]
# ## Reading without queues
#
# `ds_read_b128` gives every lane 16 bytes. Lane *l* wants key *l* % 32. Here is the first read of *strip* 1, BK columns of the
# tile, 32 to 63; the lanes of the first phase are marked. They are no neighbours: gfx950 serves lanes 0 to 3, 12 to 15 and 20 to 27 of
# a 16-byte read together, then 4 to 11, 16 to 19 and 28 to 31, then the same of the upper half. (Others have measured these groups,
# no chip has confirmed them here: all counts of AMD are *provisional*, and say so.)

# %%
draw_kv_buffer(keys, read=(0, 1), stage=0)

# %% [markdown]
# The same read from a tile without the swizzle, where the lanes of a phase meet in a few banks, beside it as it is:

# %%
plain = KVBuffer(replace(params, swizzle=None), pool.get_key_cache(0), batch_idx=0, head_idx=0, end=LENGTH)
plain.load_from_dram(0)
both, images = [], []
for buffer in (plain, keys):
    name, addresses = buffer.read_addresses(0, bk_tile=1)
    both.append(wavefronts(name, addresses[0, 0] - 4096, arch="gfx950"))  # block 1 begins at byte 4096
    images.append(buffer.smem_image().stage(0).slots[256:512])
draw_cure(*both, tiles=images, names=("not swizzled", "swizzled"))

# %% [markdown]
# And the lanes get their keys: all strips of stage 0 put back together are the first 64 keys.

# %%
keys.load_from_shared(0)
strips = [keys.fragment_map().gather(keys.strip_tile(strip))[0] for strip in range(keys.num_k_tiles)]
print("registers == keys:", bool((np.concatenate(strips, axis=1) == k[0, 0, :64, 0]).all()))

# %% [markdown]
# ## Stages: what is in flight
#
# A copy runs beside the program. With two stages tile *n + 1* arrives while tile *n* is multiplied, but only if somebody
# waits before reading and nobody overwrites what is still read. Our buffers state every access to a record, which reports
# a *hazard*, as an error, if nothing orders two of them. Here is the NVIDIA counterpart, `cp.async` into two stages:

# %%
traffic = Traffic(timeline=Timeline())
nvidia = NvidiaKVParams("bf16", BN=32, depth=DEPTH, kv_num_heads=1, transpose=True)
ring = CpAsyncKVBuffer(nvidia, pool.get_key_cache(0), batch_idx=0, head_idx=0, end=LENGTH, traffic=traffic)
ring.load_from_dram(0)
for tile_number in range(3):
    ring.load_from_dram((tile_number + 1) % 2)  # the next tile, into the other stage
    ring.wait(1)  # all but the newest have landed
    ring.load_from_shared(tile_number % 2)
    ring.release()  # everybody has read: the stage may be overwritten
draw_timeline(traffic.trace())

# %% [markdown]
# The same loop with one mistake: it waits until at most *two* copies are in flight. The numbers may still come out right
# on a good day; the record does not need a bad one.

# %%
traffic = Traffic(timeline=Timeline())
ring = CpAsyncKVBuffer(nvidia, pool.get_key_cache(0), batch_idx=0, head_idx=0, end=LENGTH, traffic=traffic)
ring.load_from_dram(0)
ring.load_from_dram(1)
ring.wait(2)
try:
    ring.load_from_shared(0)
except Hazard as hazard:
    picture = draw_timeline(traffic.trace(), hazard=hazard)
picture

# %% [markdown]
# The same loop as a player: move `event` to see what each byte of shared memory is at that time. Under `without` a wait or a
# barrier can be left out; the first byte that goes wrong turns red, and the missing wait is named.

# %%
def pipeline(stages, ahead, wait, tiles=4):
    """A loop over tiles of 1 KiB in so many stages, `ahead` of which are on their way before the first is read."""

    def program(memory, hazards):
        def copy(tile):
            hazards.copy_async(hazards.region(tile % stages * 1024, 1024), "k copy", tile % stages)
            hazards.commit_group()

        for tile in range(ahead):
            copy(tile)
        for tile in range(tiles):
            hazards.wait_group(min(wait, max(tiles - tile - 1, 0)))
            hazards.barrier()
            hazards.read(hazards.region(tile % stages * 1024, 1024), "k read", tile % stages)
            if stages == ahead:
                hazards.barrier()
            if tile + ahead < tiles:
                copy(tile + ahead)

    return Pipeline(program, nbytes=stages * 1024, warps=4)


explore(pipeline(stages=2, ahead=2, wait=1))

# %% [markdown]
# ## Debug: a ring of three stages
#
# Three stages, and two tiles on their way before the first is read; behind the barrier of each tile the next copy goes into the stage
# that all warps have left. The author waits until at most two copies are in flight, "because there are two":

# %%
print(str(pipeline(stages=3, ahead=2, wait=2).run().fault).partition(";")[0])

# %% [markdown]
# **Question 2.** How many copies may be in flight behind the wait? Give the largest number that is right.

# %% tags=["question"]
wait = None  # your answer, a number

# %%
ask("07.wait", wait)

# %% [markdown]
# ## A film of one tile
#
# `KVBuffer` is checked the same way if it is given a record: the copy is a number of DMA instructions, the wait is
# `s_waitcnt vmcnt`, and a barrier lets the other waves know. Whoever owns the buffer, here we, states the wait and the
# barrier. The trace tells which frames the film has; the outline follows 16 bytes of one key.

# %%
traffic = Traffic(timeline=Timeline())
lds = Memory(2 * params.smem_stage_size * params.dtype.itemsize, name="LDS", programs=1, space=AddressSpace.SHARED)
record = Hazards(lds, params.num_warps, arch="gfx950", timeline=traffic.timeline)
filmed = KVBuffer(params, pool.get_key_cache(0), 0, 0, params.smem_tile(lds), end=LENGTH, traffic=traffic, hazards=record)
filmed.load_from_dram(0)
record.wait_group(0)
record.barrier()
filmed.load_from_shared(0)
draw_tile_film(filmed, traffic.trace(), strip=1, thread=20)

# %% [markdown]
# The wait tells a wave of its own copies only. Without the barrier it reads keys that another wave still brings:

# %%
record = Hazards(Memory(lds.nbytes, programs=1), params.num_warps, arch="gfx950")
hasty = KVBuffer(params, pool.get_key_cache(0), 0, 0, end=LENGTH, hazards=record)
hasty.load_from_dram(0)
record.wait_group(0)
try:
    hasty.load_from_shared(0)
except Hazard as hazard:
    print(hazard)

# %% [markdown]
# ## V, and slices of it
#
# V is the same buffer with `transpose=False`. MAX does not swizzle it; with this instruction its transposing reads take
# twice the ideal number of wavefronts. In decode four warps share one tile, and each multiplies its own columns. No
# second copy is made: `WarpSlices` are readers whose base is shifted to the warp's first column.
#
# This buffer and the next are those of decode. What they have in common is written once, in `decode`.

# %%
decode = {
    "dtype": "bf16",
    "mma_shape": (16, 16, 32),
    "BN": 128,
    "BK": 32,
    "num_threads": 256,
    "depth": DEPTH,
    "kv_num_heads": 1,
}
v_params = KVBufferParams(**decode, swizzle=None, WN=128, transpose=False, num_smem_stages=1)
pool128 = from_dense(k, v, [LENGTH], page_size=128)
values = KVBuffer(v_params, pool128.get_value_cache(0), batch_idx=0, head_idx=0, end=LENGTH)
values.load_from_dram(0)
slices = WarpSlices(values, num_warps_n=4)
slices.load_from_shared(0)
third = slices.fragment_map().gather(slices.strip_tile(2))[0]
print(f"each warp holds {slices.params.depth} columns")
print("strip 2 of all warps == V:", bool((third == v[0, 0, 64:96, 0]).all()))
draw_kv_buffer(slices, read=(0, 2), warp=3)

# %% [markdown]
# ## Streaming: one strip at a time
#
# Long contexts with few queries need little shared memory and many CTAs. `DecodeStreamingKVBuffer` holds a single strip:
# load, wait, read, and the next strip goes to the same place.

# %%
streaming_params = KVBufferParams(**decode, swizzle=Swizzle(3, 0, 3, "vector"), WN=32, transpose=True)
streaming = DecodeStreamingKVBuffer(
    streaming_params, pool128.get_key_cache(0), batch_idx=0, head_idx=0, num_keys=LENGTH
)
tile = streaming.iterator().next_tile()
for strip in range(streaming.num_strips):
    streaming.load_from_dram(strip, tile)
    registers = streaming.load_from_shared()
print(f"{streaming.strip_bytes} bytes of shared memory instead of {keys.smem.nbytes}")

# %% [markdown]
# The last strip and its first read, without a conflict:

# %%
draw_kv_buffer(streaming, read=())

# %% [markdown]
# `Swizzle(3, 0, 3)` permutes 3 bits: 8 groups of 16 bytes, the 32 banks of gfx942. gfx950 has 64 banks, 16 groups, and serves 16 lanes
# at once. In lane order, keys 0 to 15 at one column, these would meet in 8 groups. But a phase of the chip holds keys 0 to 3 and 12 to
# 15 at one column and 4 to 11 at the next, and these fill all 16. So which lanes are served together decides which swizzle is right: it
# is data of the architecture, `get_arch("gfx950").lane_groups`, in which `best_swizzle` counts, too. It finds that one bit does.
# `Swizzle(3, 0, 4)`, right for the 32-row instructions above, meets conflicts here.

# %%
lane = np.arange(64)
vector = lane % 16 * 4 + lane // 16  # of a strip's 64-byte rows
in_lane_order = replace(get_arch("gfx950"), name="gfx950 in lane order", lane_groups=())
for swizzle in (None, Swizzle(3, 0, 3, "vector"), Swizzle(3, 0, 4, "vector")):
    place = vector if swizzle is None else swizzle(vector)
    counts = [wavefronts("ds_read_b128", 16 * place, arch=arch) for arch in ("gfx942", "gfx950", in_lane_order)]
    print(f"{swizzle!s:27}", *(f"{c.arch.name}: {c.wavefronts:2} passes, ideal {c.ideal}   " for c in counts))
print(best_swizzle((16, 32), "bf16", ("ds_read_b128", lane % 16, lane // 16 * 8), arch="gfx950"))

# %% [markdown]
# V strips go through registers and lie flat, 32 keys of 256 bytes each. The third structure, `DecodeKVBuffer`, takes both
# operands through a ring of registers; [8. Fragments and the matrix product](08_kv_mma_op.ipynb) runs a decode step with it.

# %% [markdown]
# ## What MAX cannot mean
#
# The compiled kernels accept some configurations that do not compute a product of the matrices. kvlab reproduces them, byte
# for byte, and warns; the warning says what works instead.
#
# `full_kv=False` was meant for large depths: a stage holds one block of columns only.

# %%
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    part = KVBuffer(replace(params, full_kv=False), pool.get_key_cache(0), batch_idx=0, head_idx=0, end=LENGTH)
print(said[0].message)
part.load_from_dram(0)
part.load_from_dram(1)

# %% [markdown]
# **Question 3.** After these two loads, which columns of key 70 are in shared memory?

# %% tags=["question"]
columns = None  # your answer: (first column, last column)

# %%
ask("07.columns", columns)

# %% [markdown]
# MAX's documentation means it otherwise: the blocks of one key tile, load after load. That is on request.

# %%
blocks = KVBuffer(replace(params, full_kv=False, follows="document"), pool.get_key_cache(0), 0, 0, end=LENGTH)
for block in range(DEPTH // 32):
    blocks.load_from_dram(block % 2)
    blocks.load_from_shared(block % 2, bk_tile=block)
whole = np.concatenate([blocks.fragment_map().gather(blocks.strip_tile(s))[0] for s in range(DEPTH // 32)], axis=1)
print("four blocks together == keys:", bool((whole == k[0, 0, :64, 0]).all()))

# %% [markdown]
# And a swizzle that the read does not undo: the streaming buffer counts its swizzle from the start of a k group, the DMA
# counted from the start of the block. With one k group in a strip both are the same; with two they are not.

# %%
two_groups = replace(streaming_params, swizzle=Swizzle(2, 0, 2, "vector"), BK=64)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    wrong = DecodeStreamingKVBuffer(two_groups, pool128.get_key_cache(0), 0, 0, num_keys=LENGTH)
print(said[0].message)
wrong.load_from_dram(0, wrong.iterator().next_tile())
wrong.load_from_shared()
got = np.asarray(wrong.get_mma_tile(1))[0, 0, 0]  # k group 1, lane 0, first fragment
row = k[0, 0, 0, 0, :64]
column = int(np.flatnonzero(row == got[0])[0])
print(f"lane 0 should hold columns 32..39 of key 0; it holds {column}..{column + 7}")

# %% [markdown]
# **Question 4.** Which swizzle may the buffer have with BK = 64, so that the lanes get the matrix? (`None` is a swizzle,
# too: write it as the text "None".)

# %% tags=["question"]
works = None  # your answer, a text

# %%
ask("07.works", works)

# %% [markdown]
# What Triton's compiler makes of the same tile, byte for byte, is in [15. X-ray](15_xray.ipynb). Next: [8. Fragments and the matrix product](08_kv_mma_op.ipynb): how the lanes' registers meet the query, and why V has
# its keys in the order that it has.
