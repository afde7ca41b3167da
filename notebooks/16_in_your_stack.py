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
# # 16. In your stack
#
# A cache in pages is an array, whoever fills it. This notebook puts kvlab under other people's calls: one cache, read as
# flash-attention, FlashInfer and vLLM read it, compiled, and over ranks; then under transformers, where a model writes text
# with its keys in pages; at the end a small server. Needs the extras `kernels` and `models`; in a checkout
# `%pip install -e "..[kernels,models]"` brings them. All runs on the CPU, in the emulator (`backend="emulator"`); on a GPU leave
# the word out.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with torch and transformers
# besides.*

# %%
import copy
import importlib
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab.attention import merge_states, mha_decode_paged
from kvlab.exercises import ask, hint
from kvlab.integrations import from_torch
from kvlab.integrations.distributed import ContextShard
from kvlab.integrations.flash_attn import flash_attn_with_kvcache
from kvlab.integrations.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from kvlab.integrations.transformers import CACHE_ARGUMENT, KVLabCache, register
from kvlab.integrations.vllm import reshape_and_cache_flash, unified_attention
from kvlab.viz import draw_page_table

# %% [markdown]
# ## One cache, four callers
#
# Two sequences of 21 and 5 tokens, two KV heads of 64 numbers, pages of 16 tokens. vLLM's workers keep K and V of a page side
# by side, `[pages, 2, page_size, heads, D]`, and store by *slots*: `page * page_size + place in the page`.

# %%
PAGES, PAGE, HEADS, D = 6, 16, 2, 64
table, lengths = torch.tensor([[3, 5], [0, 2]], dtype=torch.int32), torch.tensor([21, 5], dtype=torch.int32)
cache = torch.full((PAGES, 2, PAGE, HEADS, D), torch.nan)
k_cache, v_cache = cache.unbind(1)

token = torch.cat([torch.arange(n) for n in lengths])
row = torch.repeat_interleave(torch.arange(2), lengths)
slots = table[row, token // PAGE].long() * PAGE + token % PAGE
k, v = torch.randn(2, len(slots), HEADS, D, generator=torch.Generator().manual_seed(0))
reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", 1.0, 1.0, backend="emulator")
draw_page_table(table.numpy(), lengths.numpy(), PAGE, pages=PAGES, token=(0, 17))

# %% [markdown]
# **Question 1.** Into which slot went token 20 of sequence 0?

# %% tags=["question"]
slot = None  # your answer

# %%
ask("16.slot", slot)

# %% [markdown]
# Now each asks the same: one new query for each sequence, over all keys of it. flash-attention takes the table,

# %%
q = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1))  # [B, Hq, D]
flash = flash_attn_with_kvcache(
    q[:, None], k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, backend="emulator"
)[:, 0]

# %% [markdown]
# FlashInfer lists of pages and how full the last one is,

# %%
wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", backend="emulator")
indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [3, 5, 0], [5, 5]))
wrapper.plan(indptr, indices, last, 4, HEADS, D, PAGE, q_data_type="float32")
infer = wrapper.run(q, cache)

# %% [markdown]
# **Question 2.** Debug it. A server computes how full the last page is as `length % page`. Mend the function; it is tried with lengths
# from 1 on.

# %% tags=["question"]
mended = None  # your answer: def mended(length, page): return ...

# %%
ask("16.mended", mended)

# %% [markdown]
# vLLM one array of all new tokens and where each sequence starts, and kvlab itself the arrays as they are.

# %%
vllm = torch.empty_like(q)
starts = torch.tensor([0, 1, 2], dtype=torch.int32)
unified_attention(
    q, k_cache, v_cache, vllm, starts, 1, lengths, 21, D**-0.5, True, (-1, -1), table, 0.0, None, None, None,
    backend="emulator",
)
ours = mha_decode_paged(q, k_cache, v_cache, table, lengths, backend="emulator")
for name, theirs in {"flash-attention": flash, "FlashInfer": infer, "vLLM": vllm}.items():
    print(f"{name:16} largest difference {float((theirs - ours).abs().max()):.1e}")
print(from_torch(cache, lengths, table, kv_axis=1))

# %% [markdown]
# What a signature has and kvlab lacks is refused, by the caller's own name for it:

# %%
try:
    flash_attn_with_kvcache(q[:, None], k_cache, v_cache, cache_seqlens=lengths, block_table=table, sm_margin=8)
except NotImplementedError as error:
    print(error)

# %% [markdown]
# ## Compiled
#
# Under `torch.compile` a call of kvlab is one operator, `torch.ops.kvlab.mha_decode_paged`: torch knows its shapes without
# running it, and fuses what lies around it. `fullgraph=True` is an error where something cannot be traced. "aot_eager" traces
# all and compiles nothing, which is quick; leave the word out for inductor.

# %%
@torch.compile(fullgraph=True, backend="aot_eager")
def attend(q, k_cache, v_cache, table, lengths):
    return mha_decode_paged(q, k_cache, v_cache, table, lengths, backend="emulator").flatten(1)


print("as without:", bool(torch.equal(attend(q, k_cache, v_cache, table, lengths), ours.flatten(1))))
print(torch.ops.kvlab.mha_decode_paged.default._schema.name)

# %% [markdown]
# ## Several GPUs
#
# Pages of a long sequence may lie over the ranks of torch.distributed: each computes over its own, and partial results are
# merged by their lse. On GPUs a rank makes one call, `context_parallel_decode(q, k_cache, v_cache, block_table, seq_lens,
# group=mesh["context"], placement="round_robin")`. Here one process does what two ranks would, page after page in turns.

# %%
parts = []
for rank in range(2):
    shard = ContextShard(rank, 2, columns=1, page_size=PAGE, placement="round_robin")
    mine = shard.before(lengths)
    print(f"rank {rank} has {mine.tolist()} keys, in the pages {table[:, rank].tolist()}")
    own = table[:, rank::2].contiguous()
    parts.append(mha_decode_paged(q, k_cache, v_cache, own, mine, return_lse=True, backend="emulator"))
outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
merged, _ = merge_states(outs, lses, backend="emulator")
print(f"largest difference {float((merged - ours).abs().max()):.1e}; a rank without a key has lse {float(lses[1, 1, 0])}")

# %% [markdown]
# ## A model of transformers
#
# `register()` makes `attn_implementation="kvlab"` known; `KVLabCache` is a cache of transformers whose keys and values lie in
# the pages of a pool. A small model with random weights stands for yours. It writes the same tokens as with its own attention
# and cache, for a batch whose first row begins with padding.

# %%
register(backend="emulator")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)

ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(2))
mask = torch.ones_like(ids)
mask[0, :3] = 0
written = {}
for name in ("eager", "kvlab"):
    model.set_attn_implementation(name)
    pages = KVLabCache(model.config, num_pages=16, page_size=4) if name == "kvlab" else None
    given = {CACHE_ARGUMENT: pages}  # cache=pages; past_key_values=pages before transformers 5.24
    written[name] = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **given)
print("the same tokens:", bool(torch.equal(*written.values())))
print(pages)
held = pages.collection(0)
draw_page_table(held.lookup_table.numpy(), held.cache_lengths.numpy(), 4, pages=16)

# %% [markdown]
# Padding has no slot: the first row has three tokens less. A prompt that many requests begin with is read once.
# `copy.deepcopy`, or `fork`, gives caches that hold the same pages; who writes into a page that others hold gets a page of its
# own first.

# %%
prompt = KVLabCache(model.config, num_pages=16, page_size=4)
with torch.no_grad():
    model(ids[1:, :6], **{CACHE_ARGUMENT: prompt})
pool = prompt.pages.pool
print("pages of the prompt:", pool.num_pages - pool.num_free)
branches = [copy.deepcopy(prompt) for _ in range(3)]
with torch.no_grad():
    for branch, new in zip(branches, (7, 8, 9), strict=True):
        model(torch.tensor([[new]]), **{CACHE_ARGUMENT: branch})
print("each branch:", *(pool.pages(branch.sequences[0]) for branch in branches))

# %% [markdown]
# **Question 3.** The prompt has 6 tokens in pages of 4. How many pages do the prompt and its three branches hold together?

# %% tags=["question"]
together = None  # your answer

# %%
ask("16.together", together)

# %% [markdown]
# With `dtype=torch.float8_e4m3fn` the pages hold e4m3, and a float32 scale for each token and head of K and of V.
#
# **Question 4.** How many bytes does a token take in one layer of this model, with 2 KV heads of 16 numbers?

# %% tags=["question"]
nbytes = None  # your answer

# %%
ask("16.nbytes", nbytes)

# %% [markdown]
# ## A server
#
# `examples/serve_smollm2.py` serves many requests over one pool: each step reads a piece of a waiting prompt and writes a token
# of every running request. Prompts that begin alike share pages. Where the pool is full the youngest request gives its pages
# back and is computed again later. Here 6 requests, 4 at a time, and a pool that is too small for them.

# %%
sys.path.insert(0, "../examples")
server, requests = importlib.import_module("serve_smollm2").main(
    ["--device=cpu", "--backend=emulator", "--layers=1", "--vocabulary=256", "--requests=6", "--slots=4", "--new-tokens=8",
     "--pages=9"]
)
again = [request.number for request in requests if len(request.spans) > 1]
print("computed anew:", again)

# %% [markdown]
# The outputs are those that transformers writes one by one; the server compared them itself. A pre-emption costs time, not
# tokens: the beginning is read again, much of it from pages that others hold.

# %%
for request in requests:
    line = np.full(60, " ")
    for first, last in request.spans:
        line[int(first / server.used[-1][0] * 59) : int(last / server.used[-1][0] * 59) + 1] = "-"
    for time in request.times:
        line[int(time / server.used[-1][0] * 59)] = "o"
    print(f"request {request.number} |{''.join(line)}|")
