"""Parts that kvlab needs from Triton beyond its language: a right interpreter, a process for it, a compiler without a
GPU.

`interpreter` corrects Triton's CPU interpreter, `child` runs interpreted kernels in a process of their own, `compile`
compiles a kernel for any target on a machine without a GPU, `sass` finds registers that the assembler forgot to write,
`versions` knows which releases are tested. Importing this package imports neither torch nor Triton.
"""
