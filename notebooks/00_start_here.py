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
# # 0. Start here
#
# When a language model writes a word, each of its layers multiplies one query with the keys of all words before. The keys and
# values are kept: the *KV cache*. These notebooks follow one number of one key, byte by byte, from the memory of a GPU to the unit
# that multiplies it. Everything runs in NumPy, on any machine; what is counted here is what an H100 counts.
#
# `make lab` has installed the library; without `make`, `pip install .` in the checkout does. The notebooks 0 to 8 need NumPy and
# nothing else.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; nothing else is needed.*

# %%
from kvlab.attention import explain, mha_decode
from kvlab.data import load_smollm2
from kvlab.demo.pictures import byte_path
from kvlab.demo.steps import paged_cache
from kvlab.exercises import ask, hint, predict, progress
from kvlab.viz import draw_page_table, draw_path_of_a_byte

capture = load_smollm2()  # keys, values and queries of SmolLM2-135M, which has read 299 tokens

# %% [markdown]
# ## How the notebooks work
#
# Run the cells from the top, one after another (Shift+Enter). A section asks, then shows. Where a cell says *Guess*, choose before you
# run the next one: a picture teaches more once it has surprised you. A question waits for a value in its cell: write it in place of
# `None`, run the cell and the one with `ask`, which tells whether it is right, and what it is if it is a usual mistake. `hint` gives
# one hint each time you call it, in a cell of yours: `hint("00.key_bytes")`. *Debug* means a piece that is broken and that you mend.
# Answers stand nowhere.

# %% [markdown]
# ## Twenty words
#
# Skim them now, and come back when one is missing.
#
# | word | it looks like | meaning |
# |---|---|---|
# | token | `The` `cat` `sat` | a piece of text; the model keeps a key and a value of each, in each layer |
# | head | `q0 q1 q2` → `k0` | one of several small attentions side by side; query heads share KV heads in groups |
# | prefill, decode | `[1 2 3 4]`; `[5]` `[6]` `[7]` | reading many new tokens at once; writing one after the other |
# | DRAM | `80 GB` | the GPU's large memory |
# | page, page table | `[19, 4, 10]` | 16 tokens, or so, of the cache in one piece of DRAM; the list that finds them |
# | kernel, emulator | `tl.dot(q, k)`; `q @ k.T` | what runs on the GPU, written in Triton; the same steps in NumPy, byte by byte |
# | lockstep | `s` = `s`, `p` = `p` | kernel and emulator run side by side and are compared after each step |
# | thread, lane, warp | `T0 T1 … T31` | one line of execution; its number among 32; these 32 together |
# | program | `warp 0 … warp 3` | one instance of a kernel: some warps that share a small memory, also called a *CTA* or a block |
# | shared memory | `228 KB` | that small memory, beside the arithmetic: fast as long as its banks work at once |
# | bank | `0│1│2│ … │31` | one of 32 columns of shared memory, 4 bytes wide; it delivers one word in a pass |
# | pass, wavefront | `1` `2` … `8` | one turn of shared memory. To readers of AMD's manuals a wavefront is 64 lanes: here it never is |
# | register | `0x3f80bf00` | 32 bits that belong to one thread |
# | tensor core | `C += A B` | multiplies small matrices that lie in the registers of a warp, or in shared memory |
# | tile | `64 x 128` | the part of K, V or Q that a program has at a time |
# | fragment | `a0 a1 … a7` | the numbers of a tile that one lane holds |
# | layout | `(4,8):(8,1)` | a function from coordinates to an offset, written shape:strides |
# | swizzle | `column ^ row % 8` | exclusive or of address bits that spreads the rows of a tile over the banks |
# | stage | `0 1 0 1` | one of the buffers that a pipeline fills while it reads another |
# | fp8 | `1.75 * 2^3` | numbers of one byte, with a scale for many of them |

# %% [markdown]
# ## The six places of a byte
#
# | place | what is there | explained in |
# |---|---|---|
# | page table | which page holds which tokens of a sequence | [6. KV caches](06_kv_caches.ipynb) |
# | page, in DRAM | 16 tokens of all heads, numbers of 2 bytes, or of 1 byte with scales | [6](06_kv_caches.ipynb), [12. fp8](12_fp8_kv.ipynb) |
# | tile, on its way | 64 or 128 keys that a program copies together | [5. TMA](05_tma.ipynb), [7. KV buffers](07_kv_buffer.ipynb) |
# | shared memory | the tile in 32 banks, its rows shuffled so that no two collide | [3. Swizzles and banks](03_swizzles_and_banks.ipynb) |
# | registers | a few numbers of it for each of 32 lanes | [4. Fragments](04_fragments.ipynb) |
# | product | the scores, then the output | [8](08_kv_mma_op.ipynb), [9. Decode](09_mha_decode.ipynb), [10. Prefill](10_mha_prefill.ipynb) |
#
# **Guess.** A key of the model has 64 numbers of bfloat16, a number of two bytes, and there are 3 KV heads. How many bytes of keys
# does a layer keep for one token?

# %%
guess = predict(64, 128, 192, 384)
guess

# %%
guess.compare(capture.k[0, 0].nbytes)

# %% [markdown]
# The first two places: the page table, and the pages of 16 tokens that it finds. The sequence is in one order, its pages in another.
# 299 tokens fill 18 pages and 11 slots of a 19th; a 20th waits for the words that the model will write.

# %%
LAYER, HEAD, TOKEN = 1, 2, 137
pool = paged_cache(capture, page_size=16)
draw_page_table(pool.lookup_table, [capture.prompt_tokens], 16, pages=pool.total_num_pages, names=["the prompt"])

# %% [markdown]
# Number 37 of the key of token 137 in KV head 2, at its six places, each with the address it has there. It looks like much now; after notebook 4 each line
# of it is yours.

# %%
config = explain(mha_decode, capture.q[LAYER, 298][None], pool, LAYER).config
draw_path_of_a_byte(byte_path(capture, pool, config, LAYER, HEAD, TOKEN, element=37))

# %% [markdown]
# ## Three questions
#
# **Question 1.** How many bytes has one key of one head?

# %% tags=["question"]
key_bytes = None  # your answer, a number

# %%
ask("00.key_bytes", key_bytes)

# %% [markdown]
# **Question 2.** The model has 9 query heads and 3 KV heads. How many query heads read the same keys?

# %% tags=["question"]
group = None  # your answer, a number

# %%
ask("00.group", group)

# %% [markdown]
# **Question 3.** In which page of the sequence, counted from 0, is token 137? A page has 16 tokens.

# %% tags=["question"]
page = None  # your answer, a number

# %%
ask("00.page", page)

# %% [markdown]
# ## Three ways through
#
# - **To learn**: [1](01_follow_one_token.ipynb), [2](02_layouts.ipynb), [3](03_swizzles_and_banks.ipynb),
#   [4](04_fragments.ipynb), then [6](06_kv_caches.ipynb) and [9](09_mha_decode.ipynb).
# - **To write kernels**: [3](03_swizzles_and_banks.ipynb), [4](04_fragments.ipynb), [5](05_tma.ipynb), [7](07_kv_buffer.ipynb),
#   [8](08_kv_mma_op.ipynb), [13](13_on_the_chip.ipynb), [14](14_debug_your_kernel.ipynb), [15](15_xray.ipynb),
#   [18](18_linear_layouts.ipynb).
# - **To serve models**: [6](06_kv_caches.ipynb), [9](09_mha_decode.ipynb), [10](10_mha_prefill.ipynb), [11](11_mla.ipynb),
#   [12](12_fp8_kv.ipynb), [16](16_in_your_stack.ipynb), [17](17_kv_formats.ipynb).
#
# What is answered so far, since this kernel was started:

# %%
progress()
