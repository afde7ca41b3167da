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
# # 10. MHA prefill: many new tokens at once
#
# Before a model writes its first word it reads the prompt: every token attends to itself and to all before it. There are as
# many queries as keys, so a tile of keys that lies in shared memory is used by 128 query rows, and the tensor cores, not the
# memory, set the pace. This notebook follows the 299 tokens of a real prompt (SmolLM2-135M) through the tiles, shows which
# tiles are never touched, and runs the kernel and the emulator in lockstep.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton and torch besides, on
# Linux.*

# %%
import numpy as np

from kvlab.attention import explain, mha_prefill, mha_prefill_cache
from kvlab.attention.masks import CausalMask, ChunkedCausalMask, SlidingWindowCausalMask
from kvlab.data import load_smollm2
from kvlab.demo.steps import paged_cache
from kvlab.exercises import ask, hint, predict
from kvlab.hardware import get_atom
from kvlab.mirror import lockstep
from kvlab.staging import Traffic
from kvlab.viz import draw_atom

capture = load_smollm2()
LAYER, N = 1, capture.prompt_tokens
q, k, v = (x[LAYER, :N][None] for x in (capture.q, capture.k, capture.v))
print(f"q {q.shape} [B, S, Hq, D]; k, v {k.shape} [B, n, Hkv, D], {q.dtype}")

# %% [markdown]
# ## Tiles of the score matrix
#
# A program works on `BM` query rows of one head and walks over the keys `BN` at a time. It never writes the 299 x 299 scores:
# it keeps a running maximum, a running sum and the output tile in registers.

# %%
plan = explain(mha_prefill, q, k, v)
BM, BN = plan.config.BM, plan.config.BN
print(plan)

# %% [markdown]
# With a causal mask a tile is one of three kinds: every row sees all its keys, some rows see some, or none sees any. The last
# kind is skipped: not masked, but never loaded. MAX's masks say the status of a tile; 0 is "no mask", 1 "partial", 3 "full".


# %%
def statuses(mask):
    """Status of each tile of the prompt [query tiles, key tiles]."""
    starts = np.arange(0, N, BM), np.arange(0, N, BN)
    return np.array([[int(mask.status(int(a), int(b), BM, BN)) for b in starts[1]] for a in starts[0]])


tiles = statuses(CausalMask())
print(tiles)

# %% [markdown]
# **Question 1.** How many of these tiles does the causal prompt *load*, for one head?

# %% tags=["question"]
loaded = None  # your answer, a number

# %%
ask("10.loaded", loaded)

# %% [markdown]
# A window or chunks leave fewer.
#
# **Guess.** Each row sees the last 64 keys only. How many of the 15 tiles are loaded now?

# %%
guess = predict(3, 5, 7, 11)
guess

# %%
guess.compare(int((statuses(SlidingWindowCausalMask(64)) != 3).sum()))
for mask in (CausalMask(), SlidingWindowCausalMask(64), ChunkedCausalMask(128)):
    status = statuses(mask)
    print(f"{mask!r:40} {(status == 0).sum()} whole, {(status == 1).sum()} partial, {(status == 3).sum()} skipped")

# %% [markdown]
# ## The two siblings in lockstep
#
# Full tiles come first, without a mask, then the diagonal ones: one loop over the same steps, run twice. Only one
# program is traced here: the last 128 rows of head 0, which see the most keys.

# %%
head = [x[:, :, :1] for x in (q, k, v)]
call = mha_prefill.planned(*head, scale=capture.scale, backend="emulator")
case = dict(zip(("q", "k", "v"), head, strict=True))
case |= {"scale": capture.scale, "problem": call.plan.problem, "config": call.plan.explanation.config}
try:
    run = lockstep("mha_prefill", case | {"features": call.features}, programs=0)
    print(run.finding)
except ImportError as missing:  # the notebook goes on without the kernel
    run = None
    print(missing)
run

# %% [markdown]
# ## Where the bytes go
#
# Count what one head's prefill moves, and compare with decode: there a key was read for 3 rows, here for 128.

# %%
traffic = Traffic()
out = mha_prefill(*head, scale=capture.scale, backend="emulator", traffic=traffic)
for edge, nbytes in traffic.moved.items():
    print(f"{edge:24}{nbytes:>9} bytes")
flop = sum(2 * 2 * 64 * (i + 1) for i in range(N))
print(f"{flop / sum(v for e, v in traffic.moved.items() if 'DRAM' in e):.0f} floating-point operations a byte of DRAM")

# %% [markdown]
# **Question 2.** K and V of this head are 2 x 299 rows of 128 bytes. A program reads those that its last row sees, up to
# whole tiles but not past the end. How many rows of K do the programs of this head read together? (Their last rows are 127,
# 255 and 298.)

# %% tags=["question"]
k_rows = None  # your answer, a number

# %%
ask("10.k_rows", k_rows)

# %% [markdown]
# ## Chunked prefill over pages
#
# A serving engine does not give a long prompt to the GPU in one piece. It stores a chunk in the cache and lets it attend to
# everything stored before: the mask is aligned at the *end*, so query `i` of `S` sees the keys up to `i + n - S`. The last
# 99 tokens, over the pages, give the same rows as the whole prompt:

# %%
pool = paged_cache(capture, page_size=16)
chunk = pool.with_lengths(np.array([200], np.uint32), max_seq_length=99)
starts = np.array([0, 99])
last = mha_prefill_cache(q[0, 200:], chunk, LAYER, cu_seqlens_q=starts, scale=capture.scale)
whole = mha_prefill(q, k, v, scale=capture.scale)
print("largest difference:", np.abs(last.astype(float) - whole[0, 200:].astype(float)).max())
print("from the model:    ", np.abs(whole[0].astype(float) - capture.o[LAYER, :N].astype(float)).max())

# %% [markdown]
# **Question 3.** Suppose 5 new queries meet only 2 keys. How many of the 5 rows see no key at all, and hence give 0 with an
# lse of minus infinity?

# %% tags=["question"]
empty = None  # your answer, a number

# %%
ask("10.empty", empty)

# %% [markdown]
# ## Debug: a mask that is aligned at the wrong end
#
# This kernel masks a chunk as if it were the whole prompt. `S` new queries, `n` keys: query `i` of the chunk, key `j`.

# %%
def sees(i, j, S, n):
    return j <= i


i, j = np.indices((4, 9))
print("4 new queries, 9 keys: what each row sees, as the kernel has it")
print("\n".join("".join(row) for row in np.where(sees(i, j, 4, 9), "#", ".")))

# %% [markdown]
# **Question 4.** Write the function as it should be. It is tried with 4, 7 and 9 keys.

# %% tags=["question"]
mended = None  # your answer: def mended(i, j, S, n): return ...

# %%
ask("10.mended", mended)

# %% [markdown]
# ## Rows of a tile on the tensor cores
#
# On Hopper, `wgmma` takes Q and K from shared memory and holds the scores in registers. This is the accumulator of a
# warpgroup (of 16 keys, to fit the page): 64 rows, four warps of 16 rows each. A row's scores lie in four lanes, so its
# maximum takes two shuffles.

# %%
draw_atom(get_atom("wgmma.m64n16k16.bf16"), lane=37)
