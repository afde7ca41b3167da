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
# # 15. X-ray
#
# A kernel is right, and slow. What the compiler made of it can be read without a GPU: the layouts it chose, the instructions that
# touch memory, how many passes and sectors each of them takes, registers, spills. `xray` compiles a Triton or Gluon kernel for a
# GPU that is not there, counts, and says what helps. This notebook needs Triton.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton besides, on Linux,
# and `kernels_to_debug.py` beside this notebook.*

# %%
from kernels_to_debug import every_fourth, through_shared
from triton.experimental.gluon import language as gl

from kvlab.exercises import ask, hint, predict
from kvlab.xray import diff, xray

# %% [markdown]
# ## Memory
#
# `every_fourth` copies every fourth float. Global memory moves *sectors* of 32 bytes, eight floats. The compiler gives each thread
# four floats that follow one another, so the lanes of one instruction are 64 bytes apart.
#
# **Guess.** How many sectors does an instruction move for each one that would do if the floats were neighbours?

# %%
guess = predict(1, 2, 4, 8)
guess

# %%
floats = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
strided = xray(every_fourth, {**floats, "BLOCK": 1024}, "sm_90")
load = next(edge for edge in strided.edges if edge.operation == "tt.load")
guess.compare(load.sectors // load.ideal_sectors)
strided

# %% [markdown]
# **Question 1.** The kernel wants 1024 floats. How many bytes does its load move?

# %% tags=["question"]
moved = None  # your answer, a number

# %%
ask("15.moved", moved)

# %% [markdown]
# ## Shared memory
#
# `through_shared` writes a tile of 64 x 64 numbers of bfloat16 into shared memory, row by row, and reads it as the operand of a
# matrix product, by `ldmatrix`.

# %%
along = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
operand = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2)
tile = {"x_ptr": "*bf16", "out_ptr": "*bf16", "ROWS": 64, "COLUMNS": 64, "COPY": along, "READ": operand}
plain = xray(through_shared, {**tile, "SHARED": gl.SwizzledSharedLayout(1, 1, 1, [1, 0])}, "sm_90")

# %% [markdown]
# **Question 2.** How many passes does each matrix of `ldmatrix` take here, where one would do? A row has 128 bytes, and nothing is swizzled.

# %% tags=["question"]
passes = None  # your answer, a number

# %%
ask("15.passes", passes)

# %%
plain

# %% [markdown]
# The finding has a cure, and the count that proves it. It is taken over into the kernel; `diff` says what became of it.

# %%
cured = xray(through_shared, {**tile, "SHARED": gl.SwizzledSharedLayout(8, 1, 8, [1, 0])}, "sm_90")
diff(plain, cured)

# %% [markdown]
# **Question 3.** How many wavefronts of shared memory does the cure save, stores and loads together?

# %% tags=["question"]
saved = None  # your answer, a number

# %%
ask("15.saved", saved)

# %% [markdown]
# On the command line: `kvlab xray FILE.py:kernel x_ptr=*fp32 out_ptr=*fp32 BLOCK=1024`. Next: [16. In your stack](16_in_your_stack.ipynb).
