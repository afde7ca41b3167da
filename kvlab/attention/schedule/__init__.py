"""The schedule of persistent attention kernels: units of work from the lengths, shared equally by a fixed grid.

What CUTLASS calls a tile scheduler (Stream-K cuts tiles as this does), FlashAttention-3 scheduler metadata and
FlashInfer a plan: :func:`kvlab.attention.plan` makes it where the lengths are, ``kernel`` on a GPU.
"""

from .config import ScheduleConfig, ScheduleProblem
from .schedule import Schedule

__all__ = ["Schedule", "ScheduleConfig", "ScheduleProblem"]
