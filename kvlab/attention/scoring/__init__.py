"""Steps of the attention kernels on scores: helpers in Triton (``kernel``) and their twins in NumPy (``emulator``).

Both modules have the same functions with the same arguments, called in the same steps of a kernel and its emulator.
Scores are in units of log2. Positions, keys and bounds are 32-bit, offsets 64-bit.

``key_range``   keys that rows see: an interval, chunks, lengths
``visible_end`` how many a sequence has, or its valid ones
``cap``         softcap
``distance``    ALiBi
``add_bias``    what a mask adds, and which keys it leaves visible
``head_scale``  the scale of a KV head;  ``token_scale``  those of a tile of keys
"""
