# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What `prepare` takes for one loader beyond what Accelerate's takes, in time and memory, and whether size matters."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable

import accelerate
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accelerate_presharded import Accelerator

from .harness import Figure, Row, Times, alternate, medians, ratio, slowest
from .ranks import launch


SIZES = {"10^3": 10**3, "10^8": 10**8}


class Numbers(Dataset):
    """A dataset of any length that takes no memory."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def _ways(length: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Prepare a new loader, in the way of this package and in Accelerate's."""
    ours, theirs = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    data = Numbers(length)

    def presharded() -> None:
        sampler = DistributedSampler(data, ours.num_processes, ours.process_index)
        ours.prepare(DataLoader(data, batch_size=16, sampler=sampler), already_sharded=True)
        ours._dataloaders.clear()

    def ordinary() -> None:
        theirs.prepare(DataLoader(data, batch_size=16))
        theirs._dataloaders.clear()

    return presharded, ordinary


def time_prepare(rounds: int) -> Times:
    """Time calls of `prepare` on this rank."""
    variants = {}
    for name, length in SIZES.items():
        variants[f"presharded {name}"], variants[f"accelerate {name}"] = _ways(length)
    return alternate(variants, rounds)


def memory_of_prepare(length: int) -> float:
    """Measure the bytes that `prepare` takes at its peak: Python's, and the growth of the process where larger."""
    presharded, ordinary = _ways(length)
    for _ in range(3):
        presharded()
    gc.collect()
    before = _resident()
    presharded()
    grown = _resident() - before
    tracemalloc.start()
    presharded()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(max(peak, grown))


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rows(quick: bool) -> list[Row]:
    """Measure on 2, 4 and 8 ranks."""
    found = []
    for world_size in (2, 4, 8):
        times = slowest(launch(world_size, time_prepare, 3 if quick else 60))
        note = f"a call: {medians(times)}"
        for name in SIZES:
            pairs = zip(times[f"presharded {name}"], times[f"accelerate {name}"])
            more = Figure.of([1000 * (mine - other) for mine, other in pairs])
            what = f"`prepare`, {name} samples, time beyond Accelerate's, {world_size} ranks"
            found.append(Row(what, "Accelerate's `prepare`", more, 20, unit="ms", note=note))
        small, large = (f"presharded {name}" for name in SIZES)
        # The same, within what two equal measurements differ by.
        what = f"`prepare`, 10^8 samples, {world_size} ranks"
        found.append(Row(what, "10^3 samples", ratio(times, large, small), 1.2))
    sizes = {name: launch(2, memory_of_prepare, length) for name, length in SIZES.items()}
    for name, values in sizes.items():
        figure = Figure.of([max(values) / 1e6])
        found.append(Row(f"`prepare`, {name} samples, memory, 2 ranks", "measured", figure, 1, unit="MB"))
    return found
