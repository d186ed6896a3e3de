# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Runs `digits.py` on one process, on two ranks with plain Accelerate and on two ranks with accelerate_presharded.

Each rank writes down which samples it saw; the table and the words below it are counted from that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path


SCRIPT = Path(__file__).with_name("digits.py")


@dataclass
class Run:
    """What the ranks of one run wrote down."""

    ranks: list[dict]

    def trained_on(self) -> list[list[int]]:
        """The samples each rank saw in an epoch, in order."""
        return [[sample for batch in rank["trained_on"] for sample in batch] for rank in self.ranks]

    def evaluated_on(self) -> list[int]:
        """The samples that `gather_for_metrics` returned, which are the same on all ranks."""
        return self.ranks[0]["evaluated_on"]

    def distinct(self, kind: str) -> int:
        return len(set().union(*self.trained_on()) if kind == "trained_on" else set(self.evaluated_on()))

    def steps(self) -> str:
        return " and ".join(str(steps) for steps in sorted({len(rank["trained_on"]) for rank in self.ranks}))

    def size(self, kind: str) -> int:
        return self.ranks[0]["train_size" if kind == "trained_on" else "eval_size"]

    def lost(self, kind: str) -> int:
        return self.size(kind) - self.distinct(kind)

    def accuracy(self) -> float:
        return self.ranks[0]["accuracy"]


def launch(num_ranks: int, *options: str) -> Run:
    """Runs the script on `num_ranks` ranks on the CPU and collects their reports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, str(SCRIPT), "--cpu", "--report", folder, *options]
        process = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if process.returncode:
            sys.exit(f"{process.stdout}\n{' '.join(command)} ended with exit status {process.returncode}.")
        return Run([json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(num_ranks)])


def table(runs: dict[tuple[str, str], Run]) -> str:
    """One column for each run, under its two lines of heading."""
    num_ranks = max(len(run.ranks) for run in runs.values())

    def seen_by(run: Run, rank: int) -> str:
        return f"{len(run.trained_on()[rank]):,}" if rank < len(run.ranks) else "-"

    def distinct(run: Run, kind: str) -> str:
        return f"{run.distinct(kind):,} of {run.size(kind):,}"

    rows = [["", *(first for first, _ in runs)], ["", *(second for _, second in runs)]]
    for rank in range(num_ranks):
        rows.append([f"samples rank {rank} saw in an epoch", *(seen_by(run, rank) for run in runs.values())])
    rows.append(["distinct samples, all ranks", *(distinct(run, "trained_on") for run in runs.values())])
    rows.append(["steps per epoch", *(run.steps() for run in runs.values())])
    rows.append(["samples gathered in evaluation", *(f"{len(run.evaluated_on()):,}" for run in runs.values())])
    rows.append(["distinct samples among them", *(distinct(run, "evaluated_on") for run in runs.values())])
    rows.append(["accuracy on those", *(f"{run.accuracy():.1%}" for run in runs.values())])

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    return "\n".join([*lines[:2], "-" * len(lines[0]), *lines[2:]])


def loss_in_words(run: Run) -> str:
    words = []
    for kind, name in (("trained_on", "training samples"), ("evaluated_on", "evaluation samples")):
        lost, size = run.lost(kind), run.size(kind)
        words.append(f"{lost:,} of {size:,} {name} ({lost / size:.0%})" if lost else f"none of the {size:,} {name}")
    return " and ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()

    print(f"Training on scikit-learn's handwritten digits three times, on 1 and on {args.ranks} ranks ...", flush=True)
    single = launch(1, "--plain")
    before = launch(args.ranks, "--plain")
    after = launch(args.ranks)

    ranks = f"{args.ranks} ranks"
    headings = [("plain accelerate", "1 rank"), ("plain accelerate", ranks), ("accelerate_presharded", ranks)]
    overview = table(dict(zip(headings, [single, before, after], strict=True)))
    in_words = [
        "Before: the ranks bring their own parts of the data, and plain accelerate splits each part again. "
        f"Lost in an epoch: {loss_in_words(before)}.",
        f"After: accelerate_presharded leaves each rank its part. Lost in an epoch: {loss_in_words(after)}.",
        f"Evaluation with gather_for_metrics: one process has an accuracy of {single.accuracy():.1%} on "
        f"{len(single.evaluated_on()):,} samples; before, {before.accuracy():.1%} on {len(before.evaluated_on()):,}; "
        f"after, {after.accuracy():.1%} on {len(after.evaluated_on()):,}, each of them once.",
    ]
    width = max(map(len, overview.splitlines()))
    print("", overview, "", *(textwrap.fill(words, width) for words in in_words), sep="\n")
    if after.lost("trained_on") or after.lost("evaluated_on"):
        sys.exit("accelerate_presharded lost samples, which it should not.")
    if len(after.evaluated_on()) != after.distinct("evaluated_on"):
        sys.exit("accelerate_presharded counted samples twice, which it should not.")


if __name__ == "__main__":
    main()
