# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""
Cases from the field: inputs on which plain Accelerate loses data, by their number.

Each runs on real ranks, beside plain Accelerate wherever that shows what is lost without this package.
"""

import functools
import itertools
import math

import accelerate
import accelerate.data_loader
import torch
from accelerate.utils import compare_versions
from parameterized import parameterized
from ranks import run
from shared import (
    CUT,
    Listening,
    ListeningList,
    RankBatches,
    Stream,
    dealt,
    flat,
    lists,
    needs_fsdp2,
    needs_parallelism_config,
    raised,
    stand_in_gpus,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

import accelerate_presharded


WORLD_SIZES = [(2,), (3,), (4,)]


def both(make_loader, ours: dict | None = None, **settings) -> tuple:
    """The loader that `make_loader` makes, prepared by this package and by plain Accelerate."""
    presharded = accelerate_presharded.Accelerator(
        cpu=True, dataloader_config=accelerate_presharded.DataLoaderConfiguration(**settings)
    )
    plain = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**settings))
    return presharded.prepare(make_loader(presharded), **(ours or {})), plain.prepare(make_loader(plain), **CUT)


def items_of(rank: int) -> list[int]:
    """Eight items that no other rank has."""
    return list(range(8 * rank, 8 * rank + 8))


def pairs_of(rank: int) -> list[list[int]]:
    return [items_of(rank)[start : start + 2] for start in range(0, 8, 2)]


# 1


def distributed_sampler(length: int) -> dict:
    def make_loader(accelerator):
        sampler = DistributedSampler(
            range(length), accelerator.num_processes, accelerator.process_index, shuffle=False
        )
        return DataLoader(range(length), batch_size=2, sampler=sampler)

    ours, plain = both(make_loader)
    return {
        "ours": lists(ours),
        "length": len(ours),
        "total_batch_size": ours.total_batch_size,
        "plain": lists(plain),
        "plain length": len(plain),
    }


@parameterized.expand(WORLD_SIZES)
def test_case_01_distributed_sampler(world_size):
    per_rank = run(world_size, distributed_sampler, 8 * world_size)
    assert [result["ours"] for result in per_rank] == [
        dealt(8 * world_size, world_size, rank) for rank in range(world_size)
    ]
    assert [result["length"] for result in per_rank] == [4] * world_size
    assert [result["total_batch_size"] for result in per_rank] == [2 * world_size] * world_size
    # Plain Accelerate cuts each rank's 4 batches once more.
    assert [result["plain length"] for result in per_rank] == [math.ceil(4 / world_size)] * world_size
    seen_by_plain = set(flat([result["plain"] for result in per_rank]))
    assert len(seen_by_plain) < 8 * world_size
    if world_size == 2:
        assert len(seen_by_plain) == 8


# 2


def unmarked_items() -> dict:
    def make_loader(accelerator):
        return DataLoader(items_of(accelerator.process_index), batch_size=2)

    ours, plain = both(make_loader, ours={"already_sharded": True})
    return {"ours": lists(ours), "plain": lists(plain)}


@parameterized.expand(WORLD_SIZES)
def test_case_02_items_without_a_mark(world_size):
    per_rank = run(world_size, unmarked_items)
    assert [result["ours"] for result in per_rank] == [pairs_of(rank) for rank in range(world_size)]
    seen_by_plain = set(flat([result["plain"] for result in per_rank]))
    assert len(seen_by_plain) < 8 * world_size
    if world_size == 2:
        assert len(seen_by_plain) == 8


# 3 and 4


def stream(dispatch_batches: bool | None) -> dict:
    def make_loader(accelerator):
        return DataLoader(Stream(items_of(accelerator.process_index)), batch_size=2)

    # Said where it does not collide with `dispatch_batches=None`, and the other way round.
    ours, plain = both(make_loader, ours={"already_sharded": True}, dispatch_batches=dispatch_batches)
    return {"ours": lists(ours), "plain": lists(plain)}


@parameterized.expand(WORLD_SIZES)
def test_case_03_stream_with_default_settings(world_size):
    per_rank = run(world_size, stream, None)
    assert [result["ours"] for result in per_rank] == [pairs_of(rank) for rank in range(world_size)]
    # Plain Accelerate reads rank 0's stream only.
    assert set(flat([result["plain"] for result in per_rank])) == set(items_of(0))


@parameterized.expand(WORLD_SIZES)
def test_case_04_stream_without_dispatching(world_size):
    per_rank = run(world_size, stream, False)
    assert [result["ours"] for result in per_rank] == [pairs_of(rank) for rank in range(world_size)]
    # Plain Accelerate reads 8 on each rank and keeps one batch of each `world_size`.
    assert [len(flat(result["plain"])) for result in per_rank] == [2 * math.ceil(4 / world_size)] * world_size


# 5


class DistributedConfig:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


class SplitIterableDataset(IterableDataset):
    """Stands in for datasets' `IterableDataset` after `split_dataset_by_node`: the same attribute, the same effect."""

    def __init__(self, items, rank, world_size):
        self._items, self._distributed = items, DistributedConfig(rank, world_size)

    def __iter__(self):
        return itertools.islice(self._items, self._distributed.rank, None, self._distributed.world_size)


def split_by_dataset(dispatch_batches: bool | None) -> dict:
    def make_loader(accelerator):
        world_size = accelerator.num_processes
        return DataLoader(
            SplitIterableDataset(range(8 * world_size), accelerator.process_index, world_size), batch_size=2
        )

    ours, plain = both(make_loader, dispatch_batches=dispatch_batches)
    return {"ours": lists(ours), "plain": lists(plain)}


@parameterized.expand(list(itertools.product((2, 3, 4), (None, False))))
def test_case_05_stream_that_knows_its_node(world_size, dispatch_batches):
    per_rank = run(world_size, split_by_dataset, dispatch_batches)
    assert [result["ours"] for result in per_rank] == [
        dealt(8 * world_size, world_size, rank) for rank in range(world_size)
    ]
    seen_by_plain = set(flat([result["plain"] for result in per_rank]))
    assert len(seen_by_plain) < 8 * world_size
    if world_size == 2:
        assert len(seen_by_plain) == 8


# 6


def split_by_node(source, group=None):
    rank, world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return itertools.islice(source, rank, None, world_size)


class Pipeline(IterableDataset):
    """Stands in for webdataset's `WebDataset`: a list of stages, the first a source, the others functions of it."""

    def __init__(self, shards, nodesplitter):
        self.pipeline = [lambda: iter(shards), nodesplitter, itertools.chain.from_iterable]

    def __iter__(self):
        source, *stages = self.pipeline
        items = source()
        for stage in stages:
            items = stage(items)
        return iter(items)


def split_by_pipeline(shards: list[list[int]]) -> dict:
    ours, plain = both(lambda accelerator: DataLoader(Pipeline(shards, split_by_node), batch_size=2))
    return {"ours": lists(ours), "plain": lists(plain)}


@parameterized.expand(WORLD_SIZES)
def test_case_06_pipeline_split_by_node(world_size):
    shards = [list(range(4 * shard, 4 * shard + 4)) for shard in range(2 * world_size)]
    per_rank = run(world_size, split_by_pipeline, shards)
    assert [flat(result["ours"]) for result in per_rank] == [
        shards[rank] + shards[rank + world_size] for rank in range(world_size)
    ]
    assert [len(result["ours"]) for result in per_rank] == [4] * world_size
    # Only rank 0's two shards, since it reads for all.
    assert set(flat([result["plain"] for result in per_rank])) == set(shards[0] + shards[world_size])


# 7


def without_batches(length: int) -> dict:
    def make_loader(accelerator):
        sampler = DistributedSampler(
            range(length), accelerator.num_processes, accelerator.process_index, shuffle=False
        )
        return DataLoader(range(length), batch_size=None, sampler=sampler)

    def iterate_plain():
        plain = accelerate.Accelerator(cpu=True)
        list(plain.prepare(make_loader(plain), **CUT))

    accelerator = accelerate_presharded.Accelerator(cpu=True)
    ours = accelerator.prepare(make_loader(accelerator))
    return {"ours": list(ours), "length": len(ours), "plain": raised(iterate_plain)}


@parameterized.expand(WORLD_SIZES)
def test_case_07_distributed_sampler_without_batches(world_size):
    per_rank = run(world_size, without_batches, 4 * world_size)
    assert [result["ours"] for result in per_rank] == [
        list(range(rank, 4 * world_size, world_size)) for rank in range(world_size)
    ]
    assert [result["length"] for result in per_rank] == [4] * world_size
    # Accelerate up to 1.13 refuses a loader without a batch size, and later ones fail when they come to its batches.
    error = "ValueError" if compare_versions("accelerate", "<", "1.14") else "TypeError"
    assert all(result["plain"][0] == error for result in per_rank)


# 8


class Multiplying(DataLoader):
    def __init__(self, *args, factor, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def __iter__(self):
        for batch in super().__iter__():
            yield self.factor * batch


def subclass(length: int) -> dict:
    def make_loader(accelerator):
        sampler = DistributedSampler(
            range(length), accelerator.num_processes, accelerator.process_index, shuffle=False
        )
        return Multiplying(range(length), batch_size=2, sampler=sampler, factor=1000)

    ours, plain = both(make_loader)
    return {
        "ours": lists(ours),
        "factor": ours.factor,
        "is one": isinstance(ours, Multiplying),
        "plain": lists(plain),
        "plain has factor": hasattr(plain, "factor"),
    }


@parameterized.expand(WORLD_SIZES)
def test_case_08_subclass_with_its_own_iter(world_size):
    per_rank = run(world_size, subclass, 4 * world_size)
    assert [flat(result["ours"]) for result in per_rank] == [
        [1000 * item for item in range(rank, 4 * world_size, world_size)] for rank in range(world_size)
    ]
    assert [result["factor"] for result in per_rank] == [1000] * world_size
    assert all(result["is one"] for result in per_rank)
    # Plain Accelerate calls DataLoader's own __iter__, and the attribute is gone.
    assert max(flat([result["plain"] for result in per_rank])) < 1000
    assert not any(result["plain has factor"] for result in per_rank)


# 9


def batches_of_any_size(batches: list[list[list[int]]], even_batches: bool) -> dict:
    def make_loader(accelerator):
        rank = accelerator.process_index
        sampler = RankBatches(batches[rank], accelerator.num_processes, rank)
        return DataLoader(range(6 * accelerator.num_processes), batch_sampler=sampler)

    settings = {"cpu": True, "dataloader_config": accelerate.DataLoaderConfiguration(even_batches=even_batches)}
    accelerator, plain = accelerate_presharded.Accelerator(**settings), accelerate.Accelerator(**settings)
    result = {"ours": lists(accelerator.prepare(make_loader(accelerator)))}
    result["error"] = raised(lambda: result.update(plain=lists(plain.prepare(make_loader(plain), **CUT))))
    return result


@parameterized.expand(list(itertools.product((2, 3, 4), (True, False))))
def test_case_09_batch_sampler_without_batch_size(world_size, even_batches):
    # For two ranks: [[0, 1, 2], [3], [4, 5]] and [[6], [7, 8], [9, 10, 11]].
    sizes = [[3, 1, 2], [1, 2, 3], [2, 3, 1], [2, 2, 2]][:world_size]
    items = iter(range(6 * world_size))
    batches = [[list(itertools.islice(items, size)) for size in of_rank] for of_rank in sizes]
    per_rank = run(world_size, batches_of_any_size, batches, even_batches)
    assert [result["ours"] for result in per_rank] == batches
    if any(result["error"] for result in per_rank):
        # Up to 1.13 such a sampler is refused unless `even_batches=False`, and 1.8 has a `None` for a rank without any.
        assert compare_versions("accelerate", "<", "1.14" if even_batches else "1.9")
        return
    plain = [result["plain"] for result in per_rank]
    assert len(set(flat(plain))) < 6 * world_size
    if world_size == 2:
        assert len(set(flat(plain))) == (8 if even_batches else 7)
        assert [len(of_rank) for of_rank in plain] == ([2, 2] if even_batches else [2, 1])


# 10


class Passing:
    """A sampler around another sampler, with no `set_epoch` and no number of its own."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


class PassingOn(Passing):
    """A sampler that passes the epoch on to the one that it wraps."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.heard = []

    def set_epoch(self, epoch):
        self.heard.append(int(epoch))
        self.sampler.set_epoch(epoch)


KINDS = ["sampler", "batch_sampler", "two deep", "three deep", "passing on"]
NUMBERS = [(7, 8, 9), (3, 3, 3), (0, 0, 0), (9, 0, 4), (1, 1, 2)]


def shuffled_loader(kind: str, numbered: bool, length: int, num_replicas: int, rank: int) -> tuple[DataLoader, dict]:
    """A loader that shuffles, and everyone in it who listens."""
    dataset = ListeningList(range(length), numbered)
    sampler = Listening(range(length), num_replicas, rank, seed=5)
    listeners = {"dataset": dataset, "sampler": sampler}
    if kind == "sampler":
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    elif kind == "batch_sampler":
        loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    elif kind == "two deep":
        loader = DataLoader(dataset, batch_sampler=Passing(BatchSampler(sampler, 2, drop_last=False)))
    elif kind == "three deep":
        loader = DataLoader(dataset, batch_sampler=Passing(BatchSampler(Passing(sampler), 2, drop_last=False)))
    else:
        assert kind == "passing on"
        listeners["outer"] = PassingOn(sampler)
        loader = DataLoader(dataset, batch_size=2, sampler=listeners["outer"])
    return loader, listeners


def in_epoch(epoch: int, length: int, num_replicas: int, rank: int) -> list[list[int]]:
    """What a bare DataLoader gives this rank in an epoch, in one process without Accelerate."""
    sampler = DistributedSampler(range(length), num_replicas, rank, seed=5)
    sampler.set_epoch(epoch)
    return lists(DataLoader(list(range(length)), batch_size=2, sampler=sampler))


def epochs(length: int) -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    place = (length, accelerator.num_processes, accelerator.process_index)
    results = {}

    def note(name, kind, before_epoch=None, before_prepare=None):
        """`before_epoch` and `before_prepare` name whom the user tells which numbers."""
        loader, listeners = shuffled_loader(kind, name == "dataset", *place)
        if before_prepare is not None:
            whom, number = before_prepare
            listeners[whom].set_epoch(number)
        prepared = accelerator.prepare(loader)
        seen = []
        for i in range(3):
            if before_epoch is not None:
                whom, numbers = before_epoch
                if i < len(numbers):
                    {"prepared": prepared, **listeners}[whom].set_epoch(numbers[i])
            seen.append(lists(prepared))
        results[name, kind] = seen, {name: listener.heard for name, listener in listeners.items()}

    for kind in KINDS:
        note("nothing said", kind)
        for numbers in NUMBERS:
            for whom in ("sampler", "prepared"):
                note((whom, *numbers), kind, before_epoch=(whom, numbers))
        note("5 before prepare", kind, before_prepare=("sampler", 5))
        note("7 before the first epoch", kind, before_epoch=("sampler", (7,)))
    note("dataset", "sampler", before_epoch=("dataset", (7, 8, 9)))

    plain = accelerate.Accelerator(cpu=True)
    loader, listeners = shuffled_loader("sampler", False, *place)
    prepared = plain.prepare(loader, **CUT)
    results["plain"] = []
    for epoch in (7, 8, 9):
        listeners["sampler"].set_epoch(epoch)
        lists(prepared)
        results["plain"].append(int(listeners["sampler"].epoch))
    return results


@functools.cache
def epochs_of(world_size: int) -> list[dict]:
    return run(world_size, epochs, 8 * world_size)


def news(numbers) -> list[int]:
    """A list without what only repeats the number before it."""
    return [number for number, _ in itertools.groupby(numbers)]


def assert_used(world_size: int, name, kind: str, used) -> list[dict[str, list[int]]]:
    """The order of the samples in each of the epochs is a bare DataLoader's. Returns who heard what, for each rank."""
    heard = []
    for rank, results in enumerate(epochs_of(world_size)):
        seen, of_rank = results[name, kind]
        assert seen == [in_epoch(epoch, 8 * world_size, world_size, rank) for epoch in used], (name, rank)
        heard.append(of_rank)
    return heard


class TestCase10:
    """The user's own `set_epoch` before three epochs, and what else may set one."""

    @parameterized.expand(list(itertools.product((2, 3, 4), KINDS)))
    def test_case_10_nothing_said(self, world_size, kind):
        for heard in assert_used(world_size, "nothing said", kind, used=[0, 1, 2]):
            assert set(map(tuple, heard.values())) == {(0, 1, 2)}

    @parameterized.expand(list(itertools.product((2, 3, 4), KINDS)))
    def test_case_10_said_to_the_sampler(self, world_size, kind):
        for numbers in NUMBERS:
            for heard in assert_used(world_size, ("sampler", *numbers), kind, used=numbers):
                assert news(heard["dataset"]) == news(numbers)
                assert len(heard["dataset"]) <= 3
                if kind == "passing on":
                    # It keeps no number, so it is told what the sampler below it has heard, and repeats it.
                    assert news(heard["outer"]) == news(numbers)
                    assert news(heard["sampler"]) == news(numbers)
                else:
                    assert heard["sampler"] == list(numbers)  # the user's own calls and no other

    @parameterized.expand(list(itertools.product((2, 3, 4), KINDS)))
    def test_case_10_said_to_the_prepared_loader(self, world_size, kind):
        for numbers in NUMBERS:
            for heard in assert_used(world_size, ("prepared", *numbers), kind, used=numbers):
                for listener, of_listener in heard.items():
                    assert news(of_listener) == news(numbers), listener
                    assert len(of_listener) <= 3, listener

    @parameterized.expand(list(itertools.product((2, 3, 4), KINDS)))
    def test_case_10_said_once(self, world_size, kind):
        for heard in assert_used(world_size, "5 before prepare", kind, used=[5, 6, 7]):
            assert heard["dataset"] == [5, 6, 7]
        for heard in assert_used(world_size, "7 before the first epoch", kind, used=[7, 8, 9]):
            assert heard["dataset"] == [7, 8, 9]

    @parameterized.expand(WORLD_SIZES)
    def test_case_10_said_to_the_dataset(self, world_size):
        for heard in assert_used(world_size, "dataset", "sampler", used=[7, 8, 9]):
            assert heard["sampler"] == [7, 8, 9]
            assert heard["dataset"] == [7, 8, 9]

    @parameterized.expand(WORLD_SIZES)
    def test_case_10_today(self, world_size):
        assert [results["plain"] for results in epochs_of(world_size)] == [[0, 1, 2]] * world_size


# 24


def one_ordinary_loader(length: int) -> dict:
    config = accelerate_presharded.DataLoaderConfiguration(already_sharded=True)
    by_config = accelerate_presharded.Accelerator(cpu=True, dataloader_config=config)
    detecting = accelerate_presharded.Accelerator(cpu=True)
    plain = accelerate.Accelerator(cpu=True)

    def training():
        sampler = DistributedSampler(range(length), plain.num_processes, plain.process_index, shuffle=False)
        return DataLoader(range(length), batch_size=2, sampler=sampler)

    def evaluation():
        return DataLoader(range(length), batch_size=2)

    return {
        "config": [lists(loader) for loader in by_config.prepare(training(), evaluation())],
        "list": [
            lists(loader) for loader in by_config.prepare(training(), evaluation(), already_sharded=[True, False])
        ],
        "detection": [lists(loader) for loader in detecting.prepare(training(), evaluation())],
        "plain": lists(plain.prepare(evaluation())),
    }


@parameterized.expand(WORLD_SIZES)
def test_case_24_one_ordinary_loader(world_size):
    length = 4 * world_size
    per_rank = run(world_size, one_ordinary_loader, length)
    for rank, result in enumerate(per_rank):
        mine = dealt(length, world_size, rank)
        # The configuration holds for every loader of which the call says nothing, also for one that it does not fit.
        assert result["config"] == [mine, [[item, item + 1] for item in range(0, length, 2)]]
        assert result["list"] == [mine, result["plain"]]
        assert result["detection"] == [mine, result["plain"]]
    assert sorted(flat([result["list"][1] for result in per_rank])) == list(range(length))
    assert len(flat([result["config"][1] for result in per_rank])) == length * world_size


# 25 and 26


# The dimensions of a mesh, and for each rank the size and the index that its data has to be cut for.
MESHES = {
    "tp": ({"dp_shard": 2, "tp": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    "cp": ({"dp_shard": 2, "cp": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    "tp replicated": ({"dp_replicate": 2, "tp": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    "hybrid": ({"dp_replicate": 2, "dp_shard": 2}, [(4, 0), (4, 1), (4, 2), (4, 3)]),
    "four shards": ({"dp_shard": 4}, [(4, 0), (4, 1), (4, 2), (4, 3)]),
    "three shards": ({"dp_shard": 3, "tp": 1}, [(3, 0), (3, 1), (3, 2)]),
    "two replicas": ({"dp_replicate": 2, "cp": 1}, [(2, 0), (2, 1)]),
    # As Accelerate called them before version 1.10.
    "dp and tp": ({"dp": 2, "tp": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    "fsdp and tp": ({"fsdp": 2, "tp": 2}, [(2, 0), (2, 0), (2, 1), (2, 1)]),
    "dp and fsdp": ({"dp": 2, "fsdp": 2}, [(4, 0), (4, 1), (4, 2), (4, 3)]),
}


def cut_for_mesh(length: int, dimensions: dict, places: list, through: str) -> dict:
    """On a mesh, prepare a loader that is cut for the place that `places` gives to this rank."""
    accelerate.PartialState(cpu=True)
    size, index = places[torch.distributed.get_rank()]

    def make_loader():
        sampler = DistributedSampler(range(length), size, index, shuffle=False)
        return DataLoader(range(length), batch_size=2, sampler=sampler)

    result = {}

    def note(loader) -> None:
        result.update(ours=lists(loader), place=(loader.num_processes, loader.process_index))

    if through == "accelerator":
        with stand_in_gpus(dimensions, fsdp="tp" not in dimensions) as settings:
            accelerator = accelerate_presharded.Accelerator(**settings)
            result["error"] = raised(lambda: note(accelerator.prepare(make_loader())))
        return result
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    result["error"] = raised(
        lambda: note(accelerate_presharded.prepare_data_loader(make_loader(), torch_device_mesh=mesh))
    )
    # The way of every proposal to date: ask for one process. It is computed again from the mesh.
    naive = accelerate.data_loader.prepare_data_loader(
        make_loader(), num_processes=1, process_index=0, dispatch_batches=False, torch_device_mesh=mesh, **CUT
    )
    result["naive"] = lists(naive)
    return result


@parameterized.expand(
    [(name, "function") for name in MESHES] + [(name, "accelerator") for name in ("tp", "cp", "hybrid", "four shards")]
)
def test_case_25_mesh_and_data_cut_for_it(name, through):
    if through == "accelerator":
        needs_parallelism_config()
        needs_fsdp2()
    dimensions, places = MESHES[name]
    size = places[0][0]
    length = 8 * size
    per_rank = run(len(places), cut_for_mesh, length, dimensions, places, through)
    for result, (size, index) in zip(per_rank, places):
        assert result["error"] is None
        assert result["ours"] == dealt(length, size, index)
        assert result["place"] == (size, index)
    # An Accelerate that does not know these names takes the mesh for one rank.
    is_older = not hasattr(accelerate.utils, "ParallelismConfig")
    if through == "function" and is_older == bool({"dp", "fsdp"} & dimensions.keys()):
        assert set(flat([result["naive"] for result in per_rank])) < set(range(length))


@parameterized.expand(
    # Through an accelerator not for "tp replicated", which Accelerate refuses.
    [
        ("tp", "function"),
        ("cp", "function"),
        ("tp replicated", "function"),
        ("tp", "accelerator"),
        ("cp", "accelerator"),
    ]
)
def test_case_26_mesh_and_data_cut_for_every_rank(name, through):
    if through == "accelerator":
        needs_parallelism_config()
        needs_fsdp2()
    dimensions, places = MESHES[name]
    per_rank = run(4, cut_for_mesh, 16, dimensions, [(4, rank) for rank in range(4)], through)
    for rank, (result, (size, index)) in enumerate(zip(per_rank, places)):
        kind, message = result["error"]
        assert kind == "ValueError"
        assert f"size 4 and index {rank}" in message
        assert f"size {size} and index {index}" in message
        assert "already_sharded=True" in message and "already_sharded=False" in message


# 27


def prepared_by_a_function_before(length: int, explicit: bool) -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    plain = accelerate.Accelerator(cpu=True)

    def make_loader():
        if explicit:
            return DataLoader(list(range(length))[accelerator.process_index :: accelerator.num_processes], 2)
        sampler = DistributedSampler(
            range(length), accelerator.num_processes, accelerator.process_index, shuffle=False
        )
        return DataLoader(range(length), batch_size=2, sampler=sampler)

    flag = True if explicit else None
    first = accelerate_presharded.prepare_data_loader(make_loader(), already_sharded=flag)
    second = accelerator.prepare(first)
    by_accelerate = accelerate.data_loader.prepare_data_loader(DataLoader(range(length), batch_size=2))
    again = accelerate_presharded.prepare_data_loader(by_accelerate)
    third = accelerator.prepare(by_accelerate)
    whole = accelerate.data_loader.prepare_data_loader(DataLoader(range(length), batch_size=2))
    return {
        "ours": lists(second),
        "same": second is first and accelerator.prepare(second) is first,
        "accelerate's": lists(third),
        "accelerate's same": again is by_accelerate and third is by_accelerate,
        "known": [loader is expected for loader, expected in zip(accelerator._dataloaders, (first, third))],
        "number": len(accelerator._dataloaders),
        "plain": lists(plain.prepare(whole, **CUT)),
    }


@parameterized.expand(list(itertools.product((2, 3, 4), (True, False))))
def test_case_27_prepared_by_a_function_before(world_size, explicit):
    length = 4 * world_size
    per_rank = run(world_size, prepared_by_a_function_before, length, explicit)
    assert [result["ours"] for result in per_rank] == [dealt(length, world_size, rank) for rank in range(world_size)]
    assert all(result["same"] and result["accelerate's same"] for result in per_rank)
    assert [result["known"] for result in per_rank] == [[True, True]] * world_size
    assert [result["number"] for result in per_rank] == [2] * world_size
    assert sorted(flat([result["accelerate's"] for result in per_rank])) == list(range(length))
    # Plain Accelerate cuts again what its own function has cut.
    assert set(flat([result["plain"] for result in per_rank])) < set(range(length))
