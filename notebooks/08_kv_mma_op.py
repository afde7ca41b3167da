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
# # 8. Fragments and the matrix product
#
# A tensor core multiplies small matrices whose elements are spread over the registers of a whole warp. Shared memory holds
# rows; lanes want *fragments*. This notebook follows K and V of MAX's kernels for AMD's gfx950 through that last step,
# `KVMmaOp`, until $QK^T$ and $PV$ come out. A warp (AMD: wave) has 64 lanes. NumPy only, but for one section, where
# Triton compiles the same fragments.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; the compiled fragments need Triton besides.*

# %%
from dataclasses import replace

import numpy as np
from IPython.display import Markdown

from kvlab.attention import mha_decode
from kvlab.attention.mha_decode.reference import reference
from kvlab.cache import PagedKVCache, from_dense
from kvlab.exercises import ask, hint, predict
from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, as_dtype
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeKVBuffer,
    DecodeKVBufferParams,
    Hazard,
    Hazards,
    KVBuffer,
    KVBufferParams,
    NvidiaKVParams,
    PRegisterBuffer,
    TiledTensorCore,
    WarpSlices,
    kv_buffer_operand_map,
    mfma_atom,
    operand_map,
    output_map,
    score_map,
)
from kvlab.viz import draw_atom, draw_fragment_map, draw_kv_buffer

# %% [markdown]
# ## The instruction
#
# Prefill multiplies with `mfma.32x32x16.bf16`: 32 x 16 times 16 x 32. Each of the 64 lanes brings 8 elements of A and 8 of
# B.
#
# **Guess.** C has 32 x 32 numbers. How many does a lane keep?

# %%
guess = predict(4, 8, 16, 32)
guess

# %% [markdown]
# Lane 37 is picked out. Look at C: the lane owns one column, and of it the rows in groups of four, every other group.

# %%
guess.compare(mfma_atom((32, 32, 16), "bf16").regs_c)
draw_atom(mfma_atom((32, 32, 16), "bf16"), lane=37)

# %% [markdown]
# ## K: one vector of 16 bytes is one fragment
#
# A tile of 64 keys, 128 numbers each, out of a paged cache. The kernel contracts the depth in *strips* of BK = 32 columns;
# the instruction takes 16, so a strip is two *k groups*. The 64 keys are two fragments side by side: `num_mmas`.

# %%
DEPTH, LENGTH = 128, 64
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 1, 1, LENGTH, 1, DEPTH)).astype(as_dtype("bf16"))
pool = from_dense(k, v, [LENGTH], page_size=64, shuffle=0)

k_params = KVBufferParams(
    "bf16",
    (32, 32, 16),
    Swizzle(3, 0, 4, "vector"),
    BN=64,
    WN=64,
    BK=32,
    num_threads=256,
    depth=DEPTH,
    kv_num_heads=1,
    transpose=True,
    num_smem_stages=1,
)
keys = KVBuffer(k_params, pool.get_key_cache(0), batch_idx=0, head_idx=0, end=LENGTH)
keys.load_from_dram(0)
keys.load_from_shared(0)
print(f"{keys.num_k_tiles} strips x {keys.num_k_mmas2} k groups x {keys.num_mmas} fragments")
print("of each thread, registers x elements:", keys.kv_mma_op.reg_tile)
draw_fragment_map(keys.fragment_map(), thread=37, axes=("key", "depth"))

# %% [markdown]
# Each fragment of K is 8 neighbouring columns of one key: 16 bytes, one `ds_read_b128`. `load_prefill` reads it at the
# swizzled address. So a register can be checked by hand: strip 2, k group 1, second fragment of lane 37 of any warp:

# %%
lane, strip, kg, i = 37, 2, 1, 1
register = np.asarray(keys.get_mma_tile(kg, strip))[0, lane, i]
key, depth = i * 32 + lane % 32, strip * 32 + kg * 16 + lane // 32 * 8
expected = k[0, 0, key, 0, depth : depth + 8]
print(f"key {key}, depth {depth}..{depth + 7}:", bool((register == expected).all()))

# %% [markdown]
# **Question 1.** Which key does lane 50 hold in its *second* fragment of a k group (i = 1), and from which depth on, in
# strip 0, k group 0?

# %% tags=["question"]
key_and_depth = None  # your answer, e.g. (12, 0)

# %%
ask("08.key_and_depth", key_and_depth)

# %% [markdown]
# ## $S = QK^T$
#
# Q lies in registers in the same way, so lane groups meet. `mma` issues the instruction for every fragment of Q and of K.
# With `swap_a_b` it is given K first: the hardware computes $KQ^T$, the transposed tile, and a **lane owns one query**.
# Four warps share 128 query rows; each multiplies its 32 with all 64 keys.

# %%
BM = 128
q = rng.standard_normal((1, BM, DEPTH)).astype(as_dtype("bf16"))
s_map = score_map(k_params, BM)


def in_registers(values):
    """An array [programs, threads, registers, elements] as a tile of each thread, which shows what is added to it."""
    return TileTensor.from_numpy(values, space=AddressSpace.LOCAL, batch=2)


q_registers = in_registers(kv_buffer_operand_map(k_params, BM).spread(q))
s = in_registers(np.zeros((1, *s_map.row.shape), np.float32))
instructions = 0
for strip in range(keys.num_k_tiles):
    for kg in range(keys.num_k_mmas2):
        step = strip * keys.num_k_mmas2 + kg
        keys.kv_mma_op.mma(q_registers[step : step + 1, :], s, strip, kg, swap_a_b=True)
        instructions += keys.num_mmas

exact = q[0].astype(float) @ k[0, 0, :, 0].astype(float).T
scores = s_map.gather(s)[0]
print("S:", scores.shape, " largest error against float64:", np.abs(scores - exact).max())
draw_fragment_map(s_map, thread=37, axes=("query row", "key"))

# %% [markdown]
# **Question 2.** How many matrix instructions does one warp issue for $QK^T$ of this tile?

# %% tags=["question"]
mmas = None  # your answer

# %%
ask("08.mmas", mmas)

# %% [markdown]
# ## V: keys must come in the order of the scores
#
# In $PV$ the keys are contracted. The lane above holds the scores of keys 4 to 7, 12 to 15, 20 to 23, ... of its query.
# These become P, and P is the operand of the next product. If V's fragments have **the same key order**, P stays where it
# is: no lane has to give anything to another. So V is not read 8 keys in a row but 4 and 4. It is also transposed on the
# way: a fragment is a *column* of V, and `ds_read_tr16_b64` hands the rows that 16 lanes have read out as columns.

# %%
v_params = replace(k_params, swizzle=None, transpose=False)
values = KVBuffer(v_params, pool.get_value_cache(0), batch_idx=0, head_idx=0, end=LENGTH)
values.load_from_dram(0)
values.load_from_shared(0)
draw_fragment_map(values.fragment_map(), thread=37, axes=("key", "depth"))

# %% [markdown]
# What one of the reads touches: each lane asks for 8 bytes, four numbers of one key, and gets four keys of one number.

# %%
draw_kv_buffer(values, read=(0, 0))

# %% [markdown]
# **Question 3.** Which keys of a strip does lane 5 hold in its first fragment of V (k group 0)? Give the 8 keys in order.

# %% tags=["question"]
v_keys = None  # your answer, e.g. [0, 1, 2, 3, 4, 5, 6, 7]

# %%
ask("08.v_keys", v_keys)

# %% [markdown]
# That the orders agree is a statement about two index arrays. The accumulator of S holds 16 keys in a register, the operand
# P wants 8; put one after the other they are the same:

# %%
p_map = kv_buffer_operand_map(v_params, BM)
print("keys of lane 37 in S:", s_map.col[37].ravel()[:16], "...")
print("keys of lane 37 in P:", p_map.col[37].ravel()[:16], "...")
same = np.array_equal(s_map.col.reshape(256, -1), p_map.col.reshape(256, -1))
print("the same for all lanes and all keys:", same)

# %% [markdown]
# ## $O = PV$
#
# Softmax works on the registers: a lane owns a query, so its row maximum needs only the lane 32 places further, which has
# the other keys. Here it is done with the whole tile at once. The exponentials are rounded to bfloat16 and reinterpreted
# as the operand, without any movement.

# %%
scores = scores / np.sqrt(DEPTH)
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
p_values = s_map.spread(weights[None]).astype(as_dtype("bf16")).reshape(1, 256, -1, 8)  # nothing moves
p_registers = in_registers(p_values)

o_map = output_map(v_params, BM)
o = in_registers(np.zeros((1, *o_map.row.shape), np.float32))
for strip in range(values.num_k_tiles):
    for kg in range(values.num_k_mmas2):
        step = strip * values.num_k_mmas2 + kg
        values.kv_mma_op.mma(p_registers[step : step + 1, :], o, strip, kg, swap_a_b=True)

p = weights.astype(as_dtype("bf16")).astype(float)
exact = p @ v[0, 0, :, 0].astype(float)
output = o_map.gather(o)[0]
print("O:", output.shape, " largest error against float64:", np.abs(output - exact).max())

# %% [markdown]
# And if V were read in the plain order, 8 keys in a row? Then the registers of P and V would speak of different keys:

# %%
plain_v = values.kv_mma_op.reg_tile.load()
strip_map = values.fragment_map()
lanes, e = np.arange(256)[:, None, None] % 64, np.arange(8)
kg = np.arange(strip_map.row.shape[1])[None, :, None] // values.num_mmas
wrong_rows = kg * 16 + lanes // 32 * 8 + e + 0 * strip_map.row
for strip in range(values.num_k_tiles):
    values.kv_mma_op.strip_tile(strip).store(v[0, 0, strip * 32 + wrong_rows, 0, strip_map.col][None, ..., None])
o.fill(0)
for step in range(values.num_k_tiles * values.num_k_mmas2):
    strip, kg = divmod(step, values.num_k_mmas2)
    values.kv_mma_op.mma(p_registers[step : step + 1, :], o, strip, kg, swap_a_b=True)
print("largest error:", np.abs(o_map.gather(o)[0] - exact).max())
values.kv_mma_op.reg_tile.store(plain_v)

# %% [markdown]
# **Question 4.** Debug it. In the first k group the line `wrong_rows` says that lane `lane` has key `lane // 32 * 8 + e` as its element
# `e`. Which key should that be?

# %% tags=["question"]
mended = None  # your answer: def mended(lane, e): return ...

# %%
ask("08.mended", mended)

# %% [markdown]
# ## The same fragments, compiled
#
# Triton's compiler knows nothing of MAX. What does it put into the registers? `compiler_staging` compiles a kernel with the
# same two products for a GPU that is not there, and reads the layouts of K and V from its TTGIR; `match_staging` compares the
# elements that each thread holds. Below gfx950 with 128 query rows, as here; with 16, as in decode; and sm_80 and sm_90,
# whose emulated buffers have their own fragments. This section alone needs Triton.

# %%
from kvlab.triton_support.staged_tile import compiler_staging
from kvlab.triton_support.staging_match import match_staging

nvidia = NvidiaKVParams("bf16", BN=32, depth=DEPTH, kv_num_heads=1, transpose=True, num_smem_stages=1)
in_decode = replace(k_params, mma_shape=(16, 16, 32), BN=128, WN=32, swizzle=Swizzle(3, 0, 3, "vector"))
longer = from_dense(*rng.standard_normal((2, 1, 1, 128, 1, DEPTH)).astype(as_dtype("bf16")), [128], page_size=128)
caches = {"K": longer.get_key_cache(0), "V": longer.get_value_cache(0)}
machines = {
    "gfx950, 128 rows": (KVBuffer, k_params, compiler_staging("gfx950", BM=BM, BN=64, D=DEPTH)),
    "gfx950, 16 rows": (KVBuffer, in_decode, compiler_staging("gfx950", BM=16, BN=128, D=DEPTH)),
    "sm_80, 16 rows": (CpAsyncKVBuffer, nvidia, compiler_staging("sm_80", BM=16, BN=32, D=DEPTH)),
    "sm_90, 16 rows": (CpAsyncKVBuffer, replace(nvidia, arch="sm_90"), compiler_staging("sm_90", BM=16, BN=32, D=DEPTH)),
}


def of_wave_1(held, role):
    """The keys of K, or the columns of V, that the second wave (warp) holds, as runs of neighbours."""
    found = np.unique((held.row if role == "K" else held.col)[held.warp_size : 2 * held.warp_size])
    runs = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
    return ", ".join(f"{run[0]}–{run[-1]}" for run in runs)


lines = ["| tile | warp 1 holds, emulated | warp 1 holds, compiled | the same in every thread |", "|-" * 4 + "|"]
for machine, (kind, params, tiles) in machines.items():
    for role, compiled in zip("KV", tiles, strict=True):
        plain = {"swizzle": None} if kind is KVBuffer and role == "V" else {}
        buffer = kind(replace(params, transpose=role == "K", **plain), caches[role], 0, 0, end=128)
        buffer.load_from_dram(0)
        buffer = WarpSlices(buffer, num_warps_n=4) if params is in_decode and role == "V" else buffer
        ours, theirs = (of_wave_1(held.fragment_map(), role) for held in (buffer, compiled))
        same = "yes" if match_staging(buffer, compiled).registers else "no"
        what = {"K": "keys", "V": "columns"}[role]
        lines.append(f"| {machine}: {role} | {what} {ours} | {what} {theirs} | {same} |")
Markdown("\n".join(lines))

# %% [markdown]
# With 128 rows the compiler has come to MAX's fragments, element for element. V's keys, too: 4 and 4, so that P stays where
# it is. Here is its V; compare it with the picture of a strip above.

# %%
draw_fragment_map(machines["gfx950, 128 rows"][2][1].fragment_map(), thread=37, axes=("key", "depth"))

# %% [markdown]
# With 16 rows they part. MAX's four waves share the keys of S and meet in shared memory for the row maxima and for P. The
# compiler stands them along the rows, of which there are only 16: every wave holds all keys and computes all of S, and none
# has to ask another for a maximum. Four times the reads of K for it; V's columns it shares out, too, in another order.

# %% [markdown]
# ## Half a strip
#
# fp8 doubles the fragment: `mfma.16x16x128.fp8` takes 128 columns, 32 bytes of each lane, in two halves of 64. DeepSeek's
# keys have 576 numbers, four and a half strips. Shared memory then has blocks of 64 columns; `load_prefill_split` reads
# the lower half of a strip from one block and the upper from the next. The last strip has no upper half: zeros.

# %%
split = KVBufferParams(
    "fp8",
    (16, 16, 128),
    Swizzle(3, 0, 3, "vector"),
    BN=128,
    WN=32,
    BK=128,
    num_threads=256,
    depth=576,
    kv_num_heads=1,
    transpose=True,
    bk_smem=64,
    num_smem_stages=1,
)
wide = rng.standard_normal((1, 128, 1, 576)).astype(split.dtype)
latent = KVBuffer(split, PagedKVCache(wide, [127], [[0]], 1, 128), batch_idx=0, head_idx=0, end=128)
latent.load_from_dram(0)
latent.load_from_shared(0)
last = latent.fragment_map().gather(latent.strip_tile(4))[0]
print(f"{latent.num_k_tiles} strips in {latent.num_repeats} blocks; the last strip is {last.shape}")
print("its lower half is the end of the keys:", bool((last[:, :64] == wide[0, :, 0, 512:]).all()))
print("its upper half is zeros:", bool((last[:, 64:] == 0).all()))
draw_fragment_map(latent.fragment_map(), thread=20, axes=("key", "depth"))

# %%
q8 = rng.standard_normal((1, 16, 576)).astype(split.dtype)
q_map, s8_map = kv_buffer_operand_map(split, 16), score_map(split, 16)
q8_registers = in_registers(q_map.spread(np.pad(q8, ((0, 0), (0, 0), (0, 64)))))
s8 = in_registers(np.zeros((1, *s8_map.row.shape), np.float32))
for strip in range(latent.num_k_tiles):
    latent.kv_mma_op.mma(q8_registers[strip : strip + 1, :], s8, strip, 0, swap_a_b=True)
exact = q8[0].astype(float) @ wide[0, :, 0].astype(float).T
print("largest error against float64:", np.abs(s8_map.gather(s8)[0] - exact).max())

# %% [markdown]
# **Question 5.** Decode has four warps that share the keys of a tile: `WN = 32` of `BN = 128`. Which keys does warp 2 hold?

# %% tags=["question"]
warp_keys = None  # your answer: (first key, last key)

# %%
ask("08.warp_keys", warp_keys)

# %% [markdown]
# ## A decode step, end to end
#
# All of it together: the newest token of three sequences, 32 query heads over 2 KV heads. `DecodeKVBuffer` brings K and V
# through registers: `load_from_dram` takes the next strip into one stage of a ring of registers while the other stage is
# written to shared memory, read as fragments and multiplied. K is read swizzled, V in plain order, and so P, which crosses
# shared memory between the products (`PRegisterBuffer`), in plain order. Six CTAs run side by side, one for each sequence
# and KV head; one block of shared memory serves K and V in turn, and a record sees every access: a forgotten barrier would
# raise a `Hazard`.
#
# (The newest public decode kernels of MAX bring tiles by DMA through `KVBuffer`, or strips through the streaming buffer, and
# kvlab's operations follow them. Through registers goes what a GPU has no DMA for.)

# %%
GROUP, BN, LENGTHS = 16, 128, [300, 129, 70]
dense = rng.standard_normal((2, 1, 3, 300, 2, DEPTH)).astype(as_dtype("bf16"))
cache = from_dense(*dense, LENGTHS, page_size=128, new_tokens=1, shuffle=2)
query = rng.standard_normal((3, 2 * GROUP, DEPTH)).astype(as_dtype("bf16"))

batch, head = np.divmod(np.arange(6), 2)  # of each CTA
ends = np.take(LENGTHS, batch)
shape, common = (16, 16, 32), {"BN": BN, "WN": BN // 4, "BK": 32, "num_threads": 256, "depth": DEPTH}
as_k, as_v = (
    KVBufferParams("bf16", shape, None, **common, kv_num_heads=2, transpose=transpose) for transpose in (True, False)
)


def decode_params(transpose):
    """Of K (transposed, swizzled) or V. A row of the cache is 2 heads wide."""
    core = TiledTensorCore("fp32", "bf16", shape, group_size=1, transpose_b=transpose)
    swizzle = Swizzle(2, 0, 2, "vector") if transpose else None
    window = Layout((BN, DEPTH), (2 * DEPTH, 1))
    return DecodeKVBufferParams("bf16", window, core, swizzle, **common, num_stages=2, token_gen=True)


strip_bytes, p_bytes = 2 * BN * 32, 2 * GROUP * BN
lds = Memory(strip_bytes + p_bytes, name="LDS", programs=6, space=AddressSpace.SHARED)
record = Hazards(lds, 4, arch="gfx950")
p_buffer = PRegisterBuffer(as_v, GROUP, 6, smem=lds, smem_address=lds.base + strip_bytes, hazards=record)


def multiply(buffer, operand, c):
    """C += operand x tile, strip after strip through the ring of registers."""
    buffer.load_from_dram()
    for strip in range(buffer.num_tiles):
        if strip + 1 < buffer.num_tiles:
            buffer.load_from_dram()  # into the other stage, while this one is used
        record.barrier()  # every wave has read what stands there
        buffer.copy_to_shared(strip % 2)
        record.barrier()
        for k_mma in range(buffer.num_k_tiles):
            buffer.load_from_shared(k_mma)
            kg = strip * buffer.num_k_tiles + k_mma
            buffer.mma(operand[kg : kg + 1, :], c, swap_a_b=True)


# %% [markdown]
# Softmax is *online*: with each tile the row maximum may grow; what was summed before is rescaled. Rows past a sequence's end
# arrive as zeros, their scores are hidden. Only the maxima and sums are taken of the whole tile at once.

# %%
layout_s, layout_o = score_map(as_k, GROUP), output_map(as_v, GROUP)
q_operand = in_registers(operand_map(as_k, GROUP).spread(query.reshape(6, GROUP, DEPTH)))
total = np.zeros((6, *layout_o.row.shape), np.float32)
m, l = np.full((6, GROUP, 1), -np.inf, np.float32), np.zeros((6, GROUP, 1), np.float32)
for first in range(0, max(LENGTHS), BN):
    window = {"smem": lds, "smem_address": lds.base, "end": ends, "start": first, "hazards": record}
    k_tile = DecodeKVBuffer(decode_params(True), cache.get_key_cache(0), batch, head, **window)
    v_tile = DecodeKVBuffer(decode_params(False), cache.get_value_cache(0), batch, head, **window)
    s = np.zeros((6, *layout_s.row.shape), np.float32)
    multiply(k_tile, q_operand, in_registers(s))
    tile = layout_s.gather(s) / np.float32(np.sqrt(DEPTH))
    tile = np.where(first + np.arange(BN) < ends[:, None, None], tile, -np.inf)
    new = np.maximum(m, tile.max(axis=2, keepdims=True))
    p, alpha = np.exp(tile - new), np.exp(m - new)
    m, l = new, l * alpha + p.sum(axis=2, keepdims=True)
    total *= layout_o.spread(np.broadcast_to(alpha, (6, GROUP, DEPTH)))
    p_buffer.copy_to_shared(layout_s.spread(p))
    record.barrier()
    multiply(v_tile, p_buffer.load_from_shared(), in_registers(total))

decoded = (layout_o.gather(total) / l).reshape(3, 2 * GROUP, DEPTH)
arrays = (cache.get_key_cache(0).blocks, cache.get_value_cache(0).blocks, cache.lookup_table, np.array(LENGTHS))
exact, _ = reference(query[:, None], *arrays, scale=DEPTH**-0.5)
operation = mha_decode(query, cache, backend="emulator", arch="gfx950")
error = np.abs(decoded - exact[:, 0]).max()
print("largest error against float64:", error)
print("of mha_decode, emulated on gfx950 through KVBuffer, which rounds the result to bfloat16:",
      np.abs(operation.astype(float) - exact[:, 0]).max())

# %% [markdown]
# The error is that of P, which is rounded to the 8 bits of a bfloat16: at most $2^{-9}$ of the largest value in V, as the
# weights of a row sum to 1.

# %%
assert error <= 2**-9 * np.abs(dense[1].astype(float)).max()

# %% [markdown]
# And what if the second barrier of `multiply` were forgotten?

# %%
record.barrier()
k_tile.copy_to_shared(0)
try:
    k_tile.load_from_shared(0)
except Hazard as hazard:
    print(hazard)

# %% [markdown]
# [7. KVBuffer](07_kv_buffer.ipynb) shows how the tiles came into shared memory. Every register seen here was compared with the compiled MAX
# kernels, lane by lane; the tests do it for all configurations.
