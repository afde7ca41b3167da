"""Facts about a KV cache before any token is stored."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.common.checks import count


@dataclass(frozen=True)
class KVCacheStaticParams:
    """The static shape of a KV cache (the names are those of MAX).

    num_heads : KV heads (not query heads).
    head_size : elements of a head.
    is_mla : only the K half is stored; V is read out of K.

    >>> KVCacheStaticParams(num_heads=8, head_size=128).row_size
    1024
    >>> KVCacheStaticParams(num_heads=0, head_size=128)
    Traceback (most recent call last):
        ...
    ValueError: num_heads is 0: must be at least 1
    """

    num_heads: int
    head_size: int
    is_mla: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_size"):
            count(name, getattr(self, name), least=1)

    @property
    def row_size(self) -> int:
        """Elements of a *row*: all heads of one token."""
        return self.num_heads * self.head_size

    @property
    def kv_extent(self) -> int:
        """Extent of the KV axis of the storage: 2 (K, V), or 1 for MLA."""
        return 1 if self.is_mla else 2
