"""Products with K and V of 4 bits on 16-bit tensor cores: helpers in Triton (``kernel``), their twins (``emulator``).

Tiles are loaded as 16-bit elements of four neighbouring columns, as those of fp8 are in pairs. In registers an element
becomes four float16, of the columns 4 n, 4 n + 1, 4 n + 2 and 4 n + 3; a product is the sum of those over each of them.
An e2m1 times an e4m3 scale is exact in float16 over 2^14, which the launch's factors make good.

A tile of 8 query rows is multiplied as S^T = K Q^T and O^T = V^T P^T; V and the scales of its blocks are loaded with
their columns first for it, and converted in that order (TURNED).

Of scales in words of two blocks, as they are where rows lie at even bytes, and of integers a lane has two neighbouring
elements by ldmatrix, as the emulated CTA; of scales in bytes or in the 4x4 order four, which Triton reads by ld.shared.
Sums are the same, wavefronts of reads are not.

``key_blocks``, ``value_blocks``  the scales of the blocks of K's and V's tile
``quarters_of_e2m1``, ``quarters_of_int4``  elements -> four tiles in float16
``row_sums``, ``add_minima``  what codes over minima of tokens, which are converted less 8, lack in the sums of products
"""
