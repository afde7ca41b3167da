"""Charts of matplotlib: in axes that are given and in a figure of their own (rests on what the axes then hold)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvlab.attention import plan
from kvlab.viz import ByteBudget, RooflinePoint
from kvlab.viz.plots import Chart, plot_context, plot_errors, plot_ratios, plot_roofline, plot_schedule

figure = pytest.importorskip("matplotlib.figure")

POINTS = [RooflinePoint("decode", 4e9, 1e9, 3.6e-4, "d", peers=(("FA3", 4e-4),)), RooflinePoint("rest", 1e9, 1e6, 1e-5)]
TASKS = [("one", {"kvlab": 0.9, "FA3": 0.6, "x": 0.7}), ("two", {"kvlab": 0.5, "FA3": 1.0}), ("alone", {"kvlab": 0.4})]
ERRORS = {"emulator": [(1e-5 * n, 1e-3) for n in range(1, 8)], "kernel": [(2e-3, 1e-3)]}
BUDGET = ByteBudget(32, 8, 128, bandwidth=3.1e12, compute=7.9e14)
SCHEDULE = plan([9000, 300, 500, 700], q_heads=8, kv_heads=2, programs=16)
CHARTS: dict[str, Callable[..., Chart]] = {
    "roofline": lambda ax=None: plot_roofline(POINTS, bandwidth=3.1e12, compute=7.9e14, ax=ax),
    "ratios": lambda ax=None: plot_ratios(TASKS, ax=ax),
    "errors": lambda ax=None: plot_errors(ERRORS, ax=ax),
    "context": lambda ax=None: plot_context(BUDGET, batches=(3, 7), contexts=(1000, 2000, 5000), ax=ax),
    "schedule": lambda ax=None: plot_schedule(SCHEDULE, ax=ax),
}


@pytest.mark.parametrize("name", CHARTS)
def test_its_own_figure_is_a_picture_in_the_ink_of_the_page(name: str, sound: Any) -> None:
    chart = CHARTS[name]()
    sound(chart.picture)
    assert chart.alt == chart.picture.spoken
    assert "#010203" not in chart._repr_html_()
    assert chart.picture.svg == CHARTS[name]().picture.svg, "the same whenever it is drawn"
    assert "currentColor" not in chart.picture.resolved("dark")


@pytest.mark.parametrize("name", CHARTS)
def test_axes_that_are_given_are_drawn_in_and_keep_their_style(name: str) -> None:
    mine = figure.Figure((4, 3))
    left, right = mine.subplots(1, 2)
    right.xaxis.label.set_color("#123456")
    chart = CHARTS[name](right)
    assert chart.axes is right
    assert right.get_title(loc="left") == chart.title
    assert not left.has_data()
    drawn = {text.get_color() for text in right.texts} | {line.get_color() for line in right.lines}
    assert "#010203" not in drawn
    with pytest.raises(ValueError, match="ax is 7: must be axes of matplotlib"):
        CHARTS[name](7)


def test_bars_are_the_ratios_and_points_the_rates() -> None:
    bars = CHARTS["ratios"]().axes.patches
    assert np.allclose([bar.get_width() for bar in bars], [0.9 / 0.7, 0.5])
    marks = [line.get_xydata()[0] for line in CHARTS["roofline"]().axes.lines if line.get_marker() == "o"]
    assert np.allclose(marks, [[4, 10], [4, 4e9 / 3.6e-4 / 1e12], [1000, 100]])


def test_lines_are_the_times_and_bars_the_units() -> None:
    line = CHARTS["context"]().axes.lines[2]
    assert np.allclose(line.get_ydata(), [1e3 * BUDGET.at(batch=7, context=n).seconds for n in (1000, 2000, 5000)])
    bars = CHARTS["schedule"]().axes.patches
    units = SCHEDULE.units[SCHEDULE.units["kv_head"] == 0]
    total = (units["last"] - units["first"] + SCHEDULE.config.overhead).sum()
    assert len(bars) == len(units)
    assert sum(bar.get_width() for bar in bars) == total
    spans: dict[float, list[tuple[float, float]]] = {}
    for bar in bars:
        spans.setdefault(bar.get_y(), []).append((bar.get_x(), bar.get_x() + bar.get_width()))
    for row in spans.values():
        assert [0, *(end for _, end in sorted(row)[:-1])] == [start for start, _ in sorted(row)]


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="tasks has no task with a peer"):
        plot_ratios([("alone", {"kvlab": 0.4})])
    with pytest.raises(ValueError, match="batches is empty"):
        plot_context(BUDGET, batches=())
    with pytest.raises(ValueError, match="points is empty"):
        plot_roofline([], bandwidth=1, compute=1)


def test_without_matplotlib_it_is_named() -> None:
    gone = {name: None for name in sys.modules if name.partition(".")[0] == "matplotlib"} | {"matplotlib": None}
    with mock.patch.dict(sys.modules, gone), pytest.raises(ImportError, match="matplotlib is not installed"):
        importlib.import_module("kvlab.viz.plots").plot_errors(ERRORS)
