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

# Classes that deal out a padded list in turns of a batch, as Accelerate itself does.
_DEALT_IN_BATCHES = (("transformers", "ShardSampler"),)


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
    length = length_of(read(sampler, "dataset")) or length_of(read(sampler, "lengths"))
    if length is None:
        return None
    if _is_one_of(sampler, _DEALT_IN_BATCHES):
        # The padding fills up the last batch of all ranks together.
        padding = sampler.total_num_samples - length
        behind = (sampler.num_processes - 1 - sampler.process_index) * sampler.batch_size
        return len(sampler) - min(max(padding - behind, 0), sampler.batch_size)
    if not _deals_like_distributed_sampler(sampler):
        return None
    padding = sampler.total_size - length
    # The padding is the tail of the list that is dealt out, so it is the last sample of the last ranks.
    return sampler.num_samples - (1 if sampler.rank >= sampler.num_replicas - padding else 0)


def stated_padding(loader: Any) -> int | None:
    """
    Tell how many samples at the end of a pass are padding by the word of an author, see [`register_sharding`], or by
    the rule of MosaicML Streaming.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `int` or `None`: `None` if nothing was stated.
    """
    sharding = find_sharding(loader) if anything_registered() else None
    if sharding is not None and sharding.num_padding is not None:
        return sharding.num_padding
    return _padding_of_streaming(loader)


def _padding_of_streaming(loader: Any) -> int | None:
    """
    Count what MosaicML Streaming repeats: the ranks of a node take turns at its samples, and in the last turn those for
    whom none is left repeat one.
    """
    dataset = read(loader, "dataset")
    world = read(dataset, "_parallel_rank_world")
    length, nodes = read(dataset, "epoch_size"), read(world, "num_nodes")
    # With several canonical nodes on a node its samples end earlier in some than in others. The number that is not
    # given is that of the nodes, but for two algorithms of shuffling.
    many = read(dataset, "shuffle_algo") in ("py1s", "py2s")
    canonical = read(dataset, "num_canonical_nodes") or (0 if many else nodes)
    if type(length) is not int or type(nodes) is not int or canonical != nodes:
        return None
    # The workers deal out batches in turn only where they make those of the loader.
    batch_size = read(loader, "batch_size")
    if read(dataset, "batching_method") != "random" or read(dataset, "batch_size") != batch_size:
        return None
    first, behind = (node * length // nodes for node in (world.node, world.node + 1))
    most = -(-length // nodes)
    turns = -(-most // world.ranks_per_node)
    if read(loader, "drop_last") and turns % batch_size:
        return 0  # it is in the batch that is dropped
    return int((turns - 1) * world.ranks_per_node + world.rank_of_node >= behind - first)


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
    return _is_one_of(sampler, _DEALT_ALIKE)


def _is_one_of(obj: Any, classes: tuple[tuple[str, str], ...]) -> bool:
    module, name = type(obj).__module__, type(obj).__name__
    return any(module.startswith(package) and name == known for package, known in classes)


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
