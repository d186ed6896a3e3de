# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Going through a prepared map-style loader: time beside other loaders, and the collectives on the way."""

from __future__ import annotations

import accelerate
import accelerate.data_loader
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accelerate_presharded import Accelerator

from .harness import Figure, Row, Times, alternate, medians, ratio, slowest, work
from .ranks import launch


BATCH, WIDTH = 16, 64


class Vectors(Dataset):
    """Tiny samples, made beforehand."""

    def __init__(self, length: int):
        self.data = torch.zeros(length, WIDTH)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


def loaders(num_batches: int) -> dict[str, DataLoader]:
    """Make loaders that yield as many batches on each rank."""
    ours, theirs = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    size, index = ours.num_processes, ours.process_index
    data = Vectors(BATCH * num_batches * size)

    def cut() -> DataLoader:
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, size, index, shuffle=False))

    return {
        "presharded": ours.prepare_data_loader(cut(), already_sharded=True),
        # The naive fix, which is also Accelerate's own loader class over exactly the same batches.
        "DataLoaderShard": accelerate.data_loader.prepare_data_loader(
            cut(),
            device=theirs.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            rng_types=list(theirs.rng_types),
            dispatch_batches=False,
        ),
        # Accelerate as it is, which cuts the whole data itself.
        "accelerate": theirs.prepare_data_loader(DataLoader(data, batch_size=BATCH)),
        "DataLoader": cut(),
    }


def time_epochs(num_batches: int, seconds: float, rounds: int) -> Times:
    """Time epochs on this rank."""
    compute = work(seconds)

    def epoch(loader: DataLoader) -> None:
        for _ in loader:
            compute()

    made = loaders(num_batches)
    return alternate({name: lambda loader=loader: epoch(loader) for name, loader in made.items()}, rounds)


def count_collectives(num_batches: int) -> dict[str, int]:
    """Count the collectives of one epoch by the numbers that every process group gives to its collectives."""

    def total() -> int:
        groups = list(dist.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)

    made = loaders(num_batches)
    counts = {}
    for name, loader in made.items():
        before = total()
        for _ in loader:
            pass
        counts[name] = total() - before
    before = total()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    counts["two collectives, as a check of the count"] = total() - before
    return counts


def rows(quick: bool) -> list[Row]:
    """Measure on one rank and on two."""
    found = []
    for world_size in (1, 2):
        for seconds, num_batches, rounds in ((0.0, 200, 100), (0.002, 50, 30)):
            if quick:
                num_batches, rounds = 6, 2
            times = slowest(launch(world_size, time_epochs, num_batches, seconds, rounds))
            ranks = f"{world_size} rank{'s' * (world_size > 1)}"
            what = f"map-style, {'2 ms of' if seconds else 'no'} work a step, {ranks}"
            note = f"a step: {medians(times, num_batches)}"
            shard = ratio(times, "presharded", "DataLoaderShard")
            plain = ratio(times, "presharded", "DataLoader")
            theirs = ratio(times, "DataLoaderShard", "DataLoader").median
            found += [
                Row(what, "Accelerate's `DataLoaderShard`", shard, None if seconds else 1.00, note=note),
                Row(
                    what,
                    "plain `DataLoader`",
                    plain,
                    1.01 if seconds else 1.10,
                    note=f"Accelerate's `DataLoaderShard`: {theirs:.2f}x",
                ),
            ]
    counts = launch(2, count_collectives, 20)[0]
    check = counts.pop("two collectives, as a check of the count")
    if check != 2:
        raise RuntimeError(f"2 collectives were counted as {check}")
    others = ", ".join(f"{name} {number}" for name, number in counts.items())
    number = float(counts["presharded"])
    found.append(
        Row("map-style, collectives in an epoch, 2 ranks", "counted", Figure.of([number]), 0, "exactly", "", others)
    )
    return found
