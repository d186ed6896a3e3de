# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Runs the checks of this folder on GPUs, and says of each whether it passed. It needs torch and accelerate alone.

    python tests/cuda/run.py                  # or: make test-cuda
    python tests/cuda/run.py --only metrics   # those whose names hold this word
    python tests/cuda/run.py --device cpu     # the same checks on the CPU, for work on the script

With one GPU, two ranks share it and are joined by gloo. With two, each rank has its own, and NCCL joins them. What
cannot be run is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


HERE = Path(__file__).resolve().parent
# The ranks find these too.
for folder in (HERE.parent.parent / "src", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

try:
    import accelerate
    import torch
except ImportError as error:
    sys.exit(
        f"{sys.executable}: {error}. Name a Python with torch and accelerate: make test-cuda PYTHON=/path/to/python"
    )

from checks import ANYWHERE, GPU_RANKS, Check, run_on_rank  # noqa: E402
from launching import launch  # noqa: E402


def run(check: Check, device: str, backend: str) -> str:
    """Run a check and return what went wrong, or nothing."""
    with tempfile.TemporaryDirectory(prefix="presharded-") as folder:
        for number in range(len(check.runs)):
            problem = launch(
                check.num_ranks,
                run_on_rank,
                check.name,
                number,
                device,
                backend,
                folder,
                # Accelerate takes the number of the GPU from it.
                environ=lambda rank: {"LOCAL_RANK": rank if backend == "nccl" else 0},
                fork=device == "cpu",
            )
            if problem:
                return problem
    return ""


def planned(device: str, num_gpus: int) -> Iterator[tuple[Check, str, str]]:
    """Yield each check with its backend and the reason why it cannot be run here, or nothing."""
    for check in ANYWHERE:
        yield check, "gloo", "" if device == "cpu" or num_gpus else "no CUDA GPU here"
    for check in ANYWHERE + GPU_RANKS:
        if device == "cpu":
            reason = "this needs GPUs"
        elif num_gpus < check.num_ranks:
            reason = f"this needs {check.num_ranks} GPUs, and {num_gpus or 'none'} can be seen"
        else:
            reason = check.lacks
        yield check, "nccl", reason


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(prog="tests/cuda/run.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", metavar="WORD", help="only checks whose names hold this")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ", ".join(torch.cuda.get_device_name(number) for number in range(num_gpus)) or "none"
    print(f"torch {torch.__version__}, accelerate {accelerate.__version__}, GPUs: {gpus}", flush=True)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for check, backend, reason in planned(options.device, num_gpus):
        name = f"{check.name} ({backend}, {check.num_ranks} ranks)"
        if options.only not in name:
            continue
        begin = time.monotonic()
        problem = "" if reason else run(check, options.device, backend)
        outcome = "skipped" if reason else "failed" if problem else "passed"
        counts[outcome] += 1
        seconds = "" if reason else f" in {time.monotonic() - begin:.1f} s"
        print(f"{outcome}{seconds}: {name}{': ' + reason if reason else ''}", flush=True)
        if problem:
            print(problem, flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
