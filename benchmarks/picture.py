# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The results as a picture: each against its target."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure as Canvas

from .harness import Row
from .report import number, target


matplotlib.use("Agg")

KEPT, MISSED, GREY = "#1b7f5c", "#c2410c", "#6b7280"


def draw(rows: list[Row], path: Path) -> None:
    """
    Draw every row that has a target as its share of it, on a logarithmic axis, with the quartiles as a bar.

    Args:
        rows (list of [`Row`]): The results.
        path (`Path`): The PNG file to write.
    """
    rows = [row for row in rows if row.target and row.figure.median > 0]
    canvas = Canvas(figsize=(12, 1.6 + 0.34 * len(rows)), dpi=110, layout="constrained")
    axes = canvas.subplots()
    for place, row in enumerate(rows):
        color = KEPT if row.kept else MISSED
        low, middle, high = sorted(
            _share(row, value) for value in (row.figure.low, row.figure.median, row.figure.high)
        )
        axes.plot([low, high], [place, place], color=color, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot([middle], [place], marker="o", color=color, markersize=6)
        text = f"{number(row.figure.median, row.unit)}  ({target(row)})"
        axes.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), va="center", color=color, fontsize=8.5)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    shares = [_share(row, value) for row in rows for value in (row.figure.low, row.figure.high)]
    axes.set_xlim(min([0.5, *shares]) / 1.2, max([2.0, *shares]) * 1.2)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8.5)
    ticks = [
        tick
        for tick in (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100)
        if axes.get_xlim()[0] < tick < axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color="#e5e7eb")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("result as a share of its target (logarithmic): left of the line is better, right of it is missed")
    axes.set_title("Each result against its target: median and quartiles", loc="left", fontsize=12, fontweight="bold")
    canvas.savefig(path)


def _share(row: Row, value: float) -> float:
    share = row.target / value if row.bound == "at least" else value / row.target
    return max(share, 1e-3)  # a difference can be below zero


def _label(row: Row) -> str:
    return f"{row.what} | {row.against}".replace("`", "")
