# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""A picture of who sees which sample: one panel for each stage, one row for each rank, the samples from left to right."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib.ticker
import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .audit_ranks import Outcome


# From the palette of Okabe and Ito, whose colours people with any kind of colour vision can tell apart.
_ONCE, _AGAIN, _REPEAT, _NEVER, _MISSED = "#0072B2", "#E69F00", "#56B4E9", "#EFEFEF", "#000000"

# So many columns can be told apart. With more samples, each stands for several.
_COLUMNS = 400


def draw(path: Path, outcomes: dict[str, Outcome]) -> None:
    """
    Draw the picture and write it to a file.

    Args:
        path (`pathlib.Path`): Where to. The ending says in which format.
        outcomes (`dict[str, Outcome]`): What came of each stage, with who has seen which sample, by heading.
    """
    all_seen = [outcome.seen for outcome in outcomes.values() if outcome.seen is not None]
    samples = _in_order_of_reading(all_seen)
    num_ranks = max(map(len, all_seen))
    row_height = 0.42 if num_ranks <= 8 else max(0.1, 3.4 / num_ranks)
    panel = (num_ranks + 1.3) * row_height + 0.85
    figure = Figure(figsize=(11, panel * len(outcomes) + 1.25), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(outcomes), 1, squeeze=False)[:, 0]
    for axis, (heading, outcome) in zip(axes, outcomes.items()):
        _draw_stage(axis, heading, outcome, samples, num_ranks)
    _label_samples(axes[-1], len(samples))
    handles = [
        Patch(facecolor=_ONCE, label="seen once"),
        Patch(facecolor=_AGAIN, label="seen more than once"),
        Patch(facecolor=_REPEAT, label="only a known repeat (padding or replay)"),
        Patch(facecolor=_NEVER, edgecolor="#BBBBBB", label="not seen by this rank"),
        Patch(facecolor=_MISSED, label="seen by no rank"),
    ]
    height = figure.get_figheight()
    figure.suptitle("Which rank sees which sample in one epoch", fontsize=15, fontweight="bold", y=1 - 0.22 / height)
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.42 / height),
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    figure.subplots_adjust(
        left=0.085, right=0.965, top=1 - 1.1 / height, bottom=0.6 / height, hspace=0.85 / (panel - 0.85)
    )
    figure.savefig(path)


def _in_order_of_reading(all_seen: list[list[Any]]) -> numpy.ndarray:
    """Put the hashes of all samples in the order in which the first stage has read them, one rank after the other."""
    read = numpy.concatenate([each for seen in all_seen for rank in seen for each in (rank.real, rank.repeats)])
    hashes, first = numpy.unique(read, return_index=True)
    return hashes[numpy.argsort(first)]


def _draw_stage(axis: Any, heading: str, outcome: Outcome, samples: numpy.ndarray, num_ranks: int) -> None:
    report = outcome.report
    verdict = f"It failed. {outcome.error}" if report is None else report["verdict"]
    axis.set_title(
        f"{heading[0].upper()}{heading[1:]}: " + textwrap.shorten(verdict, 110, placeholder=" ..."),
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_xlim(0, len(samples))
    axis.set_ylim(num_ranks + 1.3, 0)
    if outcome.seen is None:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color="#666666")
        axis.set_yticks([])
        return
    edges = numpy.linspace(0, len(samples), min(len(samples), _COLUMNS) + 1).round().astype(int)
    order = numpy.argsort(samples)
    total_real = numpy.zeros(len(samples), int)
    total_repeats = numpy.zeros(len(samples), int)
    for row, seen in enumerate(outcome.seen):
        real, repeats = (_times(each, samples, order) for each in (seen.real, seen.repeats))
        total_real += real
        total_repeats += repeats
        _draw_row(axis, row, edges, real, repeats, _NEVER)
    # What no rank has read although another stage shows that it is there, unless only the beginning was read.
    nobody = _NEVER if report["max_batches"] is not None else _MISSED
    _draw_row(axis, num_ranks + 0.3, edges, total_real, total_repeats, nobody)
    step = 1 if num_ranks <= 16 else -(-num_ranks // 16)
    labelled = range(0, len(outcome.seen), step)
    axis.set_yticks(
        [*(row + 0.5 for row in labelled), num_ranks + 0.8],
        [*(f"rank {row}" for row in labelled), "all ranks"],
        fontsize=9,
    )
    axis.tick_params(left=False)
    _label_samples(axis, len(samples), described=False)


def _times(read: numpy.ndarray, samples: numpy.ndarray, order: numpy.ndarray) -> numpy.ndarray:
    hashes, times = numpy.unique(read, return_counts=True)
    found = numpy.zeros(len(samples), int)
    found[order[numpy.searchsorted(samples, hashes, sorter=order)]] = times
    return found


def _draw_row(
    axis: Any, row: float, edges: numpy.ndarray, real: numpy.ndarray, repeats: numpy.ndarray, unseen: str
) -> None:
    """Draw a row of columns, each filled from below with the shares of its samples that were seen so often."""
    starts, widths = edges[:-1], numpy.diff(edges)
    # Thin lines between samples, where there is room for them.
    gap = 0.06 if len(widths) <= 64 else 0.0
    bottom = numpy.full(len(widths), row + 0.95)
    for colour, which in (
        (_ONCE, real == 1),
        (_AGAIN, real > 1),
        (_REPEAT, (real == 0) & (repeats > 0)),
        (unseen, (real == 0) & (repeats == 0)),
    ):
        height = 0.9 * numpy.add.reduceat(which.astype(float), starts) / widths
        axis.bar(starts + gap / 2, -height, widths - gap, bottom, align="edge", color=colour, linewidth=0)
        bottom = bottom - height


def _label_samples(axis: Any, num_samples: int, described: bool = True) -> None:
    if num_samples <= 40:
        axis.set_xticks(numpy.arange(num_samples) + 0.5, range(num_samples), fontsize=8)
    else:
        axis.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
        axis.tick_params(axis="x", labelsize=8)
    if described:
        order = "in the order in which the ranks read them before prepare, rank after rank"
        per_column = -(-num_samples // _COLUMNS)
        each = f"; each column stands for some {per_column:,} of them, in proportion" if per_column > 1 else ""
        axis.set_xlabel(f"{num_samples:,} samples, {order}{each}", fontsize=9)
