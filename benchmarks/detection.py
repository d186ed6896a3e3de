# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Finding out how a loader is sharded whose sampler lies under ten wrappers."""

from __future__ import annotations

import statistics
import time

from torch.utils.data import DataLoader, DistributedSampler, Sampler

from accelerate_presharded import find_sharding

from .harness import Figure, Row, duration


class Wrapper(Sampler):
    """A sampler around a sampler."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def wrapped(depth: int) -> DataLoader:
    """Make a loader with so many wrappers around its `DistributedSampler`."""
    sampler = DistributedSampler(range(16), num_replicas=2, rank=1)
    for _ in range(depth):
        sampler = Wrapper(sampler)
    return DataLoader(range(16), sampler=sampler)


def rows(quick: bool) -> list[Row]:
    """Measure ten deep, and not wrapped at all for comparison."""
    calls, rounds = (5, 5) if quick else (200, 50)
    deep, flat = wrapped(10), wrapped(0)
    times: dict[int, list[float]] = {10: [], 0: []}
    for _ in range(rounds):
        for depth, loader in ((10, deep), (0, flat)):
            begin = time.perf_counter()
            for _ in range(calls):
                sharding = find_sharding(loader)
            times[depth].append((time.perf_counter() - begin) / calls)
            if sharding is None or sharding.index != 1:
                raise RuntimeError("the sampler was not found")
    note = f"not wrapped: {duration(statistics.median(times[0]))}"
    figure = Figure.of([1000 * seconds for seconds in times[10]])
    return [Row("detection, wrapped ten deep", "measured", figure, 0.2, unit="ms", note=note)]
