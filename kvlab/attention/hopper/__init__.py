"""Common part of the operations' kernels for Hopper, in Gluon and in NumPy.

``choice``     whether a call goes to a kernel for Hopper
``kernel``     Gluon: boxes of TMA, barriers, operands of wgmma, pages, splits, the softmax of a block
``emulator``   their twins
``cta``        an emulated CTA whose warps are specialised, and where its tiles lie
``turns``      the partitions of emulated CTAs take turns
"""
