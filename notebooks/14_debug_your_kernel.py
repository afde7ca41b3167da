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
# A kernel gives wrong numbers, and no GPU is at hand. Write what it should do in NumPy, with the same names, and run both side by
# side: *lockstep* compares every value that both bind and stops at the first that differs. The kernel needs no change and no
# markers. It runs in Triton's interpreter, on the CPU; this notebook needs Triton.

# %%
import numpy as np
from kernels_to_debug import cured_softmax, softmax_rows, softmax_twin

from kvlab.exercises import ask, hint, predict
from kvlab.mirror import lockstep_kernel

x = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32) - 3
args = {"x_ptr": x, "out_ptr": np.zeros_like(x), "columns": 50, "BLOCK": 64}

# %% [markdown]
# ## What one sees
#
# `softmax_rows` in [kernels_to_debug.py](kernels_to_debug.py) normalises each row of a 4 x 50 matrix; a program has a row, in a
# block of 64 columns. The rows of its result do not add up to 1. Here is the wrong kernel's whole output beside NumPy's:

# %%
found = lockstep_kernel(softmax_rows, softmax_twin, args, 4)
found

# %% [markdown]
# **Guess.** In the last row of the table, `out` is wrong. Where does the fault sit?

# %%
guess = predict("in the sum", "in the division", "in the load", "in the store")
guess

# %% [markdown]
# **Question 1.** Which is the first quantity that differs? Give its name, a text.

# %% tags=["question"]
quantity = None  # your answer, e.g. "total"

# %%
ask("14.quantity", quantity)

# %% [markdown]
# The difference explains itself where it has a known pattern: transposed, shifted by a tile, a mask or a scale left out, the wrong
# swizzle, rounding to another dtype.

# %%
guess.compare("in the load")
found.explanation

# %% [markdown]
# **Question 2.** How many elements of the first program's `x` differ?

# %% tags=["question"]
wrong = None  # your answer, a number

# %%
ask("14.wrong", wrong)

# %% [markdown]
# The columns behind the row's end were loaded as 0, and 0 is larger than the row's own numbers: they take part in the maximum and
# in the sum. What a masked load gives must be neutral for what follows, and the neutral element of a softmax is minus infinity.
#
# ## The cure

# %%
lockstep_kernel(cured_softmax, softmax_twin, args, 4)

# %% [markdown]
# **Question 3.** The sum of `e` over a block of 64 columns, of which 14 were loaded as 0, and the largest `x` of which is 0: by how
# much is it too large, at least?

# %% tags=["question"]
more = None  # your answer, a number

# %%
ask("14.more", more)

# %% [markdown]
# In a test it is one line, `assert_lockstep(kernel, twin, args, grid)`: it fails with the sentence above. On the command line:
# `kvlab lockstep FILE.py:kernel`. Next: [15. X-ray](15_xray.ipynb): a kernel that is right, and slow.
