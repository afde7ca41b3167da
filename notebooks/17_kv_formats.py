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
# # 17. KV formats
#
# A KV cache is bytes, and every engine puts them in an order of its own. Where a writer and a reader mean different orders nothing
# fails: shape, dtype and size are right, and the model says something else. This notebook writes formats down as data, looks at
# them, finds a disagreement, and converts one into another. NumPy is all that it needs.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one.*

# %%
import numpy as np
from IPython.display import display

from kvlab.data import load_smollm2
from kvlab.exercises import ask, hint, predict
from kvlab.formats import Format, agree, convert, identify, known_format, markers
from kvlab.viz import draw_format

# %% [markdown]
# ## Sixteen tokens in ten formats
#
# The first 16 tokens of a prompt in the first layer of SmolLM2-135M: one page, 3 KV heads of 64 numbers.

# %%
capture = load_smollm2()
k, v = capture.k[0, :16], capture.v[0, :16]  # [slots, heads, dims], bfloat16
names = ["vllm.blocks_first", "vllm.hnd", "vllm.LBNHC", "vllm.x_split", "aiter.shuffle", "llama_cpp.transposed_v",
         "vllm.int8_per_token_head", "llama_cpp.q8_0", "llama_cpp.q4_0", "flashinfer.nvfp4"]
formats = {name: known_format(name, pages=1, page_size=16, heads=3, dim=64) for name in names}
stored = {name: one.encode(k[None, None], v[None, None]) for name, one in formats.items()}

print(f"{'format':26}{'bytes':>7}{'a token':>9}   largest error of K and V")
for name, one in formats.items():
    errors = [np.abs(x[0, 0] - y.astype(np.float32)).max() for x, y in zip(one.decode(stored[name]), (k, v), strict=True)]
    print(f"{name:26}{one.nbytes:7}{one.bytes_per_token:9}   {errors[0]:.3f}  {errors[1]:.4f}")

# %% [markdown]
# A format is a line of text: axes from the outermost to the innermost, then the field and its type. `where` gives the byte of an
# element.

# %%
nhd = formats["vllm.blocks_first"]
print(nhd.print())
nhd.where("k", slot=1, head=0, dim=0)

# %% [markdown]
# **Question 1.** At which byte begins the number of V in slot 3, head 1, dim 5?

# %% tags=["question"]
place = None  # your answer, a number

# %%
ask("17.place", place)

# %% [markdown]
# All ten, byte by byte, of two heads. A colour is a field, slots alternate in lightness; hovering tells what lies in a cell. First
# the rows of FlashInfer and flash-attention: slots before heads, or heads before slots.

# %%
def drawn(*names):
    for name in names:
        display(draw_format(formats[name].resized(head=2)))


drawn("vllm.blocks_first", "vllm.hnd")

# %% [markdown]
# K and V of a token side by side; and keys in pieces of 16 bytes, those of all slots together, with the values of all slots of a
# dim side by side.

# %%
drawn("vllm.LBNHC", "vllm.x_split")

# %% [markdown]
# AITER cuts both, in pieces of 8 dims of K and of 8 slots of V, as its matrix instructions read them. llama.cpp without flash
# attention keeps K in rows, and V transposed.

# %%
drawn("aiter.shuffle", "llama_cpp.transposed_v")

# %% [markdown]
# One byte a number: the scales of each token and head come after the values, or each 32 dims begin with theirs.

# %%
drawn("vllm.int8_per_token_head", "llama_cpp.q8_0")

# %% [markdown]
# Half a byte: blocks of 18 bytes with their scale in front, or NVFP4, whose scales have an order of their own for V.

# %%
drawn("llama_cpp.q4_0", "flashinfer.nvfp4")

# %% [markdown]
# **Question 2.** The last one, NVFP4, has half a byte for a number and a scale of one byte for each 16 of them. How many bytes does a
# token take in a layer of a larger model, with 8 KV heads of 128 numbers?

# %% tags=["question"]
per_token = None  # your answer, a number

# %%
ask("17.per_token", per_token)

# %% [markdown]
# `identify` goes the other way: it reads raw bytes by every format it knows, and says which of them give back what was written.
# Here the engine stored *markers*, numbers that tell where they belong.

# %%
shape = (1, 1, 16, 3, 64)
raw = formats["aiter.shuffle"].encode(markers(shape), markers(shape, 1))
found = identify(raw, pages=1, page_size=16, heads=3, dim=64)
print([match.name for group in found.matches for match in group])

# %% [markdown]
# ## Debug: a disagreement
#
# FlashInfer's NVFP4 keeps the scales of K row by row, and those of V with four tokens side by side. This reader takes both row by
# row. It has the right sizes, the right types and the right offsets.

# %%
writer = formats["flashinfer.nvfp4"]
reader = Format.parse(
    "layer:1 (page:1 kv:2 head:3 slot:16 dim:64 kv.e2m1, page:1 kv:2 head:3 slot:16 dim/16:4 scale.e4m3)", name="scales in rows"
)
right, wrong = (one.decode(stored["flashinfer.nvfp4"])[1][0, 0] for one in (writer, reader))
right.shape == wrong.shape, writer.nbytes == reader.nbytes

# %% [markdown]
# **Guess.** How many in a hundred numbers of V come out wrong?

# %%
guess = predict(7, 61, 98)
guess

# %%
guess.compare(round(100 * np.mean(right != wrong)))
q = capture.q[0, 15].astype(np.float32).reshape(3, 3, 64)  # the last token's queries, three to a KV head
p = np.exp(np.einsum("hgd,shd->hgs", q, k.astype(np.float32)) * capture.scale)
p /= p.sum(-1, keepdims=True)
out, off = (np.einsum("hgs,shd->hgd", p, x) for x in (right, wrong))
print(f"attention of the last token is off by {np.linalg.norm(out - off) / np.linalg.norm(out):.0%}, and finite")

# %% [markdown]
# No error is raised anywhere. `agree` compares the two texts, not the values: it decides from the strides, for all elements at
# once, and names the first that lies elsewhere. The picture has two of the three heads, so that
# its bytes have lower numbers.

# %%
print(agree(writer, reader).words)
agree(*(one.resized(head=2) for one in (writer, reader)))

# %% [markdown]
# **Question 3.** The reader looks for the scale of slot 0, dim 16. The scale of which slot does it get?

# %% tags=["question"]
whose = None  # your answer, a number

# %%
ask("17.whose", whose)

# %% [markdown]
# ## A converter
#
# Some kernels of vLLM read keys split into pieces of 16 bytes: `[heads, dims / 8, slots, 8]`. Here are the bytes of such a page's
# K. They are wanted as rows, `[slots, heads, dims]`.

# %%
split = formats["vllm.x_split"]
raw = stored["vllm.x_split"][: 16 * 3 * 64 * 2]  # uint8
print(split.print())

# %% [markdown]
# **Exercise.** Write `rows(raw)`, which gives the bytes as rows. `hint("17.rows")` helps.

# %% tags=["question"]
rows = None  # your answer: a function

# %%
ask("17.rows", rows)

# %% [markdown]
# `convert` makes a plan of byte copies between any two formats that hold the same codes. It refuses where bytes would be lost.
#
# **Guess.** How many copies does it take for K? Bytes that stay side by side are one.

# %%
guess = predict(48, 384, 3072)
guess

# %%
keys = [Format.parse(f"{axes} dim:8 k.bf16") for axes in ("head:3 dim/8:8 slot:16", "slot:16 head:3 dim/8:8")]
plan = convert(*keys)
guess.compare(sum(one.times for one in plan.strided))
print(plan.strided[0])
assert np.array_equal(plan.apply(raw), k.reshape(-1).view(np.uint8))

# %% [markdown]
# The line above is what a GPU gets: no list of copies, but strides at both ends, of which a kernel makes its tiles. On tensors in
# the memory of a GPU `plan.apply` runs it.
#
# Half bytes are copied, too: K of q4_0 keeps dims 0 to 15 in the low halves and 16 to 31 in the high ones, here they become
# neighbours. Another type of number is refused: bytes are copied, and values are not looked at.

# %%
halves = Format.parse("slot:16 head:3 dim/32:2 (k_scale.f16, dim:32 k.b4)")
plan = convert(Format.parse("slot:16 head:3 dim/32:2 (k_scale.f16, dim:16 dim/16:2 k.b4)"), halves)
print(plan)
try:
    convert(formats["vllm.x_split"], formats["llama_cpp.transposed_v"])
except ValueError as error:
    print(error)

# %% [markdown]
# More: [formats](../docs/formats.md), with a permanent anchor for each; `transfer` between ranks, `audit` of a live cache.
