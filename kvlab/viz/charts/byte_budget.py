"""The byte budget of a decode step: what it moves and holds, passes of shared memory, and the time that this takes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from kvlab.common.drawn import Drawn
from kvlab.memory import as_dtype
from kvlab.viz.pen.picture import Picture

from .roofline import RooflinePoint, draw_roofline

DTYPES = ("bf16", "fp8", "fp32")
PAGES = (16, 64, 256)


@dataclass(frozen=True)
class ByteSpent:
    """Costs of one decode step of one layer.

    nbytes     that DRAM has to deliver and take: keys, values, queries, results, table entries
    held       bytes of the pages of all sequences, the empty slots of the last ones too
    flops      operations, 2 for a multiply-add
    passes     of shared memory that reads of K and V take
    seconds    the longest of ``nbytes``, ``flops`` and ``passes`` at the machine's rates
    bound      which that is: ``"DRAM"``, ``"tensor cores"`` or ``"shared memory"``
    """

    nbytes: int
    held: int
    flops: int
    passes: int
    seconds: float
    bound: str


@dataclass(frozen=True)
class ByteBudget(Drawn):
    """A model's heads and a machine's rates: what a decode step of given sizes costs at the least.

    query_heads, kv_heads, head_dim    of the model
    bandwidth    of DRAM, bytes/s
    compute      of the tensor cores in 16 bits, flop/s
    shared       of the shared memory of all SMs together, bytes/s; None leaves it out
    points       recorded kernels on that machine, to hold the prediction against

    ValueError for a number that is not positive, and query heads that are no multiple of the KV heads.

    >>> budget = ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14, shared=2.9e13)
    >>> spent = budget.at(batch=64, context=4096)
    >>> round(spent.nbytes / 1e9, 3), round(spent.seconds * 1e3, 3), spent.bound
    (1.075, 0.347, 'DRAM')
    >>> budget.at(batch=64, context=4096, swizzled=False).bound
    'DRAM'
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    bandwidth: float
    compute: float
    shared: float | None = None
    points: tuple[RooflinePoint, ...] = ()

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "head_dim", "bandwidth", "compute", "shared"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}: must be a positive number")
        if self.query_heads % self.kv_heads or self.head_dim % 16:
            raise ValueError(
                f"query_heads is {self.query_heads}, head_dim {self.head_dim}: must be multiples of {self.kv_heads} KV "
                "heads and of 16"
            )

    def at(
        self, *, batch: int, context: int, page_size: int = 16, dtype: str = "bf16", swizzled: bool = True
    ) -> ByteSpent:
        """Costs of ``batch`` sequences of ``context`` keys each.

        page_size    tokens of a page
        dtype        of K and V; queries and results have two bytes at least
        swizzled     whether K and V lie swizzled in shared memory
        """
        for name, value in (("batch", batch), ("context", context), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        size, keys = as_dtype(dtype).itemsize, batch * context
        token = 2 * self.kv_heads * self.head_dim * size  # bytes of a token's key and value
        pages = batch * -(-context // page_size)
        nbytes = keys * token + 4 * pages + 2 * batch * self.query_heads * self.head_dim * max(2, size)
        flops = 4 * keys * self.query_heads * self.head_dim
        passes = keys * token // 128 * (1 if swizzled else self.conflict(dtype))
        times = {"DRAM": nbytes / self.bandwidth, "tensor cores": flops / self.compute}
        if self.shared is not None:
            times["shared memory"] = 128 * passes / self.shared
        bound = max(times, key=lambda name: times[name])
        return ByteSpent(nbytes, pages * page_size * token, flops, passes, times[bound], bound)

    def conflict(self, dtype: str) -> int:
        """Passes of ldmatrix.x4 over plain rows of a head for each pass over swizzled ones; 1 for float32, which is not
        read by ldmatrix.

        >>> ByteBudget(32, 8, 128, bandwidth=3e12, compute=8e14).conflict("bf16")
        8
        """
        return _conflict(self.head_dim * as_dtype(dtype).itemsize) if as_dtype(dtype).itemsize < 4 else 1


@functools.cache
def _conflict(row_bytes: int) -> int:
    from kvlab.hardware import wavefronts
    from kvlab.viz.model.accesses import tile_reads

    found = wavefronts("ldmatrix.x4", tile_reads("sm_90")["ldmatrix.x4"].address(row_bytes))
    return int(np.ceil(found.wavefronts / found.ideal))


def draw_byte_budget(
    budget: ByteBudget, *, batch: int = 64, context: int = 4096, page_size: int = 16, dtype: str = "bf16",
    swizzled: bool = True, title: str | None = None, caption: str | None = None,
) -> Picture:
    """The roofline of a :class:`ByteBudget` with what a decode step of given sizes takes, and its recorded points.

    batch, context, page_size, dtype, swizzled    as :meth:`ByteBudget.at` takes them

    >>> draw_byte_budget(ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14)).title
    '64 sequences of 4,096 keys: 1.07 GB take 0.347 ms at the least; DRAM bounds them'
    """
    spent = budget.at(batch=batch, context=context, page_size=page_size, dtype=dtype, swizzled=swizzled)
    predicted = RooflinePoint("predicted", spent.flops, spent.nbytes, spent.seconds, "predicted")
    told = (
        f"{batch} sequence{'s' * (batch != 1)} of {context:,} keys: {spent.nbytes / 1e9:.3g} GB take "
        f"{spent.seconds * 1e3:.3g} ms at the least; {spent.bound} bound{'' if spent.bound.endswith('cores') else 's'} "
        f"{'them' if batch != 1 else 'it'}"
    )
    return draw_roofline(
        [predicted, *budget.points], bandwidth=budget.bandwidth, compute=budget.compute, title=title or told,
        caption=caption,
    )
