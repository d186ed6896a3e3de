# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""A pass over a loader after which training goes on as if it had not been made."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from .data_loader import PreshardedDataLoader
from .progress import Progress
from .sharding import read, walk_datasets, walk_samplers


# Where loaders, samplers and datasets keep what a pass changes.
_NAMES = ("epoch", "_epoch", "iteration", "skip_batches", "end_of_dataloader", "remainder")


@contextlib.contextmanager
def untouched(loader: Any) -> Iterator[Any]:
    """
    Give out a loader to iterate, and put everything back behind it that such a pass changes.

    Put back are the epochs of the loader, its samplers and its datasets; the random number generators of torch (CPU and
    CUDA), numpy and Python, and those of loaders and samplers; the own state of a loader or stream that has
    `state_dict` and `load_state_dict`; and what Accelerate knows of the loop that is under way. Not put back is what a
    dataset changes in itself otherwise, such as the position in an open file.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): Any loader, prepared or not.

    Yields:
        `Any`: The loader to iterate, for one pass.
    """
    undo: list[Callable[[], Any]] = []
    try:
        _keep_random_numbers(undo)
        is_ours = isinstance(loader, PreshardedDataLoader)
        around = [loader, read(loader, "base_dataloader")]
        objects = _all_below(around)
        for obj in objects:
            _keep_attributes(obj, undo)
        gradient_state = GradientState()
        references = list(gradient_state.dataloader_references)
        undo.append(lambda: setattr(gradient_state, "dataloader_references", references))
        inner = around[1] if around[1] is not None else loader
        holder = Progress(inner).holder()
        if holder is not None:
            state = holder.state_dict()
            undo.append(lambda: holder.load_state_dict(state))
        elif isinstance(inner, DataLoader) and read(inner, "_iterator") is None:
            undo.append(lambda: _end_workers(inner))
        yield loader.trial() if is_ours else loader
    finally:
        for put_back in reversed(undo):
            put_back()


def _all_below(loaders: list[Any]) -> list[Any]:
    found = [obj for loader in loaders for walk in (walk_samplers, walk_datasets) for _, obj in walk(loader)]
    return list({id(obj): obj for obj in found if obj is not None}.values())


def _keep_attributes(obj: Any, undo: list[Callable[[], Any]]) -> None:
    own = read(obj, "__dict__") or {}
    for name in _NAMES:
        value = own.get(name)
        if isinstance(value, torch.Tensor):  # shared with worker processes
            undo.append(lambda value=value, old=value.clone(): value.copy_(old))
        elif name in own:
            undo.append(lambda name=name, value=value: own.__setitem__(name, value))
    if not any(name in own for name in _NAMES[:2]) and callable(read(obj, "set_epoch")):
        epoch = read(obj, "epoch")
        if isinstance(epoch, int):  # behind a property
            undo.append(lambda: obj.set_epoch(epoch))
    for name in ("generator", "synchronized_generator"):
        generator = own.get(name)
        if isinstance(generator, torch.Generator):
            undo.append(lambda generator=generator, state=generator.get_state(): generator.set_state(state))


def _keep_random_numbers(undo: list[Callable[[], Any]]) -> None:
    undo.append(lambda state=random.getstate(): random.setstate(state))
    undo.append(lambda state=numpy.random.get_state(): numpy.random.set_state(state))
    undo.append(lambda state=torch.get_rng_state(): torch.set_rng_state(state))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        undo.append(lambda states=torch.cuda.get_rng_state_all(): torch.cuda.set_rng_state_all(states))


def _end_workers(loader: DataLoader) -> None:
    """End workers that would outlive the pass, with `persistent_workers=True`, and be in its place."""
    iterator, loader._iterator = read(loader, "_iterator"), None
    shut_down = read(iterator, "_shutdown_workers")
    if shut_down is not None:
        shut_down()
