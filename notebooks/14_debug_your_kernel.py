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
# # 14. Debug your kernel
#
# A kernel gives wrong numbers, and no GPU is at hand. Write its *twin*, what it should do in NumPy, with the same names, and run both
# side by side: *lockstep* compares every value that both bind and names the first that differs. The kernel needs no change and no
# markers. It runs in Triton's interpreter, on the CPU. This notebook needs Triton: in a checkout `make demo` has installed it, or
# `%pip install -e "..[kernels]"` does.
#
# *No checkout here? `%pip install` takes the wheel that `pip wheel --no-deps .` makes in one; with Triton besides, on Linux,
# and `kernels_to_debug.py` beside this notebook.*

# %%
import inspect

import numpy as np
from kernels_to_debug import cured_softmax, scaled_rows, scaled_twin, softmax_rows, softmax_twin

from kvlab.exercises import ask, hint, predict
from kvlab.mirror import lockstep_kernel

x = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32) - 3
args = {"x_ptr": x, "out_ptr": np.zeros_like(x), "columns": 50, "BLOCK": 64}

# %% [markdown]
# ## What one sees
#
# `softmax_rows` normalises each row of a 4 x 50 matrix; a program has a row, in a block of 64 columns. Its result is wrong, and that
# is all that is known:

# %%
print(inspect.getsource(softmax_rows.fn))
found = lockstep_kernel(softmax_rows, softmax_twin, args, 4)
print("softmax_rows is", "right" if found.ok else "wrong")

# %% [markdown]
# **Guess.** Where does the fault sit?

# %%
guess = predict("in the sum", "in the division", "in the load", "in the store")
guess

# %% [markdown]
# **Question 1.** How many columns of a program's block lie behind the end of its row?

# %% tags=["question"]
behind = None  # your answer, a number

# %%
ask("14.behind", behind)

# %% [markdown]
# ## Line by line
#
# Every quantity of the kernel at the left, the twin's at the right, and how far they are apart. The difference explains itself where it has a known pattern: transposed, shifted
# by a tile, a mask or a scale left out, the wrong swizzle, rounding to another dtype.

# %%
guess.compare("in the load")
found

# %% [markdown]
# The columns behind the row's end were loaded as 0, and 0 is larger than the row's own numbers: they take part in the maximum and
# in the sum. What a masked load gives must be neutral for what follows, and the neutral element of a softmax is minus infinity.
#
# **Question 2.** Suppose that 0 is the largest `x` of a block, and that `e` of the row's own columns adds up to 28. How many times
# too large is `total`?

# %% tags=["question"]
factor = None  # your answer, a number

# %%
ask("14.factor", factor)

# %% [markdown]
# **Question 3.** Another kernel adds up each row, which it loads with the same mask. What must its load give behind the end?

# %% tags=["question"]
neutral = None  # your answer, a number

# %%
ask("14.neutral", neutral)

# %% [markdown]
# ## The cure
#
# `cured_softmax` stands with the others in [kernels_to_debug.py](kernels_to_debug.py):

# %%
lockstep_kernel(cured_softmax, softmax_twin, args, 4)

# %% [markdown]
# ## Debug: three rows of four
#
# `scaled_rows` gives stored numbers their size back: each group of 16 columns of a row has a scale, and a row of 50 columns has four
# of them, `[rows, 4]`. Of four rows the first comes out right. The twin takes the scales of its row and repeats each of them:

# %%
scales = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
lockstep_kernel(scaled_rows, scaled_twin, args | {"scale_ptr": scales, "GROUP": 16}, 4)

# %% [markdown]
# **Question 4.** Write the place of a column's scale, counted from `scale_ptr`, as it should be. It is tried with four rows of 48, of
# 50 and of 64 columns.

# %% tags=["question"]
place = None  # your answer: def place(row, column, columns): return ...

# %%
ask("14.place", place)

# %% [markdown]
# In a test it is one line, `assert_lockstep(kernel, twin, args, grid)`: it fails with the sentence above. On the command line:
# `kvlab lockstep FILE.py:kernel TWIN.py:function NAME=VALUE ... --grid 4`. Next: [15. X-ray](15_xray.ipynb): a kernel that is right, and slow.
