"""Real attention input: the embedded capture of a language model, and files of the same schema.

>>> capture = load_smollm2()
>>> capture.k.shape, capture.k.dtype  # [layers, tokens, KV heads, head_dim]
((3, 307, 3, 64), dtype(bfloat16))
>>> capture.prompt_tokens, capture.decode_steps, capture.layers
(299, 8, (0, 14, 29))
"""

from __future__ import annotations

from kvlab.data.capture import Capture, load_capture, load_smollm2

__all__ = ["Capture", "load_capture", "load_smollm2"]
