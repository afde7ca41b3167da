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
# # 12. An fp8 KV cache
#
# Decode is as fast as the cache can be read, so a cache of half the bytes is nearly twice as fast. `float8_e4m3` has 4 bits of
# exponent and 3 of mantissa: 448 is its largest number, and between 16 and 32 it knows eight. The rest is done by *scales*.
# This notebook quantises a real cache (SmolLM2-135M), looks at what is stored, and follows the scales to the places of the
# kernel where they cost nothing.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton and torch besides, on
# Linux.*

# %%
import ml_dtypes
import numpy as np

from kvlab.attention import explain, mha_decode_paged, mha_prefill
from kvlab.attention.features.resolve import resolve_features
from kvlab.attention.masks import MaskPlan
from kvlab.cache import KVCacheStaticParams, PagedKVCacheCollection
from kvlab.data import load_smollm2
from kvlab.exercises import ask, hint, predict
from kvlab.mirror import lockstep
from kvlab.staging import Traffic
from kvlab.viz import ByteBudget, draw_quantised_page, explore

fp8 = np.dtype(ml_dtypes.float8_e4m3fn)
capture = load_smollm2()
LAYER, N, H, D, PAGE = 1, capture.prompt_tokens, capture.kv_heads, capture.head_dim, 16
q, k, v = capture.q[LAYER, N - 1][None], capture.k[LAYER, :N], capture.v[LAYER, :N]
print("largest key", np.abs(k.astype(float)).max(), "largest value", np.abs(v.astype(float)).max(), "fp8's largest 448")

# %% [markdown]
# **Question 1.** fp8 has 3 bits of mantissa. Which number is stored for 18.9 (without a scale)? Its neighbours are the
# multiples of 2 between 16 and 32.

# %% tags=["question"]
stored = None  # your answer, a number

# %%
ask("12.stored", stored)

# %% [markdown]
# ## Which scale?
#
# One for the whole tensor, one for each head, or one for each token and head: `amax / 448`. Then the numbers use the range
# that fp8 has. The error left is that of the mantissa, as long as no number falls below the smallest fp8.
#
# **Guess.** How large is that error, relative to the numbers?

# %%
guess = predict(0.002, 0.02, 0.2)
guess

# %%
AXES = {"one": (0, 1, 2), "a head": (0, 2), "a token and head": 2}


def quantise(x, axis):
    """Values in fp8 and their scales (float32, axes kept)."""
    scale = np.abs(x.astype(np.float32)).max(axis=axis, keepdims=True) / 448
    return (x.astype(np.float32) / scale).astype(fp8), scale


for name, axis in AXES.items():
    errors = []
    for x in (k, v):
        stored_x, scale = quantise(x, axis)
        back = stored_x.astype(np.float32) * scale
        errors.append(np.linalg.norm(back - x.astype(np.float32)) / np.linalg.norm(x.astype(np.float32)))
    print(f"scale for {name:18} relative error of K {errors[0]:.4f}, of V {errors[1]:.4f}")
guess.compare(float(f"{errors[0]:.1g}"))

# %% [markdown]
# ## A quantised page
#
# The cache keeps the scales beside the pages, in the same order: page, slot, head. Here is one page; hover a number.

# %%
pages = -(-N // PAGE) + 2
pool = PagedKVCacheCollection.allocate(
    KVCacheStaticParams(H, D),
    num_pages=pages,
    page_size=PAGE,
    num_layers=1,
    batch_size=1,
    max_length=N,
    dtype=fp8,
    scale_dtype="float32",
    quantization_granularity=D,
)
pool.lookup_table[0, : -(-N // PAGE)] = np.random.default_rng(0).permutation(pages)[: -(-N // PAGE)]
tokens, heads = np.arange(N)[:, None], np.arange(H)
for part, x in ((pool.get_key_cache(0), k), (pool.get_value_cache(0), v)):
    stored_x, scale = quantise(x, 2)
    part.store(0, heads, tokens, 0, stored_x)
    part.store_scale(0, heads, tokens, 0, scale)
held = pool.with_lengths(np.array([N - 1], np.uint32), max_seq_length=1)
keys, values = held.get_key_cache(0), held.get_value_cache(0)
draw_quantised_page(keys, page=2, mark=(5, 40))

# %% [markdown]
# **Question 2.** How many bytes does the cache need for one token and one head, K and V, scales (float32) among them? In
# bfloat16 it was 256.

# %% tags=["question"]
nbytes = None  # your answer, a number

# %%
ask("12.nbytes", nbytes)

# %% [markdown]
# ## What half the bytes bring
#
# **Guess.** A decode step of 64 sequences of 4096 keys, 32 query and 8 KV heads of 128 numbers, on a GPU that reads 3.1 TB/s. How many
# times as fast can it be with K and V in fp8?

# %%
faster = predict(1, 1.5, 2, 4)
faster

# %%
budget = ByteBudget(query_heads=32, kv_heads=8, head_dim=128, bandwidth=3.1e12, compute=7.9e14, shared=2.9e13)
least = [budget.at(batch=64, context=4096, dtype=dtype).seconds for dtype in ("bf16", "fp8")]
faster.compare(round(least[0] / least[1], 1))
explore(budget)

# %% [markdown]
# Move the sliders: whatever the sizes, DRAM bounds the step, never the arithmetic. So half the bytes are half the time.

# %% [markdown]
# ## Where the scales go
#
# Multiplying each of the 64 numbers of a key with its scale would cost more than the bytes it saves. But
# $q \cdot (s\,k) = s\,(q \cdot k)$: a key's scale is that of its *column of scores*, one multiplication instead of 64; and a
# value's scale may be multiplied onto its column of P. A scale of the whole tensor does not cost even that: it disappears in
# the softmax scale and in the last division.

# %%
arrays = keys.blocks, values.blocks, keys.lookup_table, np.array([N], np.int32)
scales = {"k_scale": keys.scales[..., 0], "v_scale": values.scales[..., 0]}
traffic = Traffic()
out = mha_decode_paged(q, *arrays, **scales, scale=capture.scale, num_splits=1, backend="emulator", traffic=traffic)
chosen = explain(mha_decode_paged, q, *arrays, **scales, num_splits=1)
print(chosen)
print("largest difference from the model's own bf16 attention:", end=" ")
print(np.abs(out.astype(float) - capture.o[LAYER, N - 1].astype(float)).max())
print(dict(traffic.moved))

# %% [markdown]
# Forgetting a scale is the commonest bug of fp8 caches; it is loud here, and silent when the scales are near 1:

# %%
wrong = mha_decode_paged(q, *arrays, scale=capture.scale, backend="emulator")
print("without the scales:", np.abs(wrong.astype(float) - out.astype(float)).max())

# %% [markdown]
# ## Debug: the scales of V
#
# V has a scale for each token. This kernel multiplies the output with their mean, as one would with a single scale:

# %%
def with_mean(p, v, s):  # P [rows, keys], V [keys, D], the scales [keys]
    return p @ v * s.mean()


s_of_v = values.scales[..., 0].astype(np.float32)
s_of_v = s_of_v[values.lookup_table[0, np.arange(N) // PAGE], np.arange(N) % PAGE, 0]
print("scales of V, head 0: from", s_of_v.min(), "to", s_of_v.max())

# %% [markdown]
# **Question 3.** Write the function as it should be.

# %% tags=["question"]
mended = None  # your answer: def mended(p, v, s): return ...

# %%
ask("12.mended", mended)

# %% [markdown]
# ## In lockstep
#
# The steps are those of notebook 9. In `scores` the fp8 keys become float16 in registers, in `softmax` or after it the scales
# of the columns come in.

# %%
features = resolve_features(q, *arrays[:2], mask=MaskPlan(right=0), batch=1, **scales)
case = dict(zip(("k_cache", "v_cache", "block_table", "seq_lens"), arrays, strict=True))
case |= {"q": q[:, None], "scale": capture.scale, "config": chosen.config, "features": features}
try:
    run = lockstep("mha_decode", case)
    print(run.finding)
except ImportError as missing:  # the notebook goes on without the kernel
    run = None
    print(missing)
run

# %% [markdown]
# ## fp8 queries too
#
# If the query is fp8 as well, prefill's $QK^\top$ runs on the fp8 tensor cores, and so does $PV$. The weights P lie between 0 and 1, where
# fp8's steps are finest near its smallest numbers and vanish below them: so P is multiplied by $2^8$ before it is cast, and the
# output by $2^{-8}$.

# %%
p = np.float32(0.0007)
print("a weight of 0.0007 in fp8:        ", float(p.astype(fp8)))
print("as 2^8 times that, divided again: ", float((p * 256).astype(fp8)) / 256)

# %% [markdown]
# **Question 4.** The smallest positive number of e4m3 is $2^{-9}$. Weights below half of it are rounded to 0. With P scaled by
# $2^8$, the bound sinks to $2^{x}$. What is x?

# %% tags=["question"]
x = None  # your answer, a number

# %%
ask("12.x", x)

# %% [markdown]
# ## What 14 digits cost
#
# The fp8 tensor cores of an H100 keep 14 binary digits of a sum, at every step (notebook 4). With `arithmetic="chip"` the emulator
# computes as the chip does: sums, exponentials, divisions. The model's own prompt, all three in fp8, a scale for each tensor:

# %%
(q8, q_by), (k8, k_by), (v8, v_by) = (quantise(x, (0, 1, 2)) for x in (capture.q[LAYER, :N], k, v))
by = {"q_scale": float(q_by.item()), "k_scale": float(k_by.item()), "v_scale": float(v_by.item()), "scale": capture.scale}
heads = capture.q.shape[2] // H  # of the first KV head
args = q8[None, :, :heads], k8[None, :, :1], v8[None, :, :1]
exact, exact_lse = mha_prefill(*args, **by, backend="reference", return_lse=True)
for arithmetic in ("float32", "chip"):
    got, lse = mha_prefill(*args, **by, arithmetic=arithmetic, return_lse=True)
    errors = np.abs(lse - exact_lse).max(), np.abs(got.astype(float) - exact.astype(float)).max()
    print(f"{arithmetic:8} lse off by {errors[0]:.1e}, output by {errors[1]:.1e}, of {np.abs(exact.astype(float)).max():.1f}")

# %% [markdown]
# The lse is thousands of times further off: what looks like a bug to a test of 1e-5 is none, and its bound for fp8 is what the
# chip arithmetic gives. The output hardly changes, as P in fp8, with its 4 digits, costs more than the sums.
