# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Where the time of a step of a map-style loader goes: `python -m benchmarks.sections`.

Each part is run by itself over batches that are there already, and set against a whole step. Processor time of one
thread, the least of many runs, so that other work on the machine matters little.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import torch
from accelerate.utils import send_to_device

from accelerate_presharded import PreshardedDataLoader
from accelerate_presharded.data_loader import _Counter
from accelerate_presharded.evening import Mark, Source, alone
from accelerate_presharded.progress import Progress

from .iteration import BATCH, WIDTH, loaders
from .report import machine


STEPS = 500


def sections() -> dict[str, float]:
    """Measure the seconds of each part of a step."""
    torch.set_num_threads(1)
    batches = [torch.zeros(BATCH, WIDTH)] * STEPS
    device = torch.device("cpu")
    source, progress, mark = Source(batches), Progress(batches), Mark()
    counter = _Counter(batches, source, 0, True)
    made = loaders(STEPS)

    def drain(iterable) -> None:
        for _ in iterable:
            pass

    def count() -> None:
        for batch in batches:
            counter.count(batch, False, False)

    def advance() -> None:
        for number, _ in enumerate(batches):
            progress.advance(number, 0, mark, source, False, False)

    def send() -> None:
        for batch in batches:
            send_to_device(batch, device)

    parts: dict[str, Callable[[], None]] = {
        "a whole step": lambda: drain(made["presharded"]),
        "the same of Accelerate's `DataLoaderShard`": lambda: drain(made["DataLoaderShard"]),
        "`next` of the plain `DataLoader`": lambda: drain(made["DataLoader"]),
        "all that the wrapper adds": lambda: drain(PreshardedDataLoader(batches, device)),
        "  reading ahead, and the mark of where the loader is": lambda: drain(alone(Source(batches))),
        "  counting the samples for metrics": count,
        "  noting the progress for a checkpoint": advance,
        "`send_to_device`, where the batch is not there already": send,
    }
    return {
        name: min(timeit.repeat(part, number=1, repeat=40, timer=time.thread_time)) / STEPS
        for name, part in parts.items()
    }


if __name__ == "__main__":
    print(machine())
    found = sections()
    for name, seconds in found.items():
        print(f"{name:<58} {1e6 * seconds:7.2f} us {seconds / found['a whole step']:7.1%}")
