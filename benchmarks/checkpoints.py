# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`save_state` and `load_state` with nothing prepared but a loader."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from pathlib import Path

import accelerate
from torch.utils.data import DataLoader, DistributedSampler

from accelerate_presharded import Accelerator

from .harness import Row, Times, alternate, medians, ratio, slowest
from .ranks import launch


def time_saving(folder: str, stateful: bool, rounds: int) -> Times:
    """Time saving and loading in the middle of an epoch on this rank."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata calls it
    from torchdata.stateful_dataloader import StatefulDataLoader

    settings = {"use_stateful_dataloader": True} if stateful else {"use_seedable_sampler": True}
    config = accelerate.DataLoaderConfiguration(**settings)
    ours, theirs = Accelerator(cpu=True), accelerate.Accelerator(cpu=True, dataloader_config=config)
    data = range(1000)
    kind = StatefulDataLoader if stateful else DataLoader
    sampler = DistributedSampler(data, ours.num_processes, ours.process_index)
    loaders = {
        "presharded": ours.prepare(kind(data, batch_size=10, sampler=sampler), already_sharded=True),
        "accelerate": theirs.prepare(DataLoader(data, batch_size=10, shuffle=True)),
    }

    numbers = itertools.count()

    def save_and_load(name: str, accelerator: accelerate.Accelerator) -> None:
        # To a new folder each time, as checkpoints are.
        path = str(Path(folder) / f"{name}_{next(numbers)}")
        accelerator.save_state(path)
        # Accelerate's ranks write the state of a loader to one and the same file.
        accelerator.wait_for_everyone()
        accelerator.load_state(path)

    def in_epoch(name: str, accelerator: accelerate.Accelerator):
        batches = iter(loaders[name])
        next(batches)
        return lambda: save_and_load(name, accelerator)

    variants = {
        "presharded": in_epoch("presharded", ours),
        "accelerate": in_epoch("accelerate", theirs),
    }
    return alternate(variants, rounds)


def rows(quick: bool) -> list[Row]:
    """Measure on one rank and on two."""
    found = []
    for world_size in (1, 2):
        for stateful in (False, True):
            folder = tempfile.mkdtemp()
            try:
                times = slowest(launch(world_size, time_saving, folder, stateful, 3 if quick else 40))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            kind = "StatefulDataLoader" if stateful else "DataLoader"
            what = f"`save_state` and `load_state` of a `{kind}`, {world_size} rank{'s' * (world_size > 1)}"
            note = f"both: {medians(times)}"
            found.append(Row(what, "Accelerate's", ratio(times, "presharded", "accelerate"), 1.2, note=note))
    return found
