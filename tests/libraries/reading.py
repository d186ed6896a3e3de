# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Goes through the loader of a recipe on a rank, and judges what all ranks together have seen."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranks import run
from recipes import load
from shared import Logged, flat

from accelerate_presharded import Accelerator


WORLD_SIZES = (2, 3)
WORKERS = (0, 2)


class Epoch(NamedTuple):
    """
    What one rank has of an epoch.

    Args:
        steps (`list[list[int]]`): The samples of each step.
        ends (`list[bool]`): What `end_of_dataloader` was in each step.
        gathered (`list[int]`): What `gather_for_metrics` has returned in all steps.
    """

    steps: list
    ends: list
    gathered: list


MARKED = -1


def samples_of(batch: Any) -> list[int]:
    """The numbers of the samples in a batch, in whatever form the library yields it; `MARKED` where it says it repeats."""
    if isinstance(batch, Mapping) and "cuts" in batch:
        batch = [MARKED if "_dup" in cut.id else int(cut.id) for cut in batch["cuts"]]
    elif isinstance(batch, Mapping):
        batch = batch["id"]
    elif isinstance(batch, (list, tuple)) and not isinstance(batch[0], int):
        batch = batch[0]
    return batch.tolist() if hasattr(batch, "tolist") else list(batch)


def go_through(accelerator: Accelerator, loader: Any) -> Epoch:
    epoch = Epoch([], [], [])
    for batch in loader:
        samples = samples_of(batch)
        epoch.steps.append(samples)
        epoch.ends.append(accelerator.gradient_state.end_of_dataloader)
        epoch.gathered.extend(accelerator.gather_for_metrics(torch.tensor(samples)).tolist())
    return epoch


def read_epochs(modules: tuple, code: str, path: str, workers: int, num_epochs: int) -> tuple[list[Epoch], list[str]]:
    """On a rank: the epochs of a recipe's loader, and what was logged."""
    with Logged() as log:
        accelerator = Accelerator(cpu=True)
        loader = load(code, path, accelerator, workers)
        epochs = [go_through(accelerator, loader) for _ in range(num_epochs)]
        return epochs, [message for _, message in log]


def write_datasets(tmp_path_factory: Any, samples: list, num_files: int) -> tuple[Path, Path]:
    """Writes the samples with Hugging Face Datasets: into a folder of so many Parquet files, and as one saved dataset."""
    import datasets  # not in every environment that uses the rest of this file

    whole = datasets.Dataset.from_dict({"id": samples, "x": [0.5 * sample for sample in samples]})
    streamed, saved = tmp_path_factory.mktemp("parquet"), tmp_path_factory.mktemp("saved")
    for number in range(num_files):
        whole.shard(num_files, number).to_parquet(streamed / f"{number}.parquet")
    whole.save_to_disk(saved, num_shards=2)
    return streamed, saved


def run_with(modules: tuple[str, ...], world_size: int, function: Callable, *args) -> list:
    """Like `run`, on ranks that are forked with these modules imported, which saves each of them the time."""
    for name in modules:
        importlib.import_module(name)
    return run(world_size, function, modules, *args)


def read_on_ranks(world_size: int, code: str, path: Any, workers: int, *modules: str) -> list[list[Epoch]]:
    """What each rank has of two epochs."""
    return [epochs for epochs, _ in run_with(modules, world_size, read_epochs, code, str(path), workers, 2)]


def assert_every_sample_once(ranks: list[list[Epoch]], samples: list[int], padding: int = 0, repeats: int = 0) -> None:
    """
    Every sample on one rank only, once; the same number of steps on all ranks; in the metrics each sample once.

    A rank that has run out of samples may repeat its own, but the one that has most must not. What the library itself
    repeats has to be exactly this: `padding` samples that another rank has too, so that each has the same number, and
    `repeats` of its own on each rank, so that they fill its last batch.
    """
    for epochs in zip(*ranks):
        own = [[sample for sample in flat(epoch.steps) if sample != MARKED] for epoch in epochs]
        distinct = flat([list(dict.fromkeys(each)) for each in own])
        assert set(distinct) == set(samples)
        assert len(distinct) == len(samples) + padding
        assert min(len(each) - len(set(each)) for each in own) == repeats
        assert len({len(epoch.steps) for epoch in epochs}) == 1
        for epoch in epochs:
            assert epoch.ends == [False] * (len(epoch.steps) - 1) + [True]
            assert sorted(sample for sample in epoch.gathered if sample != MARKED) == samples


def assert_loses_samples(code: str, path: Any, samples: list[int], *modules: str) -> list[str]:
    """Not every sample is read, so a test that every one is could not pass by chance. Returns what was logged."""
    results = run_with(modules, 2, read_epochs, code, str(path), 0, 1)
    seen = set(flat([epochs[0].steps for epochs, _ in results]))
    assert seen < set(samples)
    return [message for _, log in results for message in log]


def types_of_prepared(code: str, path: Any, *modules: str) -> list[str]:
    """What a recipe's loader is on two ranks."""
    return run_with(modules, 2, type_of_prepared, code, str(path))


def type_of_prepared(modules: tuple, code: str, path: str) -> str:
    return type(load(code, path, Accelerator(cpu=True), 0)).__name__


def assert_goes_on(code: str, path: Any, workers: int, folder: Any, *modules: str, stops: tuple = (1, -2)) -> None:
    """
    Saved after a step and loaded in new processes, each of two ranks goes on as in a run that nobody has interrupted.
    """
    arguments = (modules, 2, read_steps, code, str(path), workers)
    expected = run_with(*arguments)
    for stop in stops:
        stop %= len(expected[0])
        saved = str(folder / str(stop))
        before = run_with(*arguments, saved, stop)
        after = run_with(*arguments, saved)
        for rank in range(2):
            assert before[rank] == expected[rank][:stop]
            assert after[rank] == expected[rank][stop:], (stop, rank)


def read_steps(modules: tuple, code: str, path: str, workers: int, folder: str | None = None, stop: int = 0) -> list:
    """On a rank: the steps of two epochs, up to the one at which the state is saved, or from the saved one on."""
    accelerator = Accelerator(cpu=True)
    loader = load(code, path, accelerator, workers)
    if folder is not None and not stop:
        accelerator.load_state(folder)
    steps = []
    while loader.iteration < 2:
        for batch in loader:
            steps.append((samples_of(batch), accelerator.gradient_state.end_of_dataloader))
            if len(steps) == stop:
                accelerator.save_state(folder)
                return steps
    return steps
