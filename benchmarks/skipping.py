# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`skip_first_batches` over many batches of a map-style loader, up to the first batch that is not skipped."""

from __future__ import annotations

import accelerate
import accelerate.data_loader
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accelerate_presharded import Accelerator, skip_first_batches

from .harness import Figure, Row, Times, alternate, medians, ratio
from .ranks import launch


BATCH, REST = 16, 5


class Counted(Dataset):
    """Counts the samples that are loaded."""

    def __init__(self, length: int):
        self.length = length
        self.num_loaded = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.num_loaded += 1
        return index


def time_skipping(num_batches: int, rounds: int) -> tuple[Times, int]:
    """Time skipping on a single rank, and count the samples that are loaded for batches that are skipped."""
    ours, theirs = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)

    def loader() -> DataLoader:
        data = Counted(BATCH * (num_batches + REST))
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, 1, 0, shuffle=False))

    presharded, ordinary = ours.prepare(loader(), already_sharded=True), theirs.prepare(loader())

    def rest(skipped: DataLoader) -> None:
        if sum(len(batch) for batch in skipped) != BATCH * REST:
            raise RuntimeError("another number of batches was skipped")

    data = presharded.base_dataloader.dataset
    rest(skip_first_batches(presharded, num_batches))
    loaded = data.num_loaded - BATCH * REST
    variants = {
        "presharded": lambda: rest(ours.skip_first_batches(presharded, num_batches)),
        "accelerate": lambda: rest(theirs.skip_first_batches(ordinary, num_batches)),
    }
    return alternate(variants, rounds, warmup=1), loaded


def rows(quick: bool) -> list[Row]:
    """Measure on one rank."""
    num_batches, rounds = (100, 3) if quick else (10**5, 25)
    times, loaded = launch(1, time_skipping, num_batches, rounds)[0]
    what = f"`skip_first_batches` over {num_batches:,} batches, map-style"
    note = f"to the first batch behind: {medians(times)}"
    return [
        Row(what, "Accelerate's", ratio(times, "presharded", "accelerate"), 1.0, note=note),
        Row(f"{what}, samples loaded of them", "counted", Figure.of([float(loaded)]), 0, "exactly", ""),
    ]
