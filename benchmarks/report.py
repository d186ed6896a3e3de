# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The results as a table on the terminal and as a Markdown file."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable

import accelerate
import torch

from .harness import Row


_UNITS = {"x": "x", "": ""}


def number(value: float, unit: str) -> str:
    """Write a result with its unit."""
    digits = f"{value:.2f}" if unit == "x" else f"{value:.3g}"
    return f"{digits}{_UNITS.get(unit, f' {unit}')}"


def spread(row: Row) -> str:
    """Write the quartiles of a result, where it has any."""
    if row.figure.low == row.figure.high:
        return ""
    return f"{number(row.figure.low, row.unit)} to {number(row.figure.high, row.unit)}"


def target(row: Row) -> str:
    """Write what a result should be."""
    return "" if row.target is None else f"{row.bound} {number(row.target, row.unit)}"


def verdict(row: Row) -> str:
    """Say whether the target is kept."""
    return {True: "kept", False: "MISSED", None: ""}[row.kept]


def line(row: Row) -> str:
    """Write a row for the terminal."""
    result = f"{number(row.figure.median, row.unit)}" + (f" ({spread(row)})" if spread(row) else "")
    aim = f"{target(row)}: {verdict(row)}" if row.target is not None else "-"
    return f"{row.what:<72} {row.against:<34} {result:<26} {aim}" + (f"\n    {row.note}" if row.note else "")


def machine() -> str:
    """Describe what the results were measured on and with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, accelerate {accelerate.__version__}, gloo on the CPU, one thread a rank"
    )


def markdown(rows: Iterable[Row]) -> str:
    """Write all rows as a Markdown page."""
    rows = list(rows)
    aimed = [row for row in rows if row.target is not None]
    kept = sum(row.kept is True for row in aimed)
    lines = [
        "# Results",
        "",
        "Written by `make bench`; [`README.md`](README.md) says what each row means. Every ratio is the median over",
        "rounds in which both were measured one after the other, with the quartiles beside it. What was measured",
        "absolutely says something about this machine only.",
        "",
        f"{machine()}.",
        "",
        f"{kept} of {len(aimed)} targets are kept.",
        "",
        "![Each result against its target](results.png)",
        "",
        "| what | against | result | quartiles | target | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        mark = {"kept": "kept", "MISSED": "**missed**", "": ""}[verdict(row)]
        cells = (row.what, row.against, number(row.figure.median, row.unit), spread(row), target(row), mark)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What else was found in the same runs:", ""]
    lines += [f"- {row.what}: {row.note}." for row in rows if row.note]
    return "\n".join(lines) + "\n"
