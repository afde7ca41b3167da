"""kvlab beside other libraries: their tensors as caches."""

from kvlab.integrations.torch_cache import from_torch

__all__ = ["from_torch"]
