"""kvlab beside other libraries: their tensors as caches; ``torch_ops``: operations as operators of torch."""

try:
    from kvlab.integrations.torch_cache import from_torch
except ModuleNotFoundError as error:
    raise ImportError("torch is not installed: pip install -e '.[kernels]', in kvlab's own folder") from error

__all__ = ["from_torch"]
