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
# # 9. MHA decode: one new token against the whole cache
#
# A language model writes one token at a time. For each it multiplies a handful of queries with *every* key it has ever
# stored: all the work is reading the cache. This notebook runs that step on real activations, the keys and values of
# SmolLM2-135M, three times: as mathematics, as the emulator that has every byte where the hardware has it, and as the
# Triton kernel, and puts the last two side by side, line for line.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton and torch besides, on
# Linux.*

# %%
import numpy as np

from kvlab.attention import explain, mha_decode, mha_decode_paged, mha_decode_streaming, plan
from kvlab.data import load_smollm2
from kvlab.demo.steps import grow, paged_cache
from kvlab.exercises import ask, hint, predict
from kvlab.mirror import lockstep
from kvlab.staging import Timeline, Traffic, ceildiv
from kvlab.viz import draw_page_table, draw_timeline

capture = load_smollm2()
LAYER, TOKEN = 1, capture.prompt_tokens  # the first token that the model writes itself
pool = paged_cache(capture, page_size=16)
grow(pool, capture, TOKEN, TOKEN + 1)  # its key and value are stored before it attends
cache = pool.with_lengths(np.array([TOKEN], np.uint32), max_seq_length=1)
q = capture.q[LAYER, TOKEN][None]
print(f"q {q.shape} [B, Hq, D], {q.dtype}; {TOKEN + 1} keys of {capture.kv_heads} heads in pages of 16")

# %% [markdown]
# ## Who works on what
#
# One program takes the query heads of *one* KV head, because they read the same keys: they are the rows of its tile. The
# keys come in tiles of `BN`; a long sequence is cut into *splits*, a program for each, and `merge_states` joins their results.
#
# **Guess.** The model has 9 query heads and 3 KV heads, and our sequence shall not be split. How many programs are there?

# %%
guess = predict(1, 3, 9, 16)
guess

# %%
chosen = explain(mha_decode, q, cache, LAYER, num_splits=1)
config = chosen.config
guess.compare(int(np.prod(chosen.grid)))
print(chosen)
draw_page_table(pool.lookup_table, [TOKEN + 1], 16, pages=pool.total_num_pages, names=["the sequence"])

# %% [markdown]
# **Question 1.** The tile has `BM` = 16 rows, the least that `mma.sync` multiplies. How many of them hold a query of ours?
# (The model has 9 query heads and 3 KV heads.)

# %% tags=["question"]
rows = None  # your answer, a number

# %%
ask("09.rows", rows)

# %% [markdown]
# ## The two siblings in lockstep
#
# `lockstep` runs the kernel (interpreted, traced line by line) and the emulator on the same input and compares everything
# that a step binds: the query tile, each K tile, the scores, the running maximum, the output. Both sources stand side by
# side; a difference would be red.

# %%
keys, values = cache.get_key_cache(LAYER), cache.get_value_cache(LAYER)
case = {
    "q": q[:, None],
    "k_cache": keys.blocks,
    "v_cache": values.blocks,
    "block_table": pool.lookup_table,
    "seq_lens": np.array([TOKEN + 1], np.int32),
    "scale": capture.scale,
    "config": config,
}
try:
    run = lockstep("mha_decode", case)
    print(run.finding)
except ImportError as missing:  # the notebook goes on without the kernel
    run = None
    print(missing)
run

# %% [markdown]
# ## Where the bytes go
#
# The emulator counts what it moves. Shared memory answers an instruction in one or more passes (*wavefronts*); `ideal` is
# the least that these bytes can take, `unswizzled` what the same tile would take stored row by row. P, the weights, is written to
# shared memory and read again: a warp has the scores of its own keys, and multiplies its columns of V with the weights of all.

# %%
traffic = Traffic(timeline=Timeline())
out, lse = mha_decode(
    q, cache, LAYER, scale=capture.scale, num_splits=1, backend="emulator", return_lse=True, traffic=traffic
)
for edge, nbytes in traffic.moved.items():
    print(f"{edge:24}{nbytes:>9} bytes")
for role, passes in traffic.wavefronts.items():
    print(f"{role:24}{passes:>9} passes, ideal {traffic.ideal[role]:>6}, unswizzled {traffic.unswizzled[role]:>6}")

# %% [markdown]
# **Question 2.** The traffic is dominated by one number that you can work out: how many bytes of K and V does this step read
# from DRAM? (300 keys, 3 heads of 64 numbers of two bytes.)

# %% tags=["question"]
nbytes = None  # your answer, a number

# %%
ask("09.nbytes", nbytes)

# %% [markdown]
# The emulator keeps the order of things, too. A copy is in flight, dashed, from its issue to the wait that lands it; reading
# its bytes earlier would be reported as a hazard, with the two accesses and the missing wait. (It walks the tiles one after
# the other in one stage; the compiled kernel has `num_stages` of them and issues the next tiles' copies earlier.)

# %%
draw_timeline(traffic.trace()[:60])

# %% [markdown]
# ## Split-K
#
# With few sequences a program for each KV head leaves most of the chip idle, so the keys are split. A split takes a whole
# number of tiles, hence some may be left without a key: their partial output is never read.

# %%
parts = {n: mha_decode(q, cache, LAYER, scale=capture.scale, num_splits=n, backend="emulator") for n in (1, 2, 4, 7)}
for n, part in parts.items():
    print(n, "splits: largest difference from one", np.abs(part.astype(float) - parts[1].astype(float)).max())

# %% [markdown]
# **Question 3.** Four splits share 300 keys in tiles of 64. A split's size is a quarter of the keys, rounded up to whole
# tiles. How many splits get any keys?

# %% tags=["question"]
working = None  # your answer, a number

# %%
ask("09.working", working)

# %% [markdown]
# ## Debug: results put together wrongly
#
# Each split gives the output of its own keys, and *lse*, the logarithm of the sum of its exponentials. A kernel of two splits takes
# their mean, and is right only where both see equally much:

# %%
k_of, v_of = (part.load(0, 0, np.arange(TOKEN + 1), 0, width=64).astype(float) for part in (keys, values))
scores = capture.scale * k_of @ q[0, 0].astype(float)
outs, lses = [], []
for part in (slice(0, 64), slice(64, TOKEN + 1)):
    e = np.exp(scores[part])
    outs.append(e @ v_of[part] / e.sum())
    lses.append(np.log(e.sum()))
outs, lses = np.array(outs), np.array(lses)
print("lse of the splits:", lses, "  largest error of the mean:", np.abs(outs.mean(axis=0) - out[0, 0].astype(float)).max())

# %% [markdown]
# **Question 4.** Write the function that puts any number of splits together: `outs` is `[splits, D]`, `lses` is `[splits]`. A split
# without a key has an output of zeros and an lse of minus infinity; an lse may be as large as 1000.

# %% tags=["question"]
mended = None  # your answer: def mended(outs, lses): return ...

# %%
ask("09.mended", mended)

# %% [markdown]
# ## Uneven lengths
#
# A server's batch has sequences of every length. With one long conversation among 63 short ones, a program for each keeps
# the whole chip waiting for one. `plan` lays all sequences end to end, each as long as its key blocks and a little for the
# beginning, and cuts the line into equal shares; each *team* of programs (one for every KV head) takes one share. A sequence
# that was cut has partial results, merged in the order of its keys: the lengths alone say how sums are ordered.

# %%
lengths = [100_000] + 63 * [500]
schedule = plan(lengths, q_heads=32, kv_heads=8)
blocks = [ceildiv(length, schedule.config.block) + schedule.config.overhead for length in lengths]
print(f"{schedule.teams} teams of 8 programs; the sequences take {blocks[0]}, {blocks[1]}, ... key blocks")
schedule

# %% [markdown]
# **Question 5.** How many teams share the long sequence? (A share is the sum of `blocks` over the teams, rounded up.)

# %% tags=["question"]
sharing = None  # your answer, a number

# %%
ask("09.sharing", sharing)

# %% [markdown]
# ## A window reads only its pages
#
# Models with sliding windows see the last `w` keys. The pages before them are not touched: here they hold NaN, and the result
# does not know.

# %%
before = pool.lookup_table[0, : (TOKEN + 1 - 64) // 16]
blocks = keys.blocks.copy()
blocks[before] = np.nan
arrays = [(case | {"k_cache": blocks})[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
windowed = mha_decode_paged(*arrays, scale=capture.scale, window=64, backend="emulator")
print("finite:", bool(np.isfinite(windowed.astype(float)).all()), "for", len(before), "pages of NaN")

# %% [markdown]
# ## Another machine, another way
#
# On AMD's gfx950 the same operation runs through MAX's `KVBuffer`. `mha_decode_streaming` is MAX's second way there: one
# buffer in LDS that each strip of K and of V passes in turn. The bytes from DRAM are the same; what shared memory holds at a
# time is not.

# %%
for name, operation in (("KVBuffer", mha_decode), ("streaming", mha_decode_streaming)):
    moved = Traffic()
    result = operation(q, cache, LAYER, scale=capture.scale, backend="emulator", arch="gfx950", traffic=moved)
    error = np.abs(result.astype(float) - out.astype(float)).max()
    print(f"{name:10} moved {dict(moved.moved)}; largest difference from sm_90 {error:.4f}")
