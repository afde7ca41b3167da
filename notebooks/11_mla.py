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
# # 11. MLA: one latent row instead of keys and values
#
# DeepSeek's models (*multi-head latent attention*, *MLA*) store, for each token, no keys and values of heads but one *latent* row from which all of them follow by
# a matrix, and a short part with the rotary position. Decode need not even compute the keys: the matrix is *absorbed* into
# the query, and every head attends to the latent rows themselves, which are K and V in one.
#
# To see this on real activations we write SmolLM2's own cache as latents: its keys and values of a token, 384 numbers, are
# the latent row, and the up-projection of each head is the matrix that picks its 64 keys or values out. So MLA must give
# exactly what the model's attention gave.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton and torch besides, on
# Linux.*

# %%
import numpy as np

from kvlab.attention import explain, mla_decode_paged, mla_prefill_paged
from kvlab.attention.features.resolve import Features
from kvlab.data import load_smollm2
from kvlab.exercises import ask, hint, predict
from kvlab.mirror import lockstep
from kvlab.staging import Traffic
from kvlab.viz import draw_page_table

capture = load_smollm2()
LAYER, N, H, D = 1, capture.prompt_tokens, capture.query_heads, capture.head_dim
LATENT, ROPE, PAGE = 2 * capture.kv_heads * D, 64, 16
q, k, v = (x[LAYER, :N] for x in (capture.q, capture.k, capture.v))

latent = np.concatenate([k.reshape(N, -1), v.reshape(N, -1)], axis=-1)  # [tokens, 384]: 3 keys, then 3 values
kv_head = np.arange(H) // capture.group
up_k = np.zeros((H, LATENT, D), np.float32)  # key of a head = latent @ up_k[head]
up_v = np.zeros((H, LATENT, D), np.float32)
for h in range(H):
    up_k[h, kv_head[h] * D + np.arange(D), np.arange(D)] = 1
    up_v[h, LATENT // 2 + kv_head[h] * D + np.arange(D), np.arange(D)] = 1
print(f"a latent row has {LATENT} numbers for {capture.kv_heads} keys and {capture.kv_heads} values of {D}")

# %% [markdown]
# ## The cache
#
# One row a token, one head, no V storage. Behind the latents come the columns of the rotary part, which all heads share
# (SmolLM2 rotates its keys before they are stored, so we leave that part of the query zero).

# %%
pages = -(-N // PAGE) + 4
table = np.random.default_rng(0).permutation(pages)[None, : -(-N // PAGE)].astype(np.int32)
cache = np.full((pages, PAGE, LATENT + ROPE), np.nan, capture.dtype)
token = np.arange(N)
cache[table[0, token // PAGE], token % PAGE, :LATENT] = latent
cache[table[0, token // PAGE], token % PAGE, LATENT:] = k[:, 0]
draw_page_table(table, [N], PAGE, pages=pages, token=(0, 137), names=["the prompt"])

# %% [markdown]
# **Question 1.** DeepSeek-V3 has 128 heads; a key of a head would have 192 numbers and a value 128. Its latent row has 512
# numbers and 64 for the position. By which factor is the cache smaller than one of keys and values? (Round to a whole number.)

# %% tags=["question"]
factor = None  # your answer, a number

# %%
ask("11.factor", factor)

# %% [markdown]
# ## Decode, absorbed
#
# $q^\top (W_k c) = (W_k^\top q)^\top c$: the query moves into the space of the latents, once for each new token, and then meets
# 299 rows as they are stored. What comes out is a mixture of latent rows; the up-projection of V is applied to *that*.
#
# **Guess.** A query of a head has 64 numbers. How many has it there, with the columns of the position?

# %%
guess = predict(64, 192, 384, 448)
guess

# %%
absorbed = np.einsum("hld,hd->hl", up_k, q[-1].astype(np.float32)).astype(capture.dtype)  # [H, latent]
q_decode = np.concatenate([absorbed, np.zeros((H, ROPE), capture.dtype)], axis=-1)[None]  # [B, H, latent + rope]
guess.compare(q_decode.shape[-1])
lens = np.array([N], np.int32)
options = {"v_dim": LATENT, "scale": capture.scale}
traffic = Traffic()
mixed = mla_decode_paged(q_decode, cache, table, lens, **options, backend="emulator", traffic=traffic)
out = np.einsum("hld,hl->hd", up_v, mixed[0].astype(np.float32))
print("latent output", mixed.shape, "-> heads", out.shape)
print("largest difference from the model:", np.abs(out - capture.o[LAYER, N - 1].astype(float)).max())

# %% [markdown]
# **Question 2.** How many bytes of the cache does this step read from DRAM? (299 rows of 384 + 64 numbers of two bytes; V is
# K's memory, so nothing is read twice by the one program that holds all 9 heads.)

# %% tags=["question"]
nbytes = None  # your answer, a number

# %%
ask("11.nbytes", nbytes)
if nbytes is not None:
    print(dict(traffic.moved))  # with the 9 queries of 448 numbers
    for role, passes in traffic.wavefronts.items():
        print(f"{role:24}{passes:>9} passes, ideal {traffic.ideal[role]:>6}, unswizzled {traffic.unswizzled[role]:>6}")

# %% [markdown]
# ## In lockstep
#
# Look at the step `load_v`: in other kernels it reads V; here it is a line without a load.

# %%
config = explain(mla_decode_paged, q_decode, cache, table, lens, **options, num_splits=1).config
case = {"q": q_decode[:, None], "kv_cache": cache[..., :LATENT], "k_rope": cache[..., LATENT:], "block_table": table}
case |= {"seq_lens": lens, "scale": capture.scale, "features": Features(), "config": config}
try:
    run = lockstep("mla_decode", case)
    print(run.finding)
except ImportError as missing:  # the notebook goes on without the kernel
    run = None
    print(missing)
run

# %% [markdown]
# ## Prefill, not absorbed
#
# With as many queries as keys, absorbing would make every product 384 wide. So prefill projects the latents up first and
# multiplies heads of 64 (DeepSeek: 128); only the rotary part is read from the cache, for all heads the same rows:
# $S = Q_{nope} K^\top + Q_{rope} K_{rope}^\top$.

# %%
keys, values = (np.einsum("hld,nl->nhd", up, latent.astype(np.float32)).astype(capture.dtype) for up in (up_k, up_v))
q_prefill = np.concatenate([q, np.zeros((N, H, ROPE), capture.dtype)], axis=-1)  # [total, H, nope + rope]
starts = np.array([0, N], np.int32)
whole = mla_prefill_paged(
    q_prefill, keys, values, cache, table, lens, starts, starts, latent_dim=LATENT, scale=capture.scale
)
print("prefill", whole.shape, "- largest difference from the model:", end=" ")
print(np.abs(whole.astype(float) - capture.o[LAYER, :N].astype(float)).max())
print("its last row against absorbed decode:", np.abs(whole[-1].astype(float) - out).max())

# %% [markdown]
# ## Debug: scores that are too flat
#
# A kernel for DeepSeek-V3 multiplies the scores of absorbed decode with $1/\sqrt{576}$, as its queries have 512 + 64 numbers. The
# model's text gets worse: its scores are those of the heads, however they are computed.
#
# **Question 3.** Under the root belongs another number. Which? (Sizes as in question 1.)

# %% tags=["question"]
scale = None  # your answer, the number under the root

# %%
ask("11.scale", scale)

# %% [markdown]
# **Question 4.** For one query and one key of a head: how many multiplications more does the absorbed score take than the
# other, with DeepSeek-V3's sizes? (Absorbed: 512 + 64 columns. Not absorbed: 128 + 64.)

# %% tags=["question"]
more = None  # your answer, a number

# %%
ask("11.more", more)
