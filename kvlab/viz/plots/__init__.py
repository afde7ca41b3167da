"""Charts by matplotlib, for those who put them beside their own: each takes ``ax`` and gives a :class:`Chart`.

The pictures of ``kvlab.viz`` need NumPy alone; these need matplotlib, which is imported when the first one is drawn."""

from .chart import Chart
from .measured import plot_errors, plot_ratios, plot_roofline
from .planned import plot_context, plot_schedule

__all__ = ["Chart", "plot_context", "plot_errors", "plot_ratios", "plot_roofline", "plot_schedule"]
