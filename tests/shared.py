# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Loaders, samplers and recorders that several test files use."""

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import accelerate.utils
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, is_torch_version
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset


class Stream(IterableDataset):
    """Yields what it is given, and carries no mark of any rank."""

    def __init__(self, items: Iterable):
        self.items = items

    def __iter__(self) -> Iterator:
        return iter(self.items)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.items)


class Remembering(Stream):
    """A stream that can say where it is, as those of Hugging Face Datasets can."""

    def __init__(self, items):
        super().__init__(items)
        self.position = self.start = 0

    def __iter__(self):
        self.position, self.start = self.start, 0
        while self.position < len(self.items):
            self.position += 1
            yield self.items[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = self.position = state["position"]


class RememberingLive(Remembering):
    """Its state is the very dictionary in which it counts on."""

    def __init__(self, items):
        super().__init__(items)
        self.state = {"positions": [0]}

    def __iter__(self):
        self.state["positions"][0], self.start = self.start, 0
        while self.state["positions"][0] < len(self.items):
            self.state["positions"][0] += 1
            yield self.items[self.state["positions"][0] - 1]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.start = self.state["positions"][0] = state["positions"][0]


@contextlib.contextmanager
def in_blocks(patience: int | None):
    """The ranks of a stream speak of more steps at once after so many steps, however long steps take."""
    if patience is None:
        yield
        return
    with mock.patch.multiple(
        "accelerate_presharded.channel", _PATIENCE=patience, _SOON=math.inf, _LATE=math.inf, _AHEAD=0
    ):
        yield


class NoLoader:
    """
    Stands in for `webdataset.WebLoader` and `torchdata.nodes.Loader`: an iterable of batches that is no `DataLoader`.
    """

    def __init__(self, batches: Iterable):
        self.batches = batches

    def __iter__(self) -> Iterator:
        return iter(self.batches)


class RankBatches:
    """A batch sampler of no known class that holds this rank's own batches, of any size."""

    def __init__(self, batches: list, num_replicas: int, rank: int):
        self.batches, self.num_replicas, self.rank = batches, num_replicas, rank

    def __iter__(self) -> Iterator:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class DealtBatches(BatchSampler):
    """A batch sampler that deals the batches of what another sampler draws to the ranks in turn."""

    def __init__(self, sampler, batch_size: int, num_replicas: int, rank: int):
        super().__init__(sampler, batch_size, drop_last=False)
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self) -> Iterator:
        return itertools.islice(super().__iter__(), self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return len(range(self.rank, super().__len__(), self.num_replicas))


class Listening(DistributedSampler):
    """torch's sampler, which notes what it is told."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.heard: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(int(epoch))
        super().set_epoch(epoch)


class ListeningList(list):
    """A dataset that notes what it is told, and may keep the last number as samplers do."""

    def __init__(self, items: Iterable, numbered: bool = False):
        super().__init__(items)
        self.heard: list[int] = []
        if numbered:
            self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(int(epoch))
        if hasattr(self, "epoch"):
            self.epoch = epoch


def dealt(length: int, world_size: int, rank: int, batch_size: int = 2) -> list[list[int]]:
    """What torch's `DistributedSampler` without shuffling deals to a rank, where the length divides evenly."""
    assert length % world_size == 0
    items = list(range(rank, length, world_size))
    return [items[start : start + batch_size] for start in range(0, len(items), batch_size)]


def lists(batches: Iterable) -> list:
    return [batch.tolist() for batch in batches]


def flat(nested: Any) -> list:
    """All items of lists in lists, in order."""
    return [item for part in nested for item in (flat(part) if isinstance(part, list) else [part])]


class Logged(logging.Handler):
    """What this package and Accelerate log on this rank while the context is open."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines: list[tuple[str, str]] = []
        self.loggers = [logging.getLogger(name) for name in ("accelerate_presharded", "accelerate")]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def __enter__(self) -> list[tuple[str, str]]:
        self.levels = [logger.level for logger in self.loggers]
        for logger in self.loggers:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)
        return self.lines

    def __exit__(self, *exception) -> None:
        for logger, level in zip(self.loggers, self.levels):
            logger.removeHandler(self)
            logger.setLevel(level)


# Everything in torch.distributed at which ranks wait for each other.
COLLECTIVES = tuple(
    name
    for name in (
        "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced "
        "all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object "
        "irecv isend monitored_barrier new_group new_subgroups recv recv_object_list reduce reduce_scatter "
        "reduce_scatter_tensor scatter scatter_object_list send send_object_list"
    ).split()
    if hasattr(dist, name)
)


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that this rank takes part in while the context is open, in order."""
    calls: list[str] = []

    def noting(name: str):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(noting(name))
        yield calls


def raised(function, *args, **kwargs) -> tuple[str, str] | None:
    """The class and the message of the exception that a call ends with."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def needs_parallelism_config() -> None:
    """Skip a test on an Accelerate that makes no device mesh by itself."""
    import pytest  # not at the top: ranks import this module

    if not hasattr(accelerate.utils, "ParallelismConfig"):
        pytest.skip("this version of Accelerate has no ParallelismConfig")


def needs_fsdp2() -> None:
    """Skip a test on a torch without FSDP2."""
    import pytest

    if is_torch_version("<", "2.6.0"):
        pytest.skip("FSDP2 needs torch 2.6")


def needs_an_end_of_groups() -> None:
    """Skip a test that destroys a process group on a torch that may wait for ever there, for a thread that waits for it."""
    import pytest

    if is_torch_version("<", "2.5.0"):
        pytest.skip("torch 2.4 may hang where a process group is destroyed")


@contextlib.contextmanager
def joins_as_on_gpus() -> Iterator[None]:
    """Accelerate joins uneven inputs on GPU ranks only, and asks a property whether it is on one."""
    newer = hasattr(accelerate.Accelerator, "multi_device")
    name, value = ("multi_device", True) if newer else ("distributed_type", DistributedType.MULTI_GPU)
    with mock.patch.object(accelerate.Accelerator, name, value):
        yield


@contextlib.contextmanager
def stand_in_gpus(dimensions: dict[str, int] | None = None, fsdp: bool = False) -> Iterator[dict]:
    """
    Make Accelerate take this rank for one with a GPU, which it asks for before it uses FSDP2 or a device mesh.

    All else is real: the ranks, gloo, the mesh, FSDP2. The device is the CPU.

    Yields:
        The arguments for an `Accelerator` with a mesh of these dimensions, and with FSDP2.
    """
    with mock.patch.dict(os.environ):
        PartialState(cpu=True)
        AcceleratorState._reset_state()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        settings: dict[str, Any] = {"cpu": True}
        if fsdp:
            settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        if dimensions is not None:
            sizes: dict[str, Any] = {f"{name}_size": size for name, size in dimensions.items()}
            if "tp" in dimensions:
                # Without one, transformers has to be installed. It holds nothing that loaders care for.
                sizes["tp_handler"] = object()
            settings["parallelism_config"] = accelerate.utils.ParallelismConfig(**sizes)
        try:
            yield settings
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


# What makes `prepare` of a plain Accelerate cut every loader: nothing has to be said, unless it knows of this feature.
CUT = {"already_sharded": False} if hasattr(accelerate.Accelerator, "already_sharded") else {}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
