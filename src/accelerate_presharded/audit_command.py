# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`accelerate-presharded audit`: who sees which sample, before `prepare`, after plain Accelerate's, and after ours."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .audit_ranks import Outcome


# In the order in which they are shown, with the headings.
STAGES = {
    "before": "before prepare",
    "accelerate": "after accelerate",
    "accelerate_presharded": "after accelerate_presharded",
}

_FLAGS = {"auto": None, "true": True, "false": False}


def add_parser(subparsers: Any) -> None:
    """
    Add the command to a parser. The parsed arguments have its function as `handler`, which returns the exit status.

    Args:
        subparsers (`argparse._SubParsersAction`): What `ArgumentParser.add_subparsers` has returned.
    """
    parser = subparsers.add_parser(
        "audit",
        help="report which rank sees which sample",
        description=(
            "Starts ranks on this machine, has each of them make the loader, reads it once as it is, once prepared by "
            "plain Accelerate and once prepared by accelerate_presharded, and reports who has seen which sample. "
            "The exit status is 0 if every sample is seen once in the end, 1 if not, and 2 for a wrong call."
        ),
    )
    parser.add_argument(
        "factory",
        metavar="MODULE_OR_FILE:FACTORY",
        help="the function that makes a rank's loader; it takes no argument, or one that is called `accelerator`",
    )
    parser.add_argument("--num-processes", type=_positive, default=2, metavar="N", help="how many ranks (default: 2)")
    parser.add_argument(
        "--key", type=_key, metavar="FIELD", help="tell samples apart by this field or index (default: by content)"
    )
    parser.add_argument(
        "--max-batches", type=_positive, metavar="M", help="read at most this many batches of each rank"
    )
    parser.add_argument(
        "--already-sharded",
        choices=list(_FLAGS),
        default="auto",
        help="what accelerate_presharded is told of the loader (default: auto, which is nothing)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=120,
        metavar="SECONDS",
        help="when to give up on ranks of which none goes on (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="write the reports to stdout as JSON, and nothing else")
    parser.add_argument("--plot", type=_picture, metavar="FILE.png", help="draw a picture: ranks by samples")
    parser.set_defaults(handler=run_audit)


def run_audit(arguments: argparse.Namespace) -> int:
    """
    Run the command.

    Args:
        arguments (`argparse.Namespace`): What the parser has made of the command line.

    Returns:
        `int`: The exit status.
    """
    # Here and below, not above: the other commands have to be quick.
    from .audit_ranks import Job, run_stages

    if arguments.plot is not None:
        try:
            from . import audit_plot
        except ImportError as error:
            return _say(f"--plot needs matplotlib ({error}): pip install 'accelerate-presharded[audit]'", 2)
    job = Job(
        factory=arguments.factory,
        key=arguments.key,
        max_batches=arguments.max_batches,
        already_sharded=_FLAGS[arguments.already_sharded],
        keeps_samples=arguments.plot is not None,
    )
    try:
        with _ending_on_sigterm(), _progress_bar() as on_samples:
            outcomes = run_stages(job, list(STAGES), arguments.num_processes, arguments.timeout, on_samples)
    except KeyboardInterrupt:
        return _say("Interrupted. All ranks have been ended.", 130)
    before, last = outcomes["before"], outcomes.get("accelerate_presharded")
    complete = last is not None and last.report is not None and last.report["complete"]
    if before.is_usage_error:
        return _say(before.error, 2)
    if before.report is None:
        # Nothing to do with sharding: the user's own code has failed, and its traceback says where.
        _say(f"{before.error}\n\n{before.details}" if before.details else before.error, 1)
    elif arguments.plot is not None:
        audit_plot.draw(arguments.plot, {STAGES[name]: outcome for name, outcome in outcomes.items()})
    if arguments.json:
        print(json.dumps(_to_dict(arguments, outcomes, complete), indent=2))
    elif before.report is not None:
        _show(outcomes)
        if arguments.plot is not None:
            print(f"\nPicture: {arguments.plot}")
    return 0 if complete else 1


def _say(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    return status


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def _key(text: str) -> str | int:
    return int(text) if text.removeprefix("-").isdecimal() else text


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} should end with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist")
    return path


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    def end(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _progress_bar() -> Iterator[Any]:
    # After a delay, so that it is only there where there is something to wait for, and only on a terminal.
    from tqdm import tqdm

    with tqdm(unit=" samples", desc="Reading", disable=None, delay=3, leave=False, file=sys.stderr) as bar:
        yield bar.update


def _to_dict(arguments: argparse.Namespace, outcomes: dict[str, Outcome], complete: bool) -> dict[str, Any]:
    stages = {
        name: {"error": outcome.error} if outcome.report is None else outcome.report
        for name, outcome in outcomes.items()
    }
    return {
        "factory": arguments.factory,
        "num_processes": arguments.num_processes,
        "complete": complete,
        "stages": stages,
    }


def _show(outcomes: dict[str, Outcome]) -> None:
    rows = overview(outcomes)
    console = _console()
    if console is None:
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in rows
        ]
        print("\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]))
    else:
        from rich.table import Table

        table = Table(*rows[0][:1])
        for heading in rows[0][1:]:
            table.add_column(heading, justify="right")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    for name, outcome in outcomes.items():
        print()
        heading = STAGES[name][0].upper() + STAGES[name][1:]
        _print_verdict(console, f"{heading}:", outcome, is_judged=name != "before")


def _print_verdict(console: Any, heading: str, outcome: Outcome, is_judged: bool) -> None:
    report = outcome.report
    good = report is not None and report["complete"]
    verdict = outcome.error if report is None else report["verdict"]
    if console is None:
        print(f"{heading} {verdict}")
    else:
        from rich.text import Text

        style = "" if not is_judged else "bold green" if good else "bold red"
        console.print(Text.assemble(heading, " ", (verdict, style)), soft_wrap=True)
    for line in [] if report is None else [report["advice"], *(f"Note: {note}" for note in report["notes"])]:
        if line:
            print(f"  {line}")


def _console() -> Any:
    """A console of rich's, on a terminal where rich is installed."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


# Above this, the table has one line for all ranks.
_MANY_RANKS = 16


def overview(outcomes: dict[str, Outcome]) -> list[list[str]]:
    """
    Put the stages side by side.

    Args:
        outcomes (`dict[str, Outcome]`): What came of each stage.

    Returns:
        `list[list[str]]`: The headings, and a row for each number.
    """
    reports = [outcome.report for outcome in outcomes.values()]

    def row(name: str, value: Any) -> list[str]:
        return [name, *("-" if report is None else value(report) for report in reports)]

    rows = [["", *(STAGES[name].removeprefix("after ") for name in outcomes)]]
    num_ranks = max((len(report["ranks"]) for report in reports if report is not None), default=0)
    for rank in range(num_ranks if num_ranks <= _MANY_RANKS else 0):
        rows.append(row(f"rank {rank}: steps", lambda report: f"{report['ranks'][rank]['batches']:,}"))
        rows.append(row(f"rank {rank}: samples", lambda report: f"{report['ranks'][rank]['samples']:,}"))
    rows.append(row("steps, all ranks", lambda report: _range([each["batches"] for each in report["ranks"]])))
    rows.append(row("distinct samples, all ranks", lambda report: f"{report['distinct']:,}"))
    rows.append(row("seen by several ranks", lambda report: f"{report['seen_by_several_ranks']:,}"))
    rows.append(row("seen twice by one rank", lambda report: f"{report['seen_twice_by_one_rank']:,}"))
    rows.append(row("missed", lambda report: "?" if report["missed"] is None else f"{report['missed']:,}"))
    rows.append(row("known repeats", lambda report: f"{sum(each['repeats'] for each in report['ranks']):,}"))
    return rows


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
