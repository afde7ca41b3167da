"""The schedule of persistent attention kernels: units of work from the lengths, shared equally by a fixed grid.

What CUTLASS calls a tile scheduler (Stream-K cuts tiles as this does), FlashAttention-3 scheduler metadata and
FlashInfer a plan: :func:`plan` works it out from lengths on the host, ``kernel`` makes the same list on the GPU.
"""

from .config import ScheduleConfig, ScheduleProblem
from .plan import Schedule, plan

__all__ = ["Schedule", "ScheduleConfig", "ScheduleProblem", "plan"]
