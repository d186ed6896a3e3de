# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""A pass over a loader that begins some batches later, without rebuilding the loader."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .batches import size_of
from .sharding import read


class Pass:
    """
    One pass over a loader, begun behind its first batches.

    A plain map-style `DataLoader` passes over their indices and loads none of their samples. One whose `__iter__` is
    its own may turn an index batch into any number of batches, and one with a state counts what it has read, so these
    are read and dropped, as streams are.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.
        num_batches (`int`, *optional*, defaults to 0): How many batches to leave out.
        begin_order (`torch.Tensor`, *optional*):
            The state of torch's random number generator with which an earlier pass began. The order of the samples is
            drawn with it again, so that the batches that are left out are those of that pass; everything that is drawn
            afterwards goes on from the present state.

    **Available attributes:**

        - **skipped_batches** (`int`) -- How many batches there were to leave out, known with the first that is not.
        - **skipped_samples** (`int`) -- How many samples they hold.
    """

    def __init__(self, loader: Any, num_batches: int = 0, begin_order: torch.Tensor | None = None):
        self.skipped_batches = 0
        self.skipped_samples = 0
        if num_batches and _draws_indices(loader):
            self._batches = self._open_behind(loader, num_batches, begin_order)
        else:
            self._batches = iter(loader)
            for batch in itertools.islice(self._batches, num_batches):
                size = size_of(batch)
                self.count(1, 1 if size is None else size)

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def count(self, batches: int, samples: int) -> None:
        """Count batches that were left out, of so many samples together."""
        self.skipped_batches += batches
        self.skipped_samples += samples

    def _open_behind(self, loader: DataLoader, num_batches: int, begin_order: torch.Tensor | None) -> Iterator[Any]:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        own = vars(loader)
        kept = own[name]
        # DataLoader refuses the assignment of a sampler, but an iterator takes it up when it is made and never again.
        # Persistent workers belong to an iterator with the old one, so they have to be started anew.
        present = None if begin_order is None else torch.get_rng_state()
        own[name], own["_iterator"] = _Behind(kept, num_batches, self, present), None
        if begin_order is not None:
            torch.set_rng_state(begin_order)
        try:
            return iter(loader)
        finally:
            own[name] = kept


class _Behind:
    """A sampler that leaves out its first items the first time it is iterated."""

    def __init__(self, sampler: Iterable, num_items: int, opened: Pass | None, present: torch.Tensor | None):
        self.sampler = sampler
        self.num_items = num_items
        self.opened = opened
        self.present = present

    def __iter__(self) -> Iterator[Any]:
        # Drawn when the first item is asked for and not before, as samplers do, so that the random numbers that the
        # loader takes for itself in between are the same.
        items = iter(self.sampler)
        if self.opened is not None:
            size = len if type(self.sampler) is BatchSampler else _num_indices
            sizes = Counter(map(size, itertools.islice(items, self.num_items)))
            self.opened.count(sizes.total(), sum(size * number for size, number in sizes.items()))
        # The pass holds the loader's iterator, which holds this: a cycle would keep the workers alive.
        self.num_items, self.opened = 0, None
        if self.present is not None:
            torch.set_rng_state(self.present)
            self.present = None
        yield from items

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.num_items)


def _num_indices(item: Any) -> int:
    return len(item) if isinstance(item, list) else 1


def _draws_indices(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and not callable(read(loader, "state_dict"))
    )
