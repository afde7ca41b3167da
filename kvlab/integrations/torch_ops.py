"""Operators of torch for every public operation: ``torch.ops.kvlab.mha_decode_paged`` and the others.

Importing this module registers them; a call of ``kvlab.attention`` that torch.compile or torch.export traces does so
itself and goes through them. An operator takes what its operation takes, by the same names, with every argument that
may be left out None, and in place of

* ``mask``: ``mask`` the names of its classes, ``mask_numbers`` and ``mask_arrays`` what they are made of;
* ``window``: a list of one or two numbers;
* a scale that is a number: ``k_scale_number`` and the like;
* ``rope``: ``rope_cos``, ``rope_sin``, ``rope_interleaved``, ``rope_first``;
* a collection: ``blocks``, ``cache_lengths``, ``lookup_table`` and the other arguments of its constructor.

Operators of attention give ``(out, lse)``; their overload ``.out`` writes ``out``, behind the arrays that a call needs,
and gives the lse. Stores are declared to write their caches and scales, and give nothing.

>>> import torch
>>> outs, lses = torch.arange(2.0).repeat_interleave(16).reshape(2, 1, 1, 16), torch.zeros(2, 1, 1)
>>> out, lse = torch.ops.kvlab.merge_states(outs, lses, backend="emulator")
>>> out[0, 0, 0].item(), round(lse.item(), 4)
(0.5, 0.6931)
>>> OPERATORS["merge_states"].writing
<OpOverload(op='kvlab.merge_states', overload='out')>
"""

from kvlab.attention.call.torch_ops import OPERATORS as OPERATORS
