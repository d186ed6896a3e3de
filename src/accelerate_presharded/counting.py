# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""How many batches and samples a loader will yield, as far as that is certain before it is iterated."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from .sharding import anything_registered, find_sharding, read


# The modules whose loaders and samplers yield as many items as their length says.
_EXACT = ("torch.utils.data.", "torchdata.stateful_dataloader")

# Classes beside torch's own that deal out indices as `DistributedSampler` does: a list padded to a multiple of the
# number of replicas, of which each takes every n-th, and at most more repeats behind that.
_DEALT_ALIKE = (
    ("torchdata", "StatefulDistributedSampler"),
    ("transformers", "DistributedSamplerWithLoop"),
    ("transformers", "DistributedLengthGroupedSampler"),
    ("timm", "OrderedDistributedSampler"),
)


def count_batches(loader: Any) -> int | None:
    """
    Count the batches of one pass over a loader, if that is certain.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `int` or `None`: `None` for streams, for batch samplers and samplers of the user's own, whose length may
        change from epoch to epoch, and for loaders with an `__iter__` of their own.
    """
    return len(loader) if _draws_from_exact_sampler(loader) else None


def count_samples(loader: Any) -> int | None:
    """
    Count the real samples of one pass over a loader, if that is certain. A last batch that is dropped counts too.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `int` or `None`: The samples that are no padding.
    """
    real = count_real(loader)
    if real is not None or not _draws_from_exact_sampler(loader):
        return real
    return len(innermost_sampler(loader))


def count_real(loader: Any) -> int | None:
    """
    Tell after how many samples of a pass everything is padding, samples repeated to give each rank the same number.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `int` or `None`: `None` if no sample is known to be padding.
    """
    sampler = innermost_sampler(loader)
    if sampler is None or not _is_exact(type(loader).__iter__):
        return None
    stated = stated_padding(loader)
    if stated is not None:
        return len(sampler) - stated
    if not _deals_like_distributed_sampler(sampler):
        return None
    length = length_of(read(sampler, "dataset")) or length_of(read(sampler, "lengths"))
    if length is None:
        return None
    padding = sampler.total_size - length
    # The padding is the tail of the list that is dealt out, so it is the last sample of the last ranks.
    return sampler.num_samples - (1 if sampler.rank >= sampler.num_replicas - padding else 0)


def stated_padding(loader: Any) -> int | None:
    """
    Tell how many samples at the end of a pass are padding by the word of an author, see [`register_sharding`].

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `int` or `None`: `None` if nothing was stated.
    """
    sharding = find_sharding(loader) if anything_registered() else None
    return None if sharding is None else sharding.num_padding


def draws_single_items(loader: Any) -> bool:
    """
    Tell whether a loader yields single items, which it does not put together to batches.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `bool`: `True` for `batch_size=None`, unless the sampler deals out batches of indices.
    """
    if not isinstance(loader, DataLoader):
        return False
    return loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)


def innermost_sampler(loader: Any) -> Any:
    """
    Find the sampler that yields the indices of a loader one by one, in the order in which they are batched.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `Any`: The sampler, or `None` for a stream or where something unknown stands between it and the batches.
    """
    if not isinstance(loader, DataLoader) or isinstance(read(loader, "dataset"), IterableDataset):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    # What else deals out batches of indices may put them together in any way.
    if loader.batch_sampler is not None and not isinstance(sampler, BatchSampler):
        return None
    while isinstance(sampler, BatchSampler):
        if not _is_exact(type(sampler).__iter__):
            return None
        sampler = sampler.sampler
    return sampler if length_of(sampler) is not None else None


def _draws_from_exact_sampler(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or not _is_exact(type(loader).__iter__, type(loader).__len__):
        return False
    sampler = innermost_sampler(loader)
    return sampler is not None and _is_exact(type(sampler).__iter__, type(sampler).__len__)


def _is_exact(*functions: Any) -> bool:
    return all(read(function, "__module__", "").startswith(_EXACT) for function in functions)


def _deals_like_distributed_sampler(sampler: Any) -> bool:
    if type(sampler).__iter__ is DistributedSampler.__iter__:
        return True
    module, name = type(sampler).__module__, type(sampler).__name__
    return any(module.startswith(package) and name == alike for package, alike in _DEALT_ALIKE)


def length_of(obj: Any) -> int | None:
    """
    Return the length of an object that may be anything.

    Args:
        obj (`Any`): The object.

    Returns:
        `int` or `None`: `None` if it has no length, or if asking for it raises.
    """
    try:
        return len(obj) if isinstance(obj, Sized) else None
    except Exception:
        return None
