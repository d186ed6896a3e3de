# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Runs the benchmarks, prints a table, and writes RESULTS.md and results.png: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from . import agreeing, checkpoints, detection, iteration, metrics, preparing, reading, skipping, streams
from .harness import Row
from .report import line, machine, markdown


BENCHMARKS: dict[str, Callable[[bool], list[Row]]] = {
    "iteration": iteration.rows,
    "streams": streams.rows,
    "reading": reading.rows,
    "preparing": preparing.rows,
    "metrics": metrics.rows,
    "skipping": skipping.rows,
    "checkpoints": checkpoints.rows,
    "agreeing": agreeing.rows,
    "detection": detection.rows,
}


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a small run, whose numbers mean nothing")
    parser.add_argument("--output", type=Path, help="the folder to write to; without it only a full run is written")
    options = parser.parse_args(arguments)
    output = options.output
    if output is None and not options.quick and not options.only:
        output = Path(__file__).parent
    print(machine(), flush=True)
    rows: list[Row] = []
    begin = time.monotonic()
    for name in options.only or BENCHMARKS:
        print(f"\n{name}", flush=True)
        for row in BENCHMARKS[name](options.quick):
            print(f"  {line(row)}", flush=True)
            rows.append(row)
    aimed = [row for row in rows if row.target is not None]
    kept = sum(row.kept is True for row in aimed)
    print(f"\n{kept} of {len(aimed)} targets kept, in {time.monotonic() - begin:.0f} s")
    if output is not None:
        (output / "RESULTS.md").write_text(markdown(rows), encoding="utf-8")
        # Not above: every rank imports this module, and has no use for a library that draws.
        from .picture import draw

        draw(rows, output / "results.png")
        print(f"written: {output / 'RESULTS.md'} and {output / 'results.png'}")


if __name__ == "__main__":
    main()
