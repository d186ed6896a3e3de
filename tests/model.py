# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""
What has to come of a loader that is already sharded, worked out for all ranks at once in plain arithmetic.

Nothing here knows of ranks that run, of loaders, or of the package under test. `Dealt`, `Lists`, `Streams`, `Dynamic`
and `DealtBatches` say which data each rank has, `Example` what is done with it, and `expected` what must be seen then.
"""

import collections
import dataclasses
import itertools
import random
from typing import NamedTuple

import torch


class Sample(NamedTuple):
    """An item of a batch. Not real are repeats: the padding of a sampler, and all of a replayed batch."""

    item: int
    is_real: bool = True


# Each rank's items are told apart from all other ranks' by their thousands.
BASE = 1000


def items_of(rank: int, number: int) -> list[int]:
    return list(range(rank * BASE, rank * BASE + number))


def shuffled(number: int, seed: int, epoch: int) -> list[int]:
    """The order in which samplers of the user's own draw."""
    return random.Random(f"{seed}, {epoch}").sample(range(number), number)


def dealt(order: list[int], world_size: int, rank: int, drop_last: bool) -> list[Sample]:
    """
    What a `DistributedSampler` deals to a rank: every `world_size`-th of a list that is made divisible, by leaving
    out its end, or by repeating it from the beginning. The repeats are the padding.
    """
    total = len(order) // world_size * world_size if drop_last else -(-len(order) // world_size) * world_size
    return [Sample(order[place % len(order)], place < len(order)) for place in range(rank, total, world_size)]


def cut(samples: list[Sample], batch_size: int | None, drop_last: bool) -> list[list[Sample]]:
    """Batches of that size, the last one smaller or left out. Without a size each sample is a step of its own."""
    size = batch_size or 1
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


def in_turn(per_worker: list[list]) -> list:
    """The order in which a loader yields the batches of its workers, where each worker reads a stream of its own."""
    return [batch for row in itertools.zip_longest(*per_worker) for batch in row if batch is not None]


def evened(own: list[list], drop_last: bool) -> list[list]:
    """To the shortest rank, or to the longest, where the others repeat theirs from the beginning."""
    lengths = [len(batches) for batches in own]
    if drop_last:
        return [batches[: min(lengths)] for batches in own]
    return [
        batches + [replayed(batches[number % len(batches)]) for number in range(len(batches), max(lengths))]
        for batches in own
    ]


def replayed(batch: list[Sample]) -> list[Sample]:
    return [Sample(item, False) for item, _ in batch]


@dataclasses.dataclass(frozen=True)
class Dealt:
    """`range(length)`, dealt to the ranks by a `DistributedSampler`, from which the loader draws in this `form`."""

    length: int
    batch_size: int | None
    form: str = "sampler"
    shuffle: bool = False
    drop_last: bool = False
    sampler_drop_last: bool = False
    as_tensor: bool = True

    has_exact_order = True
    has_length = True

    def own(self, world_size: int, rank: int, epoch: int, workers: int = 0) -> list[list[Sample]]:
        order = list(range(self.length))
        if self.shuffle:
            # The seed of a DistributedSampler is 0, to which it adds the epoch.
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(epoch)).tolist()
        samples = dealt(order, world_size, rank, self.sampler_drop_last)
        if "wrapped" in self.form:
            # A sampler of the user's own may deal them out in any order, so what it yields is taken as real.
            samples = [Sample(item, True) for item, _ in samples]
        return cut(samples, self.batch_size, self.drop_last)

    def everything(self, world_size: int, epoch: int) -> list[set[int]]:
        """The items that a rank may have, by rank. Ranks with the same ones share them."""
        return [set(range(self.length))] * world_size

    def total(self, world_size: int) -> int:
        return self.length // world_size * world_size if self.sampler_drop_last else self.length

    @property
    def is_complete(self) -> bool:
        return not (self.drop_last or self.sampler_drop_last)

    @property
    def knows_total(self) -> bool:
        return "wrapped" not in self.form


@dataclasses.dataclass(frozen=True)
class Lists:
    """Each rank's own list, of a length of its own. Drawn in its `order`: "given", by "epoch", or at "random"."""

    lengths: tuple[int, ...]
    batch_size: int | None
    form: str = "sampler"
    order: str = "given"
    drop_last: bool = False
    as_tensor: bool = True

    @property
    def has_exact_order(self) -> bool:
        return self.order != "random"

    @property
    def has_length(self) -> bool:
        return self.order != "epoch"

    knows_total = has_length

    def own(self, world_size: int, rank: int, epoch: int, workers: int = 0) -> list[list[Sample]]:
        items = items_of(rank, self.lengths[rank])
        if self.order == "epoch":
            items = [items[place] for place in shuffled(len(items), rank, epoch)]
        return cut([Sample(item) for item in items], self.batch_size, self.drop_last)

    def everything(self, world_size: int, epoch: int) -> list[set[int]]:
        return [set(items_of(rank, length)) for rank, length in enumerate(self.lengths)]

    def total(self, world_size: int) -> int:
        return sum(self.lengths)

    @property
    def is_complete(self) -> bool:
        return not self.drop_last


@dataclasses.dataclass(frozen=True)
class Streams:
    """
    Each rank's own stream, of a length of its own, of which each worker reads a part.

    The stream yields single items, or with `ready` batches of the sizes 1, 2, 3, 1, 2, 3, ...
    """

    lengths: tuple[int, ...]
    batch_size: int | None
    ready: bool = False
    drop_last: bool = False
    as_tensor: bool = True

    has_exact_order = True
    has_length = False
    knows_total = False

    def entries(self, rank: int) -> list:
        """What the stream yields: items, or lists of them."""
        if not self.ready:
            return items_of(rank, self.lengths[rank])
        sizes = [1 + number % 3 for number in range(self.lengths[rank])]
        return [
            list(range(rank * BASE + sum(sizes[:n]), rank * BASE + sum(sizes[: n + 1]))) for n in range(len(sizes))
        ]

    def own(self, world_size: int, rank: int, epoch: int, workers: int = 0) -> list[list[Sample]]:
        parts = [self.entries(rank)[worker :: max(1, workers)] for worker in range(max(1, workers))]
        if self.ready:
            return in_turn([[[Sample(item) for item in entry] for entry in part] for part in parts])
        return in_turn([cut([Sample(item) for item in part], self.batch_size, self.drop_last) for part in parts])

    def everything(self, world_size: int, epoch: int) -> list[set[int]]:
        return [
            {item for entry in self.entries(rank) for item in (entry if self.ready else [entry])}
            for rank in range(world_size)
        ]

    @property
    def is_complete(self) -> bool:
        return not self.drop_last


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A batch sampler of the user's own with the sizes of its batches, by epoch (and around again) and by rank."""

    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    drop_last: bool = False
    as_tensor: bool = True

    has_exact_order = True
    has_length = False
    knows_total = False

    def batches(self, rank: int, epoch: int) -> list[list[int]]:
        sizes = self.sizes[epoch % len(self.sizes)][rank]
        items = iter(items_of(rank, sum(sizes)))
        return [list(itertools.islice(items, size)) for size in sizes]

    def length(self, rank: int) -> int:
        return max(sum(of_epoch[rank]) for of_epoch in self.sizes)

    def own(self, world_size: int, rank: int, epoch: int, workers: int = 0) -> list[list[Sample]]:
        return [[Sample(item) for item in batch] for batch in self.batches(rank, epoch)]

    def everything(self, world_size: int, epoch: int) -> list[set[int]]:
        return [{item for batch in self.batches(rank, epoch) for item in batch} for rank in range(world_size)]

    @property
    def is_complete(self) -> bool:
        return not self.drop_last


@dataclasses.dataclass(frozen=True)
class DealtBatches:
    """Batches of `range(length)`, in their order or at random, of which each rank gets every `world_size`-th."""

    length: int
    batch_size: int
    shuffle: bool = False
    as_tensor: bool = True

    drop_last = False
    is_complete = True
    has_length = False
    knows_total = False

    @property
    def has_exact_order(self) -> bool:
        return not self.shuffle

    def own(self, world_size: int, rank: int, epoch: int, workers: int = 0) -> list[list[Sample]]:
        return cut([Sample(item) for item in range(self.length)], self.batch_size, False)[rank::world_size]

    def everything(self, world_size: int, epoch: int) -> list[set[int]]:
        return [set(range(self.length))] * world_size

    def total(self, world_size: int) -> int:
        return self.length


@dataclasses.dataclass(frozen=True)
class Pass:
    """
    A loop over the prepared loader: behind how many batches it begins, and with which it is left, if it is.

    It may be `again` over the loader of the pass before, which has left out then what it had to.
    """

    skip: int = 0
    stop: int | None = None
    again: bool = False
    epoch: int | None = None  # what `set_epoch` is called with before, if it is


@dataclasses.dataclass(frozen=True)
class Example:
    data: Dealt | Lists | Streams | Dynamic | DealtBatches
    passes: tuple[Pass, ...] = (Pass(),)
    even_batches: bool = True
    accumulation: int = 1
    already_sharded: bool | None = True
    as_objects: bool = False
    workers: int = 0
    persistent_workers: bool = False
    patience: int | None = None  # after how many steps the ranks speak of more steps at once; by the clock if `None`


class Step(NamedTuple):
    samples: list[Sample]
    is_last: bool
    sync_gradients: bool


class Expected(NamedTuple):
    """
    What must be seen in one pass.

    Args:
        epoch (`int`): The number of the epoch.
        steps (`list[list[Step]]`): By rank.
        length (`list[int]`): By rank, what `len` says before the pass.
        empty (`list[int]`): The ranks without a batch of their own where others have some, which is an error.
    """

    epoch: int
    steps: list[list[Step]]
    length: list[int]
    empty: list[int]

    @property
    def num_steps(self) -> list[int]:
        return [len(steps) for steps in self.steps]


def expected(example: Example, world_size: int) -> list[Expected]:
    """What must be seen in each pass of an example, up to the first that ends in an error."""
    passes = []
    epoch = 0
    counters = [
        0
    ] * world_size  # of Accelerate's gradient accumulation, which a loop that is left early does not reset
    for run in example.passes:
        epoch = epoch if run.epoch is None else run.epoch
        own = [example.data.own(world_size, rank, epoch, example.workers) for rank in range(world_size)]
        empty = [rank for rank in range(world_size) if not own[rank]]
        if not example.even_batches or len(empty) == world_size:
            empty = []
        if empty:
            # Nothing can be evened. There is no step, whether it is found out before the loop or in it.
            passes.append(Expected(epoch, [[]] * world_size, [0] * world_size, empty))
            return passes
        whole = evened(own, example.data.drop_last) if example.even_batches else own
        steps = []
        for rank in range(world_size):
            steps.append([])
            rest = whole[rank][run.skip :]
            for number, samples in enumerate(rest[: run.stop], 1):
                is_last = number == len(rest)
                counters[rank] = 0 if is_last else counters[rank] + 1
                steps[rank].append(Step(samples, is_last, counters[rank] % example.accumulation == 0))
        passes.append(Expected(epoch, steps, [max(0, len(batches) - run.skip) for batches in whole], []))
        # An epoch counts when it has come to its end, unless it had no batch at all.
        if any(whole) and (run.stop is None or run.stop > max(len(batches) - run.skip for batches in whole)):
            epoch += 1
    return passes


def duplicates(items: list[int]) -> list[int]:
    return [item for item, number in collections.Counter(items).items() if number > 1]
