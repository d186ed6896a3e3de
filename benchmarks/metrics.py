# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`gather_for_metrics` of 256 x 1000 float32 numbers a rank, in the middle of a loop."""

from __future__ import annotations

import accelerate
import torch
from torch.utils.data import DataLoader, DistributedSampler

from accelerate_presharded import Accelerator

from .harness import Row, Times, alternate, medians, ratio, slowest
from .ranks import launch


BATCH, WIDTH = 256, 1000


def time_gathering(calls: int, rounds: int) -> Times:
    """Time calls on this rank, each in the first of two steps."""
    ours, theirs = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    size, index = ours.num_processes, ours.process_index
    data = torch.zeros(2 * BATCH * size, 1)

    full = ours.prepare(
        DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, size, index)), already_sharded=True
    )
    # Rank 0 has full batches, and the others shorter ones, as many.
    own = BATCH if index == 0 else BATCH - 57
    ragged = ours.prepare(DataLoader(data[: 2 * own], batch_size=own), already_sharded=True)
    ordinary = theirs.prepare(DataLoader(data, batch_size=BATCH))

    outputs, fewer = torch.rand(BATCH, WIDTH), torch.rand(own, WIDTH)

    def padded() -> torch.Tensor:
        return theirs.gather_for_metrics(theirs.pad_across_processes(fewer))

    # All within the first step of each loader: what is measured is the call and not the loop around it.
    steps = {
        "full": (full, lambda: ours.gather_for_metrics(outputs)),
        "ragged": (ragged, lambda: ours.gather_for_metrics(fewer)),
        "accelerate": (ordinary, lambda: theirs.gather_for_metrics(outputs)),
        "accelerate, padded": (ordinary, padded),
    }
    expected = {
        "full": BATCH * size,
        "ragged": BATCH + (BATCH - 57) * (size - 1),
        "accelerate": BATCH * size,
        "accelerate, padded": BATCH * size,
    }

    def in_loop(name: str) -> None:
        loader, gather = steps[name]
        for _ in loader:
            for _ in range(calls):
                gathered = gather()
            break
        if len(gathered) != expected[name]:
            raise RuntimeError(f"{name}: {len(gathered)} entries were gathered and {expected[name]} were expected")

    return alternate({name: lambda name=name: in_loop(name) for name in steps}, rounds)


def rows(quick: bool) -> list[Row]:
    """Measure on two ranks."""
    calls, rounds = (2, 3) if quick else (20, 60)
    times = slowest(launch(2, time_gathering, calls, rounds))
    note = f"a call: {medians(times, calls)}"
    theirs = "Accelerate's, full batches"
    return [
        Row("`gather_for_metrics`, full batches, 2 ranks", theirs, ratio(times, "full", "accelerate"), 1.1, note=note),
        Row("`gather_for_metrics`, ragged batches, 2 ranks", theirs, ratio(times, "ragged", "accelerate"), 1.5),
        Row(
            "`gather_for_metrics`, ragged batches, 2 ranks",
            "`pad_across_processes` and Accelerate's",
            ratio(times, "ragged", "accelerate, padded"),
        ),
    ]
