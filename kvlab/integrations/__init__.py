"""kvlab beside other libraries: their tensors as caches; ``torch_ops``: operations as operators of torch."""

from kvlab.integrations.torch_cache import from_torch

__all__ = ["from_torch"]
