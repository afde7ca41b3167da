"""What the operations' kernels for Hopper share, in Gluon and in NumPy.

``choice``     whether a call goes to a kernel for Hopper
``kernel``     Gluon: boxes of TMA, barriers, operands of wgmma, row sums
``emulator``   their twins
``turns``      the partitions of emulated CTAs take turns
"""
