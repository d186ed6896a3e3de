# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The loader that leaves the user's own loader as it is, and the functions that decide when to use it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from logging import INFO, WARNING
from typing import Any

import accelerate.data_loader
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.logging import get_logger
from accelerate.state import DistributedType, GradientState, PartialState
from accelerate.utils import RNGType, is_torch_xla_available, send_to_device, synchronize_rng_states
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from .agreement import Facts, Plan, agree, can_speak, post_ordinary, refuse
from .batches import size_of
from .channel import Channel, Pace
from .counting import count_batches, count_real, count_samples, draws_single_items, length_of, stated_padding
from .evening import Source, Step, alone, counted, together
from .metrics import Count
from .progress import VERSION, Progress
from .sharding import find_sharding, is_already_sharded, mismatch, read, sharded_by_sampler, walk_samplers


logger = get_logger(__name__)

# Accelerate's own functions, taken now: `patch_accelerate` puts those of this module in their place.
prepare_ordinary = accelerate.data_loader.prepare_data_loader
skip_ordinary = accelerate.data_loader.skip_first_batches

# The dimensions of a mesh over which the data is cut, and what Accelerate called them before version 1.10.
_DATA_PARALLEL = ("dp_replicate", "dp_shard", "dp", "fsdp")

# The modules whose samplers know nothing of ranks unless their attributes say so.
_PLAIN_SAMPLERS = ("torch.utils.data.", "torchdata.")


class PreshardedDataLoader(DataLoaderShard):
    """
    A prepared loader around one that is already sharded across ranks.

    The loader it is given is iterated as it is: its class, `__iter__`, attributes, workers, sampler, `collate_fn` and
    state are all kept, and every attribute that this class does not have itself is read from it. Added is what
    [`~Accelerator.prepare`] is for: batches on the device, the end of the loader known one batch ahead for gradient
    accumulation, synchronized random number generators, epochs, and the same number of steps on every rank.

    Usually made by [`prepare_data_loader`] or by [`Accelerator.prepare`].

    Args:
        dataloader (`torch.utils.data.DataLoader` or any iterable of batches):
            The loader of this rank's own shard.
        device (`torch.device`, *optional*):
            Where to put the batches. They stay where they are without it.
        rng_types (list of `str` or [`~utils.RNGType`], *optional*):
            The random number generators to synchronize across ranks at the beginning of each epoch.
        synchronized_generator (`torch.Generator`, *optional*):
            The generator meant by `"generator"` in `rng_types`.
        skip_batches (`int`, *optional*, defaults to 0):
            How many batches to leave out at the beginning of the first epoch.
        num_processes (`int`, *optional*, defaults to 1):
            The data-parallel size: over how many ranks the data is sharded.
        process_index (`int`, *optional*, defaults to 0):
            The data-parallel index of this rank.
        non_blocking (`bool`, *optional*, defaults to `False`):
            Whether to copy batches to the device without waiting for the copy.
        even_batches (`bool`, *optional*, defaults to `True`):
            Whether all ranks make the same number of steps: to the end of the longest, where the others repeat their
            batches from the beginning, or with `drop_last=True` to the end of the shortest.
        plan ([`Plan`], *optional*):
            What the ranks have settled on. Without it this rank is on its own.
        counts_samples (`bool`, *optional*, defaults to `True`):
            Whether this rank's samples count in metrics. `False` where another rank has the same batches.

    **Available attributes:**

        - **base_dataloader** (`torch.utils.data.DataLoader` or any iterable of batches) -- The loader as it was given.
        - **iteration** (`int`) -- The number of the epoch that is running or comes next, from 0.
        - **total_batch_size** (`int`) -- The batch size over all ranks.
        - **total_dataset_length** (`int`) -- The number of real samples over all ranks, where it is known.
        - **even_batches** (`bool`) -- As above.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader
    >>> from accelerate_presharded import PreshardedDataLoader

    >>> loader = PreshardedDataLoader(DataLoader([10, 11, 12], batch_size=2))
    >>> [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
    [([10, 11], False), ([12], True)]
    ```
    """

    def __init__(
        self,
        dataloader: Any,
        device: torch.device | None = None,
        rng_types: list[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        num_processes: int = 1,
        process_index: int = 0,
        non_blocking: bool = False,
        even_batches: bool = True,
        plan: Plan | None = None,
        counts_samples: bool = True,
    ):
        # Not super().__init__(): it would build another DataLoader from a dataset and a list of attributes.
        self.base_dataloader = dataloader
        # What Accelerate calls a stateful loader is one that it built itself and whose state it writes for all ranks
        # to the same file.
        self.use_stateful_dataloader = False
        self.gradient_state = GradientState()
        self.device = device
        self.num_processes = num_processes
        self.process_index = process_index
        self.rng_types = rng_types
        self.even_batches = even_batches
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._non_blocking = non_blocking
        self._progress = Progress(dataloader)
        self._plan = plan
        self._pace = Pace()
        self._counts_samples = counts_samples
        self._num_batches = count_batches(dataloader)
        self._has_said = False
        self._count: tuple[int | None, int] = (None, 0)

    @property
    def __class__(self):
        # `isinstance(prepared, DataLoader)` and `isinstance(prepared, UsersLoader)` both hold, and the first also for
        # iterables that are no DataLoader, since that is what the code around prepared loaders asks.
        cls = type(self.base_dataloader)
        return cls if issubclass(cls, DataLoader) else DataLoader

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        # A pass that is cut short begins anew from the start: what was skipped once is not skipped again.
        skip, self.skip_batches = self.skip_batches, 0
        source = self._progress.begin(skip)
        if source is None:
            self._progress.end()
            self.end()
            return
        counter = _Counter(self.base_dataloader, source, self._progress.samples, self._counts_samples)
        batches = source.start
        # Once a batch, in every training loop there is: nothing is looked up or made here that need not be.
        device, non_blocking = self.device, self._non_blocking
        if device is not None and torch.device(device).type == "cpu":
            # The device of a rank without GPU has a number, and torch copies a tensor to it that is there already.
            device = torch.device("cpu")
        for batch, is_last, is_replay, ends_own, mark in self._steps(source):
            self._count = counter.count(batch, is_replay, ends_own)
            # A tensor that is there already would come back as it is.
            if device is not None and not (type(batch) is torch.Tensor and batch.device == device):
                batch = send_to_device(batch, device, non_blocking=non_blocking)
            batches += 1
            self._progress.advance(batches, counter.samples, mark, source, is_last, ends_own)
            self.end_of_dataloader = is_last
            yield batch
        # Accelerate does not count an epoch without batches either.
        if batches:
            self._progress.end()
        self.end()

    def _steps(self, source: Source) -> Iterator[Step]:
        if self._plan is None or not self.even_batches or not dist.is_initialized():
            return alone(source)
        said: list[str] = []

        def say(sentence: str) -> None:
            # Once in an epoch; where it happens in every epoch it is news only in the first.
            if not said:
                said.append(sentence)
                logger.log(INFO if self._has_said else WARNING, f"{describe(self.base_dataloader)}: {sentence}.")
                self._has_said = True

        if self._plan.steps() is None:
            name = describe(self.base_dataloader)
            return together(source, Channel.current(), name, self._pace, self._plan.drop_last, say)
        num_batches = count_batches(self.base_dataloader)
        if num_batches != self._num_batches:
            raise ValueError(
                f"{describe(self.base_dataloader)} had {self._num_batches} batches when it was prepared, but it has "
                f"{num_batches} now, and the other ranks do not know. Prepare it again on every rank."
            )
        return counted(source, num_batches, self._plan, say)

    def __len__(self) -> int:
        steps = None if self._plan is None or not self.even_batches else self._plan.steps()
        return max(0, (len(self.base_dataloader) if steps is None else steps) - self.skip_batches)

    def begin(self) -> None:
        """Enter the loader into the gradient state. Nothing is known of a remainder: no rank's shard is like another's."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    @property
    def dataset(self) -> Any:
        # Accelerate asks every prepared loader for it when it saves, and not every iterable of batches has one.
        return getattr(self.base_dataloader, "dataset", None)

    @property
    def iteration(self) -> int:
        return self._progress.epochs.current

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.epochs.current = epoch

    def set_epoch(self, epoch: int) -> None:
        """
        Set the number of the epoch that comes next, and pass it on to the samplers and the dataset.

        A `set_epoch` that the user calls on the sampler or the dataset has the same effect. Without either, the number
        goes up by one with every epoch that is iterated to its end.

        Args:
            epoch (`int`): The number of the epoch, from 0.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> from accelerate_presharded import PreshardedDataLoader

        >>> sampler = DistributedSampler(range(16), num_replicas=2, rank=0)
        >>> PreshardedDataLoader(DataLoader(range(16), sampler=sampler)).set_epoch(3)
        >>> int(sampler.epoch)
        3
        ```
        """
        self._progress.epochs.set(epoch)

    @property
    def total_batch_size(self) -> int:
        batch_size = read(self.base_dataloader, "batch_size")
        if batch_size is None:
            batch_size = self.base_dataloader.batch_sampler.batch_size
        return batch_size * self.num_processes

    def skipping(self, num_batches: int) -> PreshardedDataLoader:
        """
        Return a loader over the same data that leaves out its first batches, once.

        Args:
            num_batches (`int`):
                How many batches to leave out, beside those that this one leaves out. Where a loader goes on from a
                saved state by itself, those before that state are among them.

        Returns:
            [`PreshardedDataLoader`]: It shares the wrapped loader and its progress with this one.

        Raises:
            `ValueError`: `num_batches` is negative.
        """
        if num_batches < 0:
            raise ValueError(f"`num_batches` is the number of batches to skip, but it is {num_batches}.")
        skipped = copy.copy(self)
        skipped.skip_batches += num_batches
        return skipped

    @property
    def total_dataset_length(self) -> int:
        num_samples = count_samples(self.base_dataloader) if self._plan is None else self._plan.num_samples
        if num_samples is None:
            raise TypeError(f"The number of samples in {describe(self.base_dataloader)} is not known beforehand.")
        return num_samples

    @property
    def samples_in_step(self) -> Count:
        """How many samples the current step has on this rank, and how many of them are real."""
        full = read(self.base_dataloader, "batch_size")
        return Count(*self._count, full if isinstance(full, int) else None)

    @property
    def batches_yielded(self) -> int:
        """How many batches this rank has yielded in the epoch, or had when the state was saved that was loaded."""
        return self._progress.batches

    def state_dict(self) -> dict[str, Any]:
        """
        Return how far this rank has come: what the loop has seen, not what was read ahead.

        Returns:
            `dict[str, Any]`: The version, the data-parallel size, and this rank's part under `"rank_<index>"`, so that
            the dictionaries of all ranks can be put into one.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import PreshardedDataLoader

        >>> loader = PreshardedDataLoader(DataLoader(range(8)))
        >>> for batch in loader:
        ...     break
        >>> loader.state_dict()["rank_0"]["batches"]
        1
        ```
        """
        part = self._progress.to_dict(self.process_index)
        return {"version": VERSION, "num_processes": self.num_processes, f"rank_{self.process_index}": part}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Go on from a state that [`~PreshardedDataLoader.state_dict`] has returned on this rank.

        A wrapped loader that keeps a state of its own goes on with its next batch. Any other gets its epoch back, and
        [`skip_first_batches`] with [`~PreshardedDataLoader.batches_yielded`] goes to the batch.

        Args:
            state_dict (`dict[str, Any]`): The state, alone or with those of other ranks.

        Raises:
            `ValueError`: It is not such a state, or that of another number of ranks, rank, version or kind of loader.
            Nothing is changed then.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import PreshardedDataLoader

        >>> loader = PreshardedDataLoader(DataLoader(range(8)))
        >>> loader.load_state_dict(PreshardedDataLoader(DataLoader(range(8))).state_dict())
        ```
        """
        self.go_on(self.check_state_dict(state_dict))

    def check_state_dict(self, state_dict: Any) -> dict[str, Any]:
        """
        Check that a state can be loaded, without loading it.

        Args:
            state_dict (`Any`): What was found.

        Returns:
            `dict[str, Any]`: The part of this rank, unpacked: what [`~PreshardedDataLoader.go_on`] takes.

        Raises:
            `ValueError`: As in [`~PreshardedDataLoader.load_state_dict`].
        """
        if not isinstance(state_dict, dict) or "version" not in state_dict:
            raise ValueError("what was found is not the state of an already sharded loader")
        if state_dict["version"] != VERSION:
            raise ValueError(f"the state has version {state_dict['version']!r}, and version {VERSION} was expected")
        if state_dict.get("num_processes") != self.num_processes:
            raise ValueError(
                f"the state was saved on {state_dict.get('num_processes')!r} data-parallel ranks, and there are "
                f"{self.num_processes} now"
            )
        own = f"rank_{self.process_index}"
        if own not in state_dict:
            found = ", ".join(str(key).replace("_", " ") for key in state_dict if str(key).startswith("rank_"))
            raise ValueError(
                f"the state is that of {found or 'no rank'}, and that of rank {self.process_index} was expected"
            )
        return self._progress.check(state_dict[own])

    def go_on(self, checked: dict[str, Any]) -> None:
        """
        Go on from a state that was checked.

        Args:
            checked (`dict[str, Any]`): What [`~PreshardedDataLoader.check_state_dict`] has returned.
        """
        self._progress.go_on(checked)

    def __reduce__(self):
        # Not the default: pickle would ask for `__class__`, which is the wrapped loader's.
        state = {name: value for name, value in self.__dict__.items() if name != "gradient_state"}
        return _unpickle, (type(self), state)


class _Counter:
    """How many samples of each step are real: none of a replay, and of the others those before the padding."""

    def __init__(self, dataloader: Any, source: Source, samples: int, counts_samples: bool):
        self._single = draws_single_items(dataloader)
        self._real = count_real(dataloader) if counts_samples else 0
        # Where the samples cannot be counted beforehand, what was stated is cut off from the last batch.
        self._padding = stated_padding(dataloader) or 0 if self._real is None else 0
        self._source: Source | None = source
        self.samples = samples

    def count(self, batch: Any, is_replay: bool, ends_own: bool) -> tuple[int | None, int]:
        """Return the fields of the step's [`Count`], which is only made for those who ask."""
        if self._source is not None:
            self.samples += self._source.skipped_samples
            self._source = None
        size = None if self._single else size_of(batch)
        if is_replay:
            return size, 0
        number = 1 if size is None else size
        before, self.samples = self.samples, self.samples + number
        if self._real is None:
            return size, max(0, number - self._padding) if ends_own else number
        return size, number if self.samples <= self._real else max(0, self._real - before)


def _unpickle(cls: type, state: dict) -> PreshardedDataLoader:
    loader = cls.__new__(cls)
    loader.__dict__.update(state, gradient_state=GradientState())
    return loader


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    already_sharded: bool | None = None,
) -> DataLoader:
    """
    Prepare a `DataLoader` for this rank: leave it alone if it is already sharded, and shard it otherwise.

    All parameters but the last are those of [`accelerate.data_loader.prepare_data_loader`], which is what an ordinary
    loader is passed on to.

    Args:
        dataloader (`torch.utils.data.DataLoader`, or any iterable of batches with `already_sharded=True`):
            The loader to prepare. One that has been prepared before is returned unchanged, unless `already_sharded`
            is `False`.
        device (`torch.device`, *optional*):
            Where the batches go if `put_on_device` is `True`.
        num_processes (`int`, *optional*):
            The number of processes. Defaults to that of [`~state.PartialState`].
        process_index (`int`, *optional*):
            The index of this process. Defaults to that of [`~state.PartialState`].
        split_batches (`bool`, *optional*, defaults to `False`):
            Only for ordinary loaders: whether each batch is divided among the ranks.
        put_on_device (`bool`, *optional*, defaults to `False`):
            Whether to put the batches on `device`.
        rng_types (list of `str` or [`~utils.RNGType`], *optional*):
            The random number generators to synchronize at the beginning of each epoch. For an already sharded loader
            `"generator"` is the one of a random sampler below the sampler that cuts the data; where each rank has
            data of its own, its generator is its own too.
        dispatch_batches (`bool`, *optional*):
            Only for ordinary loaders: whether the main process reads for all.
        even_batches (`bool`, *optional*, defaults to `True`):
            Whether all ranks get batches of the same number and size where the data does not divide evenly.
        slice_fn_for_dispatch (`Callable`, *optional*):
            Only for ordinary loaders that are dispatched.
        use_seedable_sampler (`bool`, *optional*, defaults to `False`):
            Only for ordinary loaders.
        data_seed (`int`, *optional*):
            Only for ordinary loaders.
        non_blocking (`bool`, *optional*, defaults to `False`):
            Whether to copy batches to the device without waiting for the copy.
        use_stateful_dataloader (`bool`, *optional*, defaults to `False`):
            Only for ordinary loaders. An already sharded loader keeps its class: build it as a `StatefulDataLoader`.
        torch_device_mesh (`torch.distributed.DeviceMesh`, *optional*):
            The device mesh. Ranks that differ only along `"tp"` or `"cp"` have the same data-parallel index.
        already_sharded (`bool`, *optional*):
            Whether the loader is already sharded across ranks: `True` leaves it alone, `False` shards it, `None`
            asks [`is_already_sharded`].

    Returns:
        `torch.utils.data.DataLoader`: A [`PreshardedDataLoader`] around an already sharded loader; for any other what
        Accelerate makes of it.

    Raises:
        `ValueError`: the loader is sharded for another size or index than this process has; `dispatch_batches=True` or
        `split_batches=True` for an already sharded loader; `already_sharded` is neither a `bool` nor `None`.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader
    >>> from accelerate_presharded import prepare_data_loader

    >>> mine = list(range(8))  # this rank's own items
    >>> loader = prepare_data_loader(DataLoader(mine, batch_size=4), already_sharded=True)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    ```
    """
    if is_prepared(dataloader) and already_sharded is not False:
        return dataloader
    wrapped = wrap_presharded(
        dataloader,
        device=device,
        num_processes=num_processes,
        process_index=process_index,
        put_on_device=put_on_device,
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        rng_types=rng_types,
        use_seedable_sampler=use_seedable_sampler,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        torch_device_mesh=torch_device_mesh,
        already_sharded=already_sharded,
    )
    if wrapped is not None:
        return wrapped
    return prepare_ordinary(
        dataloader,
        device=device,
        num_processes=num_processes,
        process_index=process_index,
        put_on_device=put_on_device,
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        rng_types=rng_types,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        torch_device_mesh=torch_device_mesh,
    )


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """
    Return a loader that leaves out the first batches of a prepared loader, once.

    For a [`PreshardedDataLoader`] the result has everything that the loader has, its epoch counter included, and
    leaves batches out in its first pass only. No sample of theirs is loaded where the loader draws indices from a
    sampler. Any other loader is passed on to [`accelerate.data_loader.skip_first_batches`].

    Args:
        dataloader (`torch.utils.data.DataLoader`):
            The prepared loader.
        num_batches (`int`, *optional*, defaults to 0):
            How many batches to leave out, on this rank as on every other.

    Returns:
        `torch.utils.data.DataLoader`: A loader over the same data.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader
    >>> from accelerate_presharded import prepare_data_loader, skip_first_batches

    >>> loader = prepare_data_loader(DataLoader([10, 11, 12], batch_size=2), already_sharded=True)
    >>> skipped = skip_first_batches(loader, 1)
    >>> [batch.tolist() for batch in skipped], [batch.tolist() for batch in skipped]
    ([[12]], [[10, 11], [12]])
    ```
    """
    if isinstance(dataloader, PreshardedDataLoader):
        return dataloader.skipping(num_batches)
    if is_torch_xla_available() and isinstance(read(dataloader, "_loader"), PreshardedDataLoader):
        wrapped = dataloader._loader.skipping(num_batches)
        return accelerate.data_loader.MpDeviceLoaderWrapper(wrapped, dataloader.device)
    return skip_ordinary(dataloader, num_batches)


def wrap_presharded(
    dataloader: Any,
    *,
    device: torch.device | None,
    num_processes: int | None,
    process_index: int | None,
    split_batches: bool,
    put_on_device: bool,
    rng_types: list[str | RNGType] | None,
    dispatch_batches: bool | None,
    even_batches: bool,
    use_seedable_sampler: bool,
    non_blocking: bool,
    use_stateful_dataloader: bool,
    torch_device_mesh: Any,
    already_sharded: bool | None,
) -> DataLoader | None:
    """
    Wrap a loader if it is presharded. The parameters are those of [`prepare_data_loader`].

    Returns:
        `torch.utils.data.DataLoader` or `None`: `None` for an ordinary loader.
    """
    state = PartialState()
    num_processes = state.num_processes if num_processes is None else num_processes
    process_index = state.process_index if process_index is None else process_index
    size, index = data_parallel_position(num_processes, process_index, torch_device_mesh, state.distributed_type)
    speaks = size > 1 and can_speak(num_processes, process_index)
    try:
        presharded = is_presharded(dataloader, already_sharded, size, index)
        if presharded:
            _refuse_settings(dataloader, already_sharded, dispatch_batches, split_batches)
    except ValueError as error:
        if not speaks:
            raise
        message = f"Rank {process_index}: {error}"
        refuse(message)
        raise ValueError(message) from None
    if not presharded:
        if speaks:
            facts = Facts(process_index, size, index, describe(dataloader), **_contents_of(dataloader))
            _compare_with_other_ranks(facts, already_sharded, dispatch_batches)
        return None
    plan = agree(_facts_of(dataloader, process_index, size, index, even_batches)) if speaks else None
    if plan is not None and plan.steps() is None:
        Channel.current()  # made here, where all ranks are together
    _warn_of_settings_without_effect(dataloader, use_seedable_sampler, use_stateful_dataloader)
    generator = _common_generator(dataloader, explicit=already_sharded is True)
    on_xla = state.distributed_type == DistributedType.XLA
    wrapped = PreshardedDataLoader(
        dataloader,
        device=device if put_on_device and not on_xla else None,
        rng_types=[kind for kind in rng_types or [] if generator is not None or RNGType(kind) != RNGType.GENERATOR],
        synchronized_generator=generator,
        num_processes=size,
        process_index=index,
        non_blocking=non_blocking,
        even_batches=even_batches,
        plan=plan,
        # Ranks that share a batch are neighbours.
        counts_samples=process_index % max(1, num_processes // size) == 0,
    )
    return accelerate.data_loader.MpDeviceLoaderWrapper(wrapped, device) if on_xla else wrapped


def _refuse_settings(
    dataloader: Any, already_sharded: bool | None, dispatch_batches: bool | None, split_batches: bool
) -> None:
    for setting, is_set in (("dispatch_batches=True", dispatch_batches), ("split_batches=True", split_batches)):
        if is_set:
            raise ValueError(
                f"{describe(dataloader)} is already sharded across ranks "
                f"(`already_sharded={already_sharded}`), so it cannot be used with `{setting}`, by which one rank's "
                f"batches are cut up for all. Leave out `{setting}`, or pass `already_sharded=False` if every rank's "
                "loader goes over the whole data."
            )


def flag_of(accelerator: accelerate.Accelerator, data_loader: Any, already_sharded: bool | None) -> bool | None:
    """
    Look up what was said about a loader. The nearest word counts.

    Args:
        accelerator ([`~accelerate.Accelerator`]): Whose configuration has the last word.
        data_loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.
        already_sharded (`bool`, *optional*): The word of the call.

    Returns:
        `bool` or `None`: `None` if nothing was said.
    """
    noted, flag = getattr(accelerator, "_flagged_loaders", {}).pop(id(data_loader), (None, None))
    if already_sharded is None and noted is data_loader:
        already_sharded = flag
    # The configuration means loaders that are still to be prepared.
    return already_sharded if is_prepared(data_loader) else _nearest(already_sharded, accelerator)


def leave_presharded_alone(
    accelerator: accelerate.Accelerator, data_loader: Any, device_placement: bool | None, already_sharded: bool | None
) -> Any:
    """
    Prepare a loader with the settings of an `Accelerator` if it is presharded, or if it has been prepared before.

    Args:
        accelerator ([`~accelerate.Accelerator`]): Whose settings apply.
        data_loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.
        device_placement (`bool`, *optional*): Whether to put batches on the device; `None` asks the `Accelerator`.
        already_sharded (`bool`, *optional*): What was said about it, see [`flag_of`]; `None` detects it.

    Returns:
        `Any`: A loader that counts as prepared, or an ordinary loader as it came.
    """
    if not is_prepared(data_loader) or already_sharded is False:
        if device_placement is None:
            on_xla = accelerator.distributed_type == DistributedType.XLA
            device_placement = accelerator.device_placement and not on_xla
        wrapped = wrap_presharded(
            data_loader,
            device=accelerator.device,
            num_processes=accelerator.num_processes,
            process_index=accelerator.process_index,
            split_batches=accelerator.split_batches,
            put_on_device=device_placement,
            rng_types=accelerator.rng_types,
            dispatch_batches=accelerator.dispatch_batches,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
            torch_device_mesh=accelerator._prepare_device_mesh(),
            already_sharded=already_sharded,
        )
        if wrapped is None:
            return data_loader
        data_loader = wrapped
    note_prepared(accelerator, data_loader)
    return data_loader


def note_prepared(accelerator: accelerate.Accelerator, loader: Any) -> None:
    """
    Mark a loader as one that need not be prepared again, whichever function has prepared it.

    Args:
        accelerator ([`~accelerate.Accelerator`]): With which it was prepared.
        loader (`torch.utils.data.DataLoader`): The prepared loader.
    """
    if accelerator._schedulers and isinstance(loader, PreshardedDataLoader):
        warn_of_scheduler(accelerator, loader)
    loader._is_accelerate_prepared = True  # Accelerate's own mark


def note_flags(
    accelerator: accelerate.Accelerator,
    objects: tuple,
    device_placement: list[bool] | None,
    already_sharded: bool | list[bool | None] | None,
) -> tuple:
    """
    Note what a call of `prepare` says about its loaders, and prepare those that Accelerate does not take for loaders.

    Args:
        accelerator ([`~accelerate.Accelerator`]): With which to prepare them.
        objects (`tuple`): The objects that `prepare` was called with.
        device_placement (`list[bool]`, *optional*): One entry for each object.
        already_sharded (`bool` or `list[bool]`, *optional*): One value for all loaders, or one entry for each object.

    Returns:
        `tuple`: The objects, with iterables of batches prepared that are no `DataLoader`.

    Raises:
        `ValueError`: `already_sharded` is a list of another length than `objects`.
    """
    if not isinstance(already_sharded, (list, tuple)):
        already_sharded = [already_sharded] * len(objects)
    elif len(already_sharded) != len(objects):
        raise ValueError(
            f"`already_sharded` has {len(already_sharded)} elements, but {len(objects)} objects were passed to "
            "`prepare`. Pass one element for each of them (`None` for what is not a loader), or one value for all."
        )
    # A loader is prepared where Accelerate prepares it, which depends on how the model is distributed, and there the
    # call's word about it is looked up.
    accelerator._flagged_loaders = {
        id(obj): (obj, flag)
        for obj, flag in zip(objects, already_sharded)
        if flag is not None and isinstance(obj, DataLoader)
    }
    if device_placement is None or len(device_placement) != len(objects):
        device_placement = [None] * len(objects)  # Accelerate itself refuses a list of the wrong length
    # Accelerate passes over iterables that are no DataLoader.
    return tuple(
        accelerator.prepare_data_loader(obj, device_placement=placement, already_sharded=True)
        if _nearest(flag, accelerator) is True and _is_other_loader(obj)
        else obj
        for obj, placement, flag in zip(objects, device_placement, already_sharded)
    )


def warn_of_scheduler(accelerator: accelerate.Accelerator, loader: Any = None) -> None:
    """
    Say once that Accelerate's schedulers advance faster than an already sharded loader does.

    Args:
        accelerator ([`~accelerate.Accelerator`]): With which a scheduler or a loader is about to be prepared.
        loader ([`PreshardedDataLoader`], *optional*): The loader, if that is it.
    """
    known = next((each for each in accelerator._dataloaders if isinstance(each, PreshardedDataLoader)), None)
    # The first scheduler beside a loader, or the first loader beside a scheduler.
    said_before = known is not None and (loader is not None or accelerator._schedulers)
    loader = known if loader is None else loader
    steps = accelerator.num_processes
    if loader is None or said_before or steps == 1 or not accelerator.step_scheduler_with_optimizer:
        return
    logger.warning(
        f"{describe(read(loader, 'base_dataloader', loader))} is already sharded, so its length is that of one rank. "
        f"Accelerate takes it for the length over all ranks, and a prepared scheduler makes {steps} steps with every "
        f"optimizer step: one built for `len(loader)` steps ends after 1/{steps} of the epoch. Build it for {steps} "
        "times as many steps, or pass `step_scheduler_with_optimizer=False` to `Accelerator` and step it once a batch."
    )


def data_parallel_position(
    num_processes: int, process_index: int, torch_device_mesh: Any, distributed_type: DistributedType
) -> tuple[int, int]:
    """
    Work out the data-parallel size and index of this process, taking out the ranks that share a batch.

    Args:
        num_processes (`int`): The number of processes.
        process_index (`int`): The index of this process.
        torch_device_mesh (`torch.distributed.DeviceMesh` or `None`): The device mesh, if there is one.
        distributed_type ([`~utils.DistributedType`]): With DeepSpeed only `"tp"` is taken out of the processes.

    Returns:
        `tuple[int, int]`: The data-parallel size and index.
    """
    if not torch_device_mesh:
        return num_processes, process_index
    sizes = {name: torch_device_mesh[name].size() for name in torch_device_mesh.mesh_dim_names}
    if distributed_type == DistributedType.DEEPSPEED:
        shared = sizes.get("tp", 1)
        return num_processes // shared, process_index // shared
    shared = sizes.get("tp", 1) * sizes.get("cp", 1)
    return math.prod(sizes.get(name, 1) for name in _DATA_PARALLEL), process_index // shared


def is_prepared(dataloader: Any) -> bool:
    """
    Tell whether a loader is the result of `prepare_data_loader`.

    Args:
        dataloader (`Any`): The object to look at.

    Returns:
        `bool`: `True` for a loader that was made by preparing another one.
    """
    kinds: tuple[type, ...] = (DataLoaderShard, DataLoaderDispatcher)
    if is_torch_xla_available():
        kinds += (accelerate.data_loader.MpDeviceLoaderWrapper,)
    return issubclass(type(dataloader), kinds)


def _is_other_loader(obj: Any) -> bool:
    # Python's own containers are never meant: scripts pass settings and lists through `prepare` as they are.
    others = (DataLoader, torch.nn.Module, torch.optim.Optimizer, torch.Tensor, str, bytes, dict, list, tuple, set)
    return hasattr(type(obj), "__iter__") and not isinstance(obj, others)


def _nearest(flag: bool | None, accelerator: accelerate.Accelerator) -> bool | None:
    return getattr(accelerator.dataloader_config, "already_sharded", None) if flag is None else flag


def is_presharded(dataloader: Any, already_sharded: bool | None, num_processes: int, process_index: int) -> bool:
    """
    Decide whether a loader is presharded, and say so where the user could be surprised.

    Args:
        dataloader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.
        already_sharded (`bool`, *optional*): The user's word, or `None` to detect it.
        num_processes (`int`): The data-parallel size.
        process_index (`int`): The data-parallel index of this rank.

    Returns:
        `bool`: `True` if the loader has to be left alone, `False` if it is an ordinary one.

    Raises:
        `ValueError`: in automatic mode, the loader is sharded for another size or index; or `already_sharded` is
        neither a `bool` nor `None`; or it is `True` under Megatron-LM.
    """
    if already_sharded is not None and not isinstance(already_sharded, bool):
        raise ValueError(f"`already_sharded` should be `True`, `False` or `None`, but it is {already_sharded!r}.")
    if PartialState().distributed_type == DistributedType.MEGATRON_LM:
        if already_sharded:
            raise ValueError(
                "`already_sharded=True` is not supported with Megatron-LM, which reads its data by itself. Leave "
                "`already_sharded` out."
            )
        return False
    if already_sharded is None:
        if not is_already_sharded(dataloader, num_processes, process_index):
            return False
        logger.warning(
            f"{describe(dataloader)} is already sharded ({find_sharding(dataloader).source}), so it is not sharded "
            "again. Pass `already_sharded=True` to `prepare` to say so yourself, or `already_sharded=False` to shard "
            "it once more."
        )
        return True
    sharding = find_sharding(dataloader)
    problem = None if sharding is None else mismatch(sharding, num_processes, process_index)
    # A cut into one shard is no cut, and one process is given everything: forcing that surprises nobody.
    if problem is not None and (already_sharded or 1 not in (num_processes, sharding.num_shards)):
        logger.warning(
            f"{problem} It is {'used as it is' if already_sharded else 'sharded once more'}, because "
            f"`already_sharded={already_sharded}` was passed.",
            # A wrong size is every rank's; a wrong index may be one rank's alone.
            main_process_only=sharding.num_shards != num_processes,
        )
    return already_sharded


def describe(dataloader: Any) -> str:
    """
    Name a loader in a message.

    Args:
        dataloader (`torch.utils.data.DataLoader` or any iterable of batches): The loader.

    Returns:
        `str`: For instance `"The DataLoader over MyDataset"`.
    """
    dataset = read(dataloader, "dataset")
    return f"The {type(dataloader).__name__}" + ("" if dataset is None else f" over {type(dataset).__name__}")


def _common_generator(dataloader: Any, explicit: bool) -> torch.Generator | None:
    """
    Find the generator below the sampler that cuts the data, whose order must be the same on all ranks.

    A random sampler there that has none of its own is given one, as Accelerate gives one to those it cuts itself.
    Where each rank has data of its own there is none: what it draws is its own business.
    """
    samplers = [sampler for _, sampler in walk_samplers(dataloader) if sampler is not dataloader]
    # A loader declared as sharded may hide its cut in a sampler class of the user's. If it does not, a generator in
    # step costs nothing; if it does, one out of step would lose data.
    hidden = explicit and not all(type(sampler).__module__.startswith(_PLAIN_SAMPLERS) for sampler in samplers)
    if not sharded_by_sampler(dataloader) and not (hidden and find_sharding(dataloader) is None):
        return None
    for sampler in samplers:
        generator = read(sampler, "generator", dataloader)
        if isinstance(generator, torch.Generator):
            return generator
        if generator is None and isinstance(sampler, Sampler):
            sampler.generator = torch.Generator(device=torch.get_default_device())
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            return sampler.generator
    return None


def _facts_of(dataloader: Any, rank: int, num_processes: int, process_index: int, even_batches: bool) -> Facts:
    sharding = find_sharding(dataloader)
    return Facts(
        rank=rank,
        num_processes=num_processes,
        process_index=process_index,
        loader=describe(dataloader),
        num_shards=None if sharding is None else sharding.num_shards,
        index=None if sharding is None else sharding.index,
        num_batches=count_batches(dataloader),
        num_samples=count_samples(dataloader),
        drop_last=read(dataloader, "drop_last") is True
        or read(read(dataloader, "batch_sampler"), "drop_last") is True,
        even_batches=even_batches,
        **_contents_of(dataloader),
    )


def _contents_of(dataloader: Any) -> dict[str, Any]:
    dataset = read(dataloader, "dataset")
    fingerprint = read(dataset, "_fingerprint")
    return {
        "dataset_length": None if isinstance(dataset, IterableDataset) else length_of(dataset),
        "fingerprint": fingerprint if isinstance(fingerprint, str) else None,
    }


def _compare_with_other_ranks(facts: Facts, already_sharded: bool | None, dispatch_batches: bool | None) -> None:
    difference = None
    # An ordinary loader needs nothing of the other ranks: whatever goes wrong with the store is not its concern.
    with contextlib.suppress(RuntimeError):
        difference = post_ordinary(facts)
    if difference is not None and already_sharded is None and not dispatch_batches:
        logger.warning(
            f"{facts.loader}: {difference}. Nothing says that the loader is already sharded, so each rank now takes "
            f"only 1/{facts.num_processes} of what it holds, and the rest is lost. If each rank holds its own data, "
            "pass `already_sharded=True`; if not, `already_sharded=False` leaves this line out.",
            main_process_only=False,
        )


def _warn_of_settings_without_effect(
    dataloader: Any, use_seedable_sampler: bool, use_stateful_dataloader: bool
) -> None:
    if use_stateful_dataloader and not callable(read(dataloader, "state_dict")):
        logger.warning(
            f"{describe(dataloader)} is already sharded and stays as it is, so `use_stateful_dataloader=True` does not "
            "give it a state. Build it as a `torchdata.stateful_dataloader.StatefulDataLoader`."
        )
    if use_seedable_sampler and any(isinstance(sampler, RandomSampler) for _, sampler in walk_samplers(dataloader)):
        logger.warning(
            f"{describe(dataloader)} is already sharded and stays as it is, so `use_seedable_sampler=True` does not "
            "replace its `RandomSampler`. Give it a `generator` with a seed."
        )
