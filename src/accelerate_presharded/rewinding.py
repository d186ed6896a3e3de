# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""A pass over a loader after which training goes on as if it had not been made."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from accelerate.state import GradientState

from .contents import hash_of
from .data_loader import PreshardedDataLoader
from .progress import Progress
from .sharding import read, walk_datasets, walk_samplers


@contextlib.contextmanager
def untouched(loader: Any) -> Iterator[Any]:
    """
    Give out a loader to iterate, and put everything back behind it that such a pass changes.

    Put back are the attributes of the loader, its samplers and its datasets, and with them epochs and positions; the
    random number generators of torch (CPU and CUDA), numpy and Python, and those that are such an attribute; the state
    of a loader or dataset that has `state_dict` and `load_state_dict`; and what Accelerate knows of the loop that is
    under way. Not put back is what lies elsewhere, such as the position in an open file.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): Any loader, prepared or not.

    Yields:
        `Any`: The loader to iterate, for one pass.
    """
    undo: list[Callable[[], Any]] = []
    base = read(loader, "base_dataloader")
    inner = loader if base is None else base
    try:
        _keep_random_numbers(undo)
        _keep_loops(undo)
        below = [each for walk in (walk_samplers, walk_datasets) for _, each in walk(inner)]
        for obj in {id(each): each for each in (loader, *below) if each is not None}.values():
            _keep_state(obj, inner, undo)
            _keep_attributes(obj, undo)
        _set_iterator_aside(inner, undo)
        yield _apart(loader) if isinstance(loader, PreshardedDataLoader) else loader
    finally:
        for put_back in reversed(undo):
            put_back()


def _apart(loader: PreshardedDataLoader) -> PreshardedDataLoader:
    """Make a loader over the same data whose passes move neither the epoch of this one nor its place in it."""
    other = copy.copy(loader)
    other._pace = copy.copy(loader._pace)
    other._progress = copy.copy(loader._progress)
    other._progress.epochs = epochs = copy.copy(loader._progress.epochs)
    epochs._listeners = [copy.copy(listener) for listener in epochs._listeners]
    return other


def _keep_random_numbers(undo: list[Callable[[], Any]]) -> None:
    undo.append(lambda state=random.getstate(): random.setstate(state))
    undo.append(lambda state=numpy.random.get_state(): numpy.random.set_state(state))
    undo.append(lambda state=torch.get_rng_state(): torch.set_rng_state(state))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        undo.append(lambda states=torch.cuda.get_rng_state_all(): torch.cuda.set_rng_state_all(states))


def _keep_loops(undo: list[Callable[[], Any]]) -> None:
    state = GradientState()
    undo.append(lambda references=state.dataloader_references: setattr(state, "dataloader_references", references))


def _keep_attributes(obj: Any, undo: list[Callable[[], Any]]) -> None:
    own = read(obj, "__dict__")
    if not isinstance(own, dict):
        return
    for value in own.values():
        if isinstance(value, torch.Generator):
            undo.append(lambda value=value, state=value.get_state(): value.set_state(state))
        elif isinstance(value, numpy.random.Generator):
            undo.append(lambda it=value.bit_generator, state=value.bit_generator.state: setattr(it, "state", state))
        elif isinstance(value, numpy.random.RandomState):
            undo.append(lambda value=value, state=value.get_state(): value.set_state(state))
        elif isinstance(value, random.Random):
            undo.append(lambda value=value, state=value.getstate(): value.setstate(state))
        elif isinstance(value, torch.Tensor) and not value.ndim:
            # An epoch that is shared with worker processes.
            undo.append(lambda value=value, number=value.clone(): value.copy_(number))

    def put_back(kept: dict[str, Any] = dict(own)) -> None:
        for name in own.keys() - kept.keys():
            del own[name]
        own.update(kept)

    undo.append(put_back)


def _keep_state(obj: Any, inner: Any, undo: list[Callable[[], Any]]) -> None:
    """Keep the state that an object has of its own, which may lie deeper than its attributes."""
    # Where it is a loader of torch's kind, all of that is in its iterator. Asking would start one.
    if obj is not Progress(inner).holder() or "_iterator" in (read(obj, "__dict__") or {}):
        return
    state = obj.state_dict()
    before = hash_of(state)

    def put_back() -> None:
        # Only where it is needed: at the end of an epoch, some take a state as the order to stay there.
        if hash_of(obj.state_dict()) != before:
            obj.load_state_dict(state)

    undo.append(put_back)


def _set_iterator_aside(loader: Any, undo: list[Callable[[], Any]]) -> None:
    """Have a loader of torch's kind begin a pass with an iterator of its own, and leave the present one alone."""
    own = read(loader, "__dict__") or {}
    kept = own.get("_iterator")
    if "_iterator" not in own or (kept is not None and read(loader, "persistent_workers")):
        return  # workers that stay are there for every pass

    def end_workers() -> None:
        shut_down = read(own["_iterator"], "_shutdown_workers")
        if shut_down is not None:
            shut_down()

    undo.append(end_workers)
    own["_iterator"] = None
    if own.get("_initial_iter_for_state_dict"):
        # A `StatefulDataLoader` that was asked for its state has begun the next pass with that.
        own["_initial_iter_for_state_dict"], own["next_iter_state"] = False, kept.state_dict()
