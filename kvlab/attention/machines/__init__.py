"""The one room of the operations that knows architectures by name: what a GPU has, and what is emulated by what.

A new machine is a row of :data:`MACHINES` and a CTA model.
"""

from .table import ARCHS, MACHINES, Machine, check_emulated, choose

__all__ = ["ARCHS", "MACHINES", "Machine", "check_emulated", "choose"]
