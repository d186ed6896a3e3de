# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What a loader says about itself: into how many shards its data is cut, which one it reads, and how one can tell.

Everything here reads attributes. Nothing is iterated, no sample is loaded, no method of the user's is called, and an
attribute that raises counts as absent.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset


@dataclass(frozen=True)
class Sharding:
    """
    How a loader is sharded across ranks.

    Args:
        num_shards (`int`, *optional*):
            The number of shards that the data is cut into. `None` if the loader says that it is sharded and no more.
        index (`int`, *optional*):
            Which of them this loader reads, from 0 to `num_shards - 1`. `None` together with `num_shards`.
        source (`str`):
            The evidence, as a phrase fit for a message: `"DistributedSampler at loader.sampler"`.
        num_padding (`int`, *optional*):
            How many samples at the end of a pass over this shard repeat samples that another shard, or this one, has
            already yielded. Where the samples of a pass cannot be counted beforehand, as in a stream, they have to lie
            in its last batch. `None` if that is unknown.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> from accelerate_presharded import find_sharding

    >>> loader = DataLoader(range(16), sampler=DistributedSampler(range(16), num_replicas=2, rank=1))
    >>> find_sharding(loader)
    Sharding(num_shards=2, index=1, source='DistributedSampler at loader.sampler', num_padding=None)
    ```
    """

    num_shards: int | None
    index: int | None
    source: str
    num_padding: int | None = None


# The names under which samplers and datasets keep the size and the rank, read off the objects themselves. Each name
# may also carry one leading underscore.
_PAIRS = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
    ("data_parallel_size", "data_parallel_rank"),
    ("dp_world_size", "dp_rank"),
    ("dp_size", "rank"),
)

# An object kept by a dataset that knows about the ranks: its attribute name, then its own names for size and rank.
_CONFIGS = (
    ("_distributed", "world_size", "rank"),
    ("distributed_env", "world_size", "global_rank"),
    ("worker_config", "world_size", "rank"),
    ("_parallel_rank_world", "num_ranks", "rank"),
    ("reader", "dist_num_replicas", "dist_rank"),
)

# Where a wrapper keeps what it wraps. A name in the second place holds a list or a tuple of them.
_SAMPLER_STEPS = (("sampler", "batch_sampler", "_sampler", "base_sampler"), ("samplers",))
_DATASET_STEPS = (("dataset", "_data", "_dataset"), ("_datasets", "datasets"))

# Ten wrappers deep is more than anyone builds; beyond this many objects it is a cycle of fresh objects or a mock.
_MAX_OBJECTS = 64

_REGISTERED: dict[type, Callable[[Any], Any]] = {}


def find_sharding(loader: Any) -> Sharding | None:
    """
    Tell how a loader is sharded across ranks, from its own attributes and those of its samplers and dataset.

    The rules, in order; the first that answers is the answer:

    1. `is_sharded`, a `bool`, on the loader, its sampler, its batch sampler or its dataset settles it either way.
    2. What [`register_sharding`] was told about the class of one of them.
    3. A size and a rank on the sampler side, also through wrappers (`num_replicas` and `rank`, `world_size` and
       `rank`, `num_processes` and `process_index`, ...).
    4. A distributed configuration held by the dataset (Hugging Face Datasets, LitData, Streaming, Energon, timm).
    5. A WebDataset pipeline with a stage named `split_by_node`.
    6. A size and a rank on the dataset itself, for an `IterableDataset` only: a map-style dataset may keep them to
       seed its augmentations.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches):
            The loader to look at. It is not iterated and not changed.

    Returns:
        [`Sharding`] or `None`: `None` when nothing says that the loader is sharded.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> from accelerate_presharded import find_sharding

    >>> find_sharding(DataLoader(range(16))) is None
    True
    >>> find_sharding(DataLoader(range(16), sampler=DistributedSampler(range(16), num_replicas=2, rank=1))).index
    1
    ```
    """
    samplers = list(walk_samplers(loader))
    datasets = list(walk_datasets(loader))

    for path, obj in _declaring(loader):
        declared = read(obj, "is_sharded")
        if declared is False:
            return None
        if declared is True:
            return Sharding(None, None, f"is_sharded on {_at(obj, path)}")

    stated = next(_registered(samplers + datasets), None)
    if stated is not None:
        return stated

    # A size of 1 shards nothing, so it does not end the search; it is reported if nothing better turns up.
    trivial = None
    for rule, found in (
        (_pairs_of_samplers, samplers),
        (_configs_of_datasets, datasets),
        (_split_by_node, datasets),
        (_pairs_of_streams, datasets),
    ):
        for sharding in rule(found):
            if sharding.num_shards != 1:
                return sharding
            trivial = trivial or sharding
    return trivial


def is_already_sharded(loader: Any, num_processes: int | None = None, process_index: int | None = None) -> bool:
    """
    Tell whether a loader already reads this rank's own shard, so that sharding it again would lose data.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches):
            The loader to look at. It is not iterated and not changed.
        num_processes (`int`, *optional*):
            The data-parallel size. Defaults to the world size of `torch.distributed`, or to 1 without a process
            group.
        process_index (`int`, *optional*):
            The data-parallel index of this rank. Defaults to the rank in `torch.distributed`, or to 0.

    Returns:
        `bool`: `False` when there is one process, when nothing says that the loader is sharded, or when it is cut
        into a single shard.

    Raises:
        `ValueError`: the loader is sharded for another size or another index than the ones given.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> from accelerate_presharded import is_already_sharded

    >>> loader = DataLoader(range(16), sampler=DistributedSampler(range(16), num_replicas=2, rank=1))
    >>> is_already_sharded(loader, num_processes=2, process_index=1)
    True
    ```
    """
    grouped = dist.is_available() and dist.is_initialized()
    if num_processes is None:
        num_processes = dist.get_world_size() if grouped else 1
    if process_index is None:
        process_index = dist.get_rank() if grouped else 0
    if num_processes == 1:
        return False
    sharding = find_sharding(loader)
    if sharding is None or sharding.num_shards == 1:
        return False
    problem = mismatch(sharding, num_processes, process_index)
    if problem is not None:
        raise ValueError(
            f"{problem} Build it for size {num_processes} and index {process_index}, or pass `already_sharded=True` "
            "to use the loader as it is, or `already_sharded=False` to have it sharded once more."
        )
    return True


def register_sharding(cls: type, function: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """
    State how loaders, samplers or datasets of a class are sharded, where their attributes do not say it.

    The word of the class's author goes before everything that is guessed from attributes. Subclasses inherit it.

    Args:
        cls (`type`):
            The class of a loader, sampler, batch sampler or dataset.
        function (`Callable`, *optional*):
            Called with an instance. Returns a [`Sharding`], or a tuple `(num_shards, index)`, or `None` if this
            instance says nothing. Without it, a decorator is returned.

    Returns:
        `Callable`: `function`, unchanged.

    Raises:
        `TypeError`: `cls` is not a class.

    Example:

    ```python
    >>> from accelerate_presharded import register_sharding

    >>> class NodeSampler:
    ...     def __init__(self, nodes, node):
    ...         self.nodes, self.node = nodes, node

    >>> @register_sharding(NodeSampler)
    ... def node_sharding(sampler):
    ...     return sampler.nodes, sampler.node
    ```
    """
    if not isinstance(cls, type):
        raise TypeError(f"`register_sharding` expects a class first, but got {cls!r}.")
    if function is None:
        return functools.partial(register_sharding, cls)
    _REGISTERED[cls] = function
    return function


def anything_registered() -> bool:
    """Tell whether [`register_sharding`] was called at all. What only an author can state need not be looked for else."""
    return bool(_REGISTERED)


def mismatch(sharding: Sharding, num_processes: int, process_index: int) -> str | None:
    """
    Compare a sharding with a data-parallel size and index.

    Args:
        sharding ([`Sharding`]): What was found.
        num_processes (`int`): The data-parallel size.
        process_index (`int`): The data-parallel index of this rank.

    Returns:
        `str` or `None`: A sentence that states both pairs, or `None` where they agree or nothing is known.
    """
    if sharding.num_shards is None or (sharding.num_shards, sharding.index) == (num_processes, process_index):
        return None
    return (
        f"The loader is sharded for size {sharding.num_shards} and index {sharding.index} ({sharding.source}), but "
        f"this process has data-parallel size {num_processes} and index {process_index}."
    )


def walk_samplers(loader: Any) -> Iterator[tuple[str, Any]]:
    """
    Go through the sampler side of a loader, outermost first, the loader itself included.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader to look at.

    Yields:
        `tuple[str, Any]`: A path such as `"loader.batch_sampler.sampler"` and the object there, each object once.
    """
    return _walk([("loader", loader)], *_SAMPLER_STEPS)


def walk_datasets(loader: Any) -> Iterator[tuple[str, Any]]:
    """
    Go through the dataset side of a loader, outermost first.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader to look at.

    Yields:
        `tuple[str, Any]`: A path such as `"loader.dataset._data"` and the object there, each object once.
    """
    dataset = read(loader, "dataset")
    return _walk([] if dataset is None else [("loader.dataset", dataset)], *_DATASET_STEPS)


def sharded_by_sampler(loader: Any) -> bool:
    """
    Tell whether the cut is made by a sampler, over a dataset that all ranks share.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader to look at.

    Returns:
        `bool`: `False` when nothing on the sampler side says so.
    """
    samplers = list(walk_samplers(loader))
    stated = next(_registered(samplers), None)
    found = _pairs_of_samplers(samplers) if stated is None else [stated]
    return any(sharding.num_shards != 1 for sharding in found)


def read(obj: Any, name: str, default: Any = None) -> Any:
    """
    Read an attribute of an object that may be anything.

    Args:
        obj (`Any`): The object.
        name (`str`): The attribute's name.
        default (`Any`, *optional*, defaults to `None`): The answer where it is missing, or where reading it raises.

    Returns:
        `Any`: The attribute, or `default`.
    """
    try:
        return getattr(obj, name, default)
    except Exception:
        return default


def _registered(found: list) -> Iterator[Sharding]:
    for path, obj in found if _REGISTERED else ():
        function = next((_REGISTERED[base] for base in type(obj).__mro__ if base in _REGISTERED), None)
        stated = None if function is None else function(obj)
        if isinstance(stated, Sharding):
            yield stated
        elif isinstance(stated, tuple) and len(stated) == 2:
            yield Sharding(*stated, f"{_at(obj, path)}, as registered")
        elif stated is not None:
            raise TypeError(
                f"The function registered for {_at(obj, path)} returned {stated!r}; a `Sharding`, a tuple "
                "`(num_shards, index)` or `None` was expected."
            )


def _pairs_of_samplers(samplers: list) -> Iterator[Sharding]:
    for path, obj in samplers:
        yield from _pairs(obj, path)


def _configs_of_datasets(datasets: list) -> Iterator[Sharding]:
    for path, obj in datasets:
        for name, size, rank in _CONFIGS:
            config = read(obj, name)
            if config is not None:
                yield from _believable(read(config, size), read(config, rank), f"{_at(obj, path)}, in its {name}")


def _split_by_node(datasets: list) -> Iterator[Sharding]:
    for path, obj in datasets:
        stages = read(obj, "pipeline")
        for stage in stages if issubclass(type(stages), list) else ():
            group = None
            while issubclass(type(stage), functools.partial):
                group = group or stage.keywords.get("group")
                stage = stage.func
            if read(stage, "__name__") == "split_by_node":
                yield from _believable(*_rank_read_by_webdataset(group), f"split_by_node in {_at(obj, path)}")


def _pairs_of_streams(datasets: list) -> Iterator[Sharding]:
    for path, obj in datasets:
        if issubclass(type(obj), IterableDataset):
            yield from _pairs(obj, path)


def _pairs(obj: Any, path: str) -> Iterator[Sharding]:
    for size, rank in _PAIRS:
        num_shards = _read_int(obj, size)
        if num_shards is not None:
            yield from _believable(num_shards, _read_int(obj, rank), _at(obj, path))


def _believable(num_shards: Any, index: Any, source: str) -> Iterator[Sharding]:
    # -1 is the field's word for "not distributed". An index that is too large is a mistake to be told of, not nothing.
    if type(num_shards) is int and type(index) is int and num_shards > 0 and index >= 0:
        yield Sharding(num_shards, index, source)


def _rank_read_by_webdataset(group: Any) -> tuple[int, int]:
    # The stage asks for its rank when it is iterated: the launcher's variables first, then the process group.
    try:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    except (KeyError, ValueError):
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(group), dist.get_rank(group)
        return 1, 0


def _declaring(loader: Any) -> Iterator[tuple[str, Any]]:
    yield "loader", loader
    for name in ("sampler", "batch_sampler", "dataset"):
        obj = read(loader, name)
        if obj is not None:
            yield f"loader.{name}", obj


def _walk(queue: list, names: tuple[str, ...], list_names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}  # keeps the objects alive, so that an id is not used twice
    while queue and len(seen) < _MAX_OBJECTS:
        path, obj = queue.pop(0)
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        yield path, obj
        for name in names:
            inner = read(obj, name)
            if inner is not None:
                queue.append((f"{path}.{name}", inner))
        for name in list_names:
            inner = read(obj, name)
            if issubclass(type(inner), (list, tuple)):
                queue.extend((f"{path}.{name}[{i}]", item) for i, item in enumerate(inner[:_MAX_OBJECTS]))


def _at(obj: Any, path: str) -> str:
    return f"{type(obj).__name__} at {path}"


def _read_int(obj: Any, name: str) -> int | None:
    for spelling in (name, f"_{name}"):
        value = read(obj, spelling)
        if type(value) is int:
            return value
    return None
