"""Products with fp8 e4m3 K and V on 16-bit tensor cores: helpers in Triton (``kernel``) and their twins (``emulator``).

Tiles are loaded as 16-bit elements, pairs of neighbouring columns: so they move, are swizzled and are transposed as
those of 16-bit storage are. In registers a pair becomes two float16, which hold every e4m3: one of the even and one of
the odd columns; a product is the sum of that over the even and that over the odd columns.

``halves``  pairs -> (even, odd) columns in float16
``narrow``  rows of q in float16, divided by a power of two for which their largest is below 2
"""
