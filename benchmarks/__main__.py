# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Runs the benchmarks, prints a table, and writes RESULTS.md and results.png."""

from __future__ import annotations

from . import streams


BENCHMARKS = {"streams": streams.rows}


if __name__ == "__main__":
    for rows in BENCHMARKS.values():
        for row in rows(quick=False):
            print(row, row.kept, flush=True)
