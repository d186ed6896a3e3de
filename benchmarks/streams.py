# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""A stream that is already sharded: what it costs that the ranks agree, with every step, on whether there is another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accelerate_presharded import Accelerator, prepare_data_loader

from .harness import Row, Times, alternate, medians, ratio, slowest, work
from .ranks import launch


BATCH, WIDTH = 16, 64


class Stream(IterableDataset):
    """A rank's own rows, made beforehand, so that reading costs next to nothing."""

    def __init__(self, length: int):
        self.data = torch.zeros(length, WIDTH)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.data)


def time_epochs(num_batches: int, seconds: float, rounds: int) -> Times:
    """Time epochs of the same loop on this rank, with and without agreement."""
    accelerator = Accelerator(cpu=True)
    compute = work(seconds)
    stream = Stream(BATCH * num_batches)

    def prepared(even_batches: bool) -> DataLoader:
        return prepare_data_loader(
            DataLoader(stream, batch_size=BATCH),
            device=accelerator.device,
            put_on_device=True,
            even_batches=even_batches,
            already_sharded=True,
        )

    even, uneven = prepared(True), prepared(False)

    def epoch(loader: DataLoader) -> None:
        for _ in loader:
            compute()

    def blocking() -> None:
        # What one would write without further thought: ask all before each step, and wait for the answer.
        for _ in uneven:
            dist.all_reduce(torch.ones(1))
            compute()

    variants = {
        "agreeing": lambda: epoch(even),
        "even_batches=False": lambda: epoch(uneven),
        "blocking all-reduce": blocking,
    }
    return alternate(variants, rounds)


def rows(quick: bool) -> list[Row]:
    """Measure two ranks with 5 ms of work a step, and without any."""
    found = []
    for seconds, target, num_batches, rounds in ((0.005, 1.05, 60, 30), (0.0, 2.0, 400, 60)):
        if quick:
            num_batches, rounds = 8, 2
        times = slowest(launch(2, time_epochs, num_batches, seconds, rounds))
        what = (
            f"stream, agreeing on the end, {f'{1000 * seconds:.0f} ms of' if seconds else 'no'} work a step, 2 ranks"
        )
        naive = ratio(times, "blocking all-reduce", "even_batches=False").median
        note = f"a step: {medians(times, num_batches)}; a blocking all-reduce a step: {naive:.2f}x"
        found.append(
            Row(what, "`even_batches=False`", ratio(times, "agreeing", "even_batches=False"), target, note=note)
        )
    return found
