# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What a loader says about itself. One process; the numbers come from the objects that the tests build."""

import dataclasses
import functools
import random
import re
import time
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, create_autospec

import numpy as np
import pytest
import standins
import torch
import torch.distributed as dist
from accelerate.data_loader import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import AcceleratorState, GradientState, PartialState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate_presharded.sharding import Sharding, find_sharding, is_already_sharded, register_sharding


DATA = range(16)

PAIR_NAMES = [
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
    ("data_parallel_size", "data_parallel_rank"),
    ("dp_world_size", "dp_rank"),
    ("dp_size", "rank"),
]

CONFIG_NAMES = [
    ("_distributed", "world_size", "rank"),
    ("distributed_env", "world_size", "global_rank"),
    ("worker_config", "world_size", "rank"),
    ("_parallel_rank_world", "num_ranks", "rank"),
    ("reader", "dist_num_replicas", "dist_rank"),
]

# Generous, since it is only there to tell "at once" from "never ends" on a busy machine.
AT_ONCE = 10.0


class Bag(standins.LookOnly):
    """An object with the attributes it is given: a sampler, a batch sampler, a loader that is not torch's, ..."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Sampler(standins.LookOnlySampler):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class MapStyle(standins.LookOnlyDataset):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Stream(standins.LookOnlyStream):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def label(value):
    """A test's name for a value, the same in every process: without addresses."""
    return re.sub(r" (at 0x\w+|id='\d+')", "", repr(value))


@pytest.fixture(autouse=True)
def nothing_of_the_users_is_called(monkeypatch):
    # The launcher's variables would answer for a WebDataset.
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    standins.CALLED.clear()
    yield
    assert standins.CALLED == []


@pytest.fixture
def fake_group():
    """A process group without other processes: rank 2 of 4. It communicates with nobody and is never asked to."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def accelerate_state():
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def distributed(num_replicas=2, rank=1, **kwargs):
    return DistributedSampler(DATA, num_replicas=num_replicas, rank=rank, **kwargs)


def with_sampler(sampler):
    return DataLoader(DATA, sampler=sampler, batch_size=2)


def with_batch_sampler(batch_sampler):
    return DataLoader(DATA, batch_sampler=batch_sampler)


def pair(loader):
    """Size and index, or `None`."""
    sharding = find_sharding(loader)
    assert sharding is None or isinstance(sharding, Sharding)
    return None if sharding is None else (sharding.num_shards, sharding.index)


def assert_not_sharded(loader):
    """Whatever number of processes asks, and from whichever of them. A size of 1 may be reported or passed over."""
    assert pair(loader) in (None, (1, 0))
    for num_processes in (2, 3, 4):
        for process_index in range(num_processes):
            assert is_already_sharded(loader, num_processes, process_index) is False


def source_of(loader):
    """
    The object that `source` points to, read by walking the path it gives, after a check that the class it names is
    the class of that object.
    """
    source = find_sharding(loader).source
    found = re.search(r"(\w+) (?:at|in|on) (loader(?:\.\w+|\[\d+\])*)", source)
    assert found, source
    obj = eval(found[2], {"loader": loader})
    assert found[1] in (type(obj).__name__, "split_by_node"), source
    return obj


# The dataclass


def test_sharding_is_a_frozen_record():
    sharding = Sharding(2, 1, "DistributedSampler at loader.sampler")
    assert (sharding.num_shards, sharding.index) == (2, 1)
    assert sharding.source == "DistributedSampler at loader.sampler"
    assert sharding.num_padding is None
    assert sharding == Sharding(num_shards=2, index=1, source=sharding.source, num_padding=None)
    assert Sharding(2, 1, "x", num_padding=3).num_padding == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        sharding.index = 0


# The table of libraries: each row builds a loader for a size and an index


def hf_iterable(size, index):
    return standins.HFIterableDataset(standins.DistributedConfig(rank=index, world_size=size))


def energon_chain(size, index):
    config = standins.WorkerConfig(rank=index, world_size=size)
    return standins.SavableDatasetWrapper(config, standins.SavableDatasetWrapper(config))


LIBRARIES = {
    "torch DistributedSampler": lambda n, r: with_sampler(distributed(n, r)),
    "torch DistributedSampler, drop_last": lambda n, r: with_sampler(distributed(n, r, drop_last=True)),
    "torch DistributedSampler, batch_size=None": lambda n, r: DataLoader(
        DATA, sampler=distributed(n, r), batch_size=None
    ),
    "torch BatchSampler over DistributedSampler": lambda n, r: with_batch_sampler(
        BatchSampler(distributed(n, r), batch_size=2, drop_last=False)
    ),
    "torchdata StatefulDistributedSampler": lambda n, r: with_sampler(standins.StatefulDistributedSampler(DATA, n, r)),
    "transformers DistributedSamplerWithLoop": lambda n, r: with_sampler(
        standins.DistributedSamplerWithLoop(DATA, 2, n, r)
    ),
    "transformers DistributedLengthGroupedSampler": lambda n, r: with_sampler(
        standins.DistributedLengthGroupedSampler([3, 1, 2], 2, n, r)
    ),
    "transformers ShardSampler": lambda n, r: with_sampler(standins.ShardSampler(DATA, 2, n, r)),
    "transformers IterableDatasetShard": lambda n, r: DataLoader(
        standins.TransformersIterableDatasetShard(Stream(), 2, n, r), batch_size=2
    ),
    "transformers BatchRebalanceSampler": lambda n, r: with_batch_sampler(
        standins.BatchRebalanceSampler([3, 1, 2], dp_size=n, rank=r)
    ),
    "accelerate BatchSamplerShard": lambda n, r: with_batch_sampler(
        BatchSamplerShard(BatchSampler(SequentialSampler(DATA), 2, False), num_processes=n, process_index=r)
    ),
    "accelerate IterableDatasetShard": lambda n, r: DataLoader(
        IterableDatasetShard(Stream(), batch_size=2, num_processes=n, process_index=r), batch_size=2
    ),
    "accelerate SkipBatchSampler over DistributedSampler": lambda n, r: with_batch_sampler(
        SkipBatchSampler(BatchSampler(distributed(n, r), 2, False), skip_batches=1)
    ),
    "datasets split_dataset_by_node": lambda n, r: DataLoader(hf_iterable(n, r), batch_size=2),
    "mosaicml-streaming StreamingDataset": lambda n, r: DataLoader(
        standins.MosaicStreamingDataset(n, r), batch_size=2
    ),
    "litdata StreamingDataset": lambda n, r: DataLoader(standins.LitStreamingDataset(n, r), batch_size=2),
    "litdata CombinedStreamingDataset": lambda n, r: DataLoader(
        standins.CombinedStreamingDataset([standins.LitStreamingDataset(n, r) for _ in range(2)]), batch_size=2
    ),
    "energon": lambda n, r: DataLoader(energon_chain(n, r), batch_size=None),
    "timm OrderedDistributedSampler": lambda n, r: with_sampler(standins.OrderedDistributedSampler(DATA, n, r)),
    "timm RepeatAugSampler": lambda n, r: with_sampler(standins.RepeatAugSampler(DATA, n, r)),
    "timm IterableImageDataset": lambda n, r: DataLoader(
        standins.IterableImageDataset(standins.ReaderTfds(n, r)), batch_size=2
    ),
    "lhotse SimpleCutSampler": lambda n, r: DataLoader(DATA, sampler=standins.SimpleCutSampler(n, r), batch_size=None),
    "lhotse DynamicBucketingSampler": lambda n, r: DataLoader(
        DATA, sampler=standins.DynamicBucketingSampler(n, r), batch_size=None
    ),
    "detectron2 TrainingSampler": lambda n, r: with_sampler(standins.TrainingSampler(16, n, r)),
    "detectron2 InferenceSampler": lambda n, r: with_batch_sampler(
        BatchSampler(standins.InferenceSampler(16, n, r), 2, drop_last=False)
    ),
    "NeMo Megatron batch sampler": lambda n, r: with_batch_sampler(
        standins.MegatronPretrainingBatchSampler(16, data_parallel_size=n, data_parallel_rank=r)
    ),
}

# The class that is to be named as the evidence, where it is another than the one in the row's name.
EVIDENCE = {
    "torch BatchSampler over DistributedSampler": "DistributedSampler",
    "transformers IterableDatasetShard": "TransformersIterableDatasetShard",
    "accelerate SkipBatchSampler over DistributedSampler": "DistributedSampler",
    "datasets split_dataset_by_node": "HFIterableDataset",
    "mosaicml-streaming StreamingDataset": "MosaicStreamingDataset",
    "litdata StreamingDataset": "LitStreamingDataset",
    "litdata CombinedStreamingDataset": "LitStreamingDataset",
    "energon": "SavableDatasetWrapper",
    "NeMo Megatron batch sampler": "MegatronPretrainingBatchSampler",
}

each_library = pytest.mark.parametrize("library", LIBRARIES)


@each_library
@pytest.mark.parametrize(("size", "index"), [(2, 0), (2, 1), (4, 3), (5, 2)])
def test_library_is_recognised(library, size, index, monkeypatch):
    # Variables of another launch, which none of these libraries is asked about here.
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "6")
    loader = LIBRARIES[library](size, index)
    assert pair(loader) == (size, index)
    assert is_already_sharded(loader, num_processes=size, process_index=index) is True


@each_library
def test_library_sharded_for_others_is_refused(library):
    loader = LIBRARIES[library](4, 3)
    for num_processes, process_index in [(4, 2), (2, 1), (8, 3), (3, 0)]:
        with pytest.raises(ValueError):
            is_already_sharded(loader, num_processes, process_index)


@each_library
def test_library_with_a_single_shard_is_not_sharded(library):
    assert_not_sharded(LIBRARIES[library](1, 0))


@each_library
def test_library_is_named_as_the_source(library):
    loader = LIBRARIES[library](4, 3)
    named = EVIDENCE.get(library, library.replace(",", "").split()[1] if " " in library else library)
    assert type(source_of(loader)).__name__ == named


# What only looks like one


def prepared(dataset, **kwargs):
    return prepare_data_loader(DataLoader(dataset, batch_size=2, **kwargs), num_processes=1, put_on_device=False)


LOOKALIKES = {
    "DistributedSampler with one replica": lambda: with_sampler(distributed(1, 0)),
    "plain": lambda: DataLoader(DATA, batch_size=2),
    "shuffled": lambda: DataLoader(DATA, batch_size=2, shuffle=True),
    "batch_size=None": lambda: DataLoader(DATA, batch_size=None),
    "plain stream": lambda: DataLoader(Stream(), batch_size=2),
    "list": lambda: DataLoader([1, 2, 3]),
    "num_shards of a map-style dataset": lambda: DataLoader(MapStyle(num_shards=2, index=1, rank=1)),
    "num_shards of a stream": lambda: DataLoader(Stream(num_shards=2)),
    "num_shards, index and rank of a stream": lambda: DataLoader(Stream(num_shards=2, index=1, rank=1)),
    "n_shards of a stream": lambda: DataLoader(Stream(n_shards=2, rank=1)),
    "nshards of a stream": lambda: DataLoader(Stream(nshards=2, rank=1)),
    "num_shards of a sampler": lambda: with_sampler(Sampler(num_shards=2, index=1, rank=1)),
    "n_shards of a batch sampler": lambda: with_batch_sampler(Bag(n_shards=2, rank=1)),
    "rank and world_size of a map-style dataset": lambda: DataLoader(MapStyle(world_size=2, rank=1)),
    "rank and num_replicas of a map-style dataset": lambda: DataLoader(MapStyle(num_replicas=2, rank=1)),
    "process_index of a map-style dataset": lambda: DataLoader(MapStyle(num_processes=2, process_index=1)),
    "map-style dataset with a pair, in a Subset": lambda: DataLoader(Subset(MapStyle(world_size=2, rank=1), [0, 1])),
    "map-style dataset with a pair, in a stream": lambda: DataLoader(
        Stream(dataset=MapStyle(world_size=2, rank=1)), batch_size=2
    ),
    "map-style dataset with a pair, under a sampler": lambda: DataLoader(
        MapStyle(world_size=2, rank=1), sampler=Sampler(data_source=MapStyle(world_size=2, rank=1))
    ),
    "ConcatDataset": lambda: DataLoader(ConcatDataset([[1, 2], [3]])),
    "ChainDataset": lambda: DataLoader(ChainDataset([Stream(), Stream()])),
    "Subset": lambda: DataLoader(Subset(DATA, [1, 3, 5])),
    "batch sampler with world_size and no rank": lambda: with_batch_sampler(Bag(world_size=2)),
    "sampler with rank and no world_size": lambda: with_sampler(Sampler(rank=1)),
    "size of one pair, rank of another": lambda: with_sampler(Sampler(num_replicas=2, process_index=1)),
    "size of dp_size, rank of dp_world_size": lambda: with_sampler(Sampler(dp_size=2, dp_rank=1)),
    "size on the batch sampler, rank on its sampler": lambda: with_batch_sampler(
        Bag(world_size=2, sampler=Sampler(rank=1))
    ),
    "local rank": lambda: with_sampler(Sampler(local_world_size=2, local_rank=1)),
    "two underscores": lambda: with_sampler(Bag(__world_size=2, __rank=1)),
    "LengthGroupedSampler": lambda: with_sampler(standins.LengthGroupedSampler([3, 1, 2], 2)),
    "WeightedRandomSampler": lambda: with_sampler(WeightedRandomSampler([1.0, 2.0], num_samples=2)),
    "SubsetRandomSampler": lambda: with_sampler(SubsetRandomSampler([0, 2])),
    "RandomSampler": lambda: with_sampler(RandomSampler(DATA, num_samples=2)),
    "SequentialSampler": lambda: with_sampler(SequentialSampler(DATA)),
    "SeedableRandomSampler": lambda: with_sampler(SeedableRandomSampler(DATA, data_seed=1)),
    "BatchSampler": lambda: with_batch_sampler(BatchSampler(RandomSampler(DATA), 2, False)),
    "SkipBatchSampler": lambda: with_batch_sampler(SkipBatchSampler(BatchSampler(RandomSampler(DATA), 2, False), 1)),
    "datasets iterable, not split": lambda: DataLoader(standins.HFIterableDataset(), batch_size=2),
    "datasets map-style, split or not": lambda: DataLoader(standins.HFDataset(), batch_size=2),
    "webdataset without split_by_node": lambda: DataLoader(standins.WebDataset(["a.tar"]), batch_size=None),
    "energon without a config": lambda: DataLoader(standins.SavableDatasetWrapper(None), batch_size=None),
    "timm reader of a map-style dataset": lambda: DataLoader(MapStyle(reader=Bag(samples=[]))),
}


@pytest.mark.parametrize("lookalike", LOOKALIKES)
def test_lookalike_is_not_sharded(lookalike, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert_not_sharded(LOOKALIKES[lookalike]())


@pytest.mark.parametrize(
    "loader",
    [None, 3, "loader", [], [1, 2], {}, {"sampler": 1}, object(), range(3), np.arange(3), torch.arange(3), DataLoader],
    ids=label,
)
def test_anything_iterable_or_not_is_a_loader_that_says_nothing(loader):
    assert find_sharding(loader) is None
    assert is_already_sharded(loader, 2, 1) is False


def test_generator_is_not_consumed():
    generator = (batch for batch in [1, 2, 3])
    assert find_sharding(generator) is None
    assert list(generator) == [1, 2, 3]


def test_loader_without_torch_attributes_may_hold_the_pair_itself():
    assert pair(Bag(world_size=2, rank=1)) == (2, 1)
    assert pair(Bag(_num_replicas=3, _rank=0)) == (3, 0)
    assert source_of(Bag(world_size=2, rank=1)).__class__ is Bag


# Loaders that accelerate has prepared


def test_loader_prepared_by_accelerate(accelerate_state):
    loader = prepare_data_loader(DataLoader(DATA, batch_size=2), num_processes=4, process_index=3, put_on_device=False)
    assert pair(loader) == (4, 3)
    assert type(source_of(loader)) is BatchSamplerShard
    assert is_already_sharded(loader, 4, 3) is True


def test_shuffled_loader_prepared_by_accelerate(accelerate_state):
    loader = prepare_data_loader(
        DataLoader(DATA, batch_size=2, shuffle=True),
        num_processes=2,
        process_index=0,
        put_on_device=False,
        use_seedable_sampler=True,
    )
    assert pair(loader) == (2, 0)


def test_stream_prepared_by_accelerate(accelerate_state):
    loader = prepare_data_loader(
        DataLoader(Stream(), batch_size=2),
        num_processes=2,
        process_index=1,
        put_on_device=False,
        dispatch_batches=False,
    )
    assert pair(loader) == (2, 1)
    assert type(source_of(loader)) is IterableDatasetShard


def test_presharded_loader_that_accelerate_left_alone(accelerate_state):
    loader = prepare_data_loader(with_sampler(distributed(2, 1)), num_processes=1, put_on_device=False)
    assert pair(loader) == (2, 1)
    assert type(source_of(loader)) is DistributedSampler
    assert pair(skip_first_batches(loader, 1)) == (2, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_prepared_by_accelerate_on_one_process_is_not_sharded(shuffle, accelerate_state):
    assert_not_sharded(prepared(DATA, shuffle=shuffle))


# Rule 1: is_sharded


def placed(declaration):
    """The four places of the declaration, each in a loader that says nothing else."""
    loader = DataLoader(DATA)
    loader.is_sharded = declaration
    return {
        "loader": loader,
        "sampler": with_sampler(Sampler(is_sharded=declaration)),
        "batch_sampler": with_batch_sampler(Bag(is_sharded=declaration)),
        "dataset": DataLoader(MapStyle(is_sharded=declaration), sampler=SequentialSampler(DATA)),
        "stream": DataLoader(Stream(is_sharded=declaration)),
        "foreign loader": Bag(is_sharded=declaration),
        "dataset of a foreign loader": Bag(dataset=Bag(is_sharded=declaration)),
    }


each_place = pytest.mark.parametrize("place", placed(True))


@each_place
def test_declared_sharded(place):
    loader = placed(True)[place]
    assert pair(loader) == (None, None)
    assert "is_sharded" in find_sharding(loader).source
    assert source_of(loader).is_sharded is True
    for num_processes, process_index in [(2, 0), (2, 1), (7, 3)]:
        assert is_already_sharded(loader, num_processes, process_index) is True
    assert is_already_sharded(loader, 1, 0) is False


def test_declared_not_sharded_wins_over_everything():
    sampler = distributed(2, 1)
    sampler.is_sharded = False
    stream = hf_iterable(2, 1)
    stream.is_sharded = False
    loader = with_sampler(distributed(2, 1))
    loader.is_sharded = False
    batch_sampler = BatchSampler(distributed(2, 1), 2, False)
    batch_sampler.is_sharded = False
    dataset = MapStyle(is_sharded=False)

    for not_sharded in (
        with_sampler(sampler),
        DataLoader(stream),
        loader,
        with_batch_sampler(batch_sampler),
        DataLoader(dataset, sampler=distributed(2, 1)),
    ):
        assert find_sharding(not_sharded) is None
        assert is_already_sharded(not_sharded, 2, 1) is False
        assert is_already_sharded(not_sharded, 3, 0) is False


def test_declared_sharded_wins_over_numbers_that_do_not_fit():
    loader = DataLoader(MapStyle(is_sharded=True), sampler=distributed(4, 3))
    assert pair(loader) == (None, None)
    assert is_already_sharded(loader, 2, 0) is True


@each_place
@pytest.mark.parametrize("declaration", [None, 1, 0, "yes", "", [], Mock(), MagicMock(), lambda: True], ids=label)
def test_declaration_that_is_no_bool_says_nothing(place, declaration):
    assert find_sharding(placed(declaration)[place]) is None


@pytest.mark.parametrize("declaration", [None, 0, 1, Mock(), lambda: False], ids=label)
def test_rules_go_on_after_a_declaration_that_is_no_bool(declaration):
    sampler = distributed(2, 1)
    sampler.is_sharded = declaration
    assert pair(with_sampler(sampler)) == (2, 1)


def test_method_named_is_sharded_is_not_called():
    class Ask(Stream):
        def is_sharded(self):
            standins.refuse(self, "is_sharded")

    assert find_sharding(DataLoader(Ask())) is None
    assert pair(DataLoader(Ask(world_size=2, rank=1))) == (2, 1)


@pytest.mark.parametrize("declared", [True, False])
def test_property_and_class_attribute_named_is_sharded_count(declared):
    class Property(Stream):
        @property
        def is_sharded(self):
            return declared

    class Attribute(Stream):
        is_sharded = declared

    expected = (None, None) if declared else None
    for cls in (Property, Attribute):
        assert pair(DataLoader(cls(world_size=2, rank=1))) == expected


# Rule 2: register_sharding. Every test registers classes of its own.


@pytest.fixture
def nodes():
    class Nodes(standins.LookOnly):
        def __init__(self, num_nodes=2, node=1, **attributes):
            self.num_nodes, self.node = num_nodes, node
            self.__dict__.update(attributes)

    return Nodes


def read_nodes(obj):
    return obj.num_nodes, obj.node


def test_unregistered_class_says_nothing(nodes):
    assert find_sharding(with_batch_sampler(nodes())) is None


def test_registered_tuple(nodes):
    assert find_sharding(with_batch_sampler(nodes(4, 3))) is None
    register_sharding(nodes, read_nodes)
    loader = with_batch_sampler(nodes(4, 3))
    assert pair(loader) == (4, 3)
    assert type(source_of(loader)) is nodes
    assert is_already_sharded(loader, 4, 3) is True
    with pytest.raises(ValueError):
        is_already_sharded(loader, 4, 2)


def test_registered_sharding_is_returned_as_it_is(nodes):
    sharding = Sharding(4, 3, "the cluster's own plan", num_padding=5)
    register_sharding(nodes, lambda obj: sharding)
    assert find_sharding(with_batch_sampler(nodes())) == sharding


def test_registered_sharding_without_numbers(nodes):
    register_sharding(nodes, lambda obj: Sharding(None, None, "sharded by hand"))
    loader = with_batch_sampler(nodes(num_replicas=4, rank=3))
    assert pair(loader) == (None, None)
    assert is_already_sharded(loader, 2, 0) is True


def test_registered_none_leaves_it_to_the_later_rules(nodes):
    asked = []
    register_sharding(nodes, asked.append)
    sampler = nodes()
    assert find_sharding(with_batch_sampler(sampler)) is None
    assert asked and all(obj is sampler for obj in asked)
    assert pair(with_batch_sampler(nodes(num_replicas=2, rank=1))) == (2, 1)
    assert pair(Bag(sampler=nodes(), dataset=hf_iterable(2, 1))) == (2, 1)


def test_register_as_a_decorator(nodes):
    @register_sharding(nodes)
    def read(obj):
        return obj.num_nodes, obj.node

    assert read(nodes(3, 2)) == (3, 2)
    assert pair(with_batch_sampler(nodes(3, 2))) == (3, 2)


def test_register_gives_back_the_function(nodes):
    assert register_sharding(nodes, read_nodes) is read_nodes


def test_subclasses_inherit_what_is_registered(nodes):
    class Child(nodes):
        pass

    class Grandchild(Child):
        pass

    register_sharding(nodes, read_nodes)
    assert pair(with_batch_sampler(Grandchild(4, 3))) == (4, 3)


def test_parents_do_not_inherit_what_is_registered(nodes):
    class Child(nodes):
        pass

    register_sharding(Child, read_nodes)
    assert find_sharding(with_batch_sampler(nodes(4, 3))) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nearest_registered_class_wins(order):
    class Base(standins.LookOnly):
        pass

    class Left(Base):
        pass

    class Right(Base):
        pass

    class Both(Left, Right):
        pass

    class OnlyRight(Right):
        pass

    answers = [(Base, (9, 1)), (Left, (9, 2)), (Right, (9, 3))]
    for i in order:
        register_sharding(answers[i][0], lambda obj, answer=answers[i][1]: answer)
    assert pair(with_batch_sampler(Both())) == (9, 2)
    assert pair(with_batch_sampler(OnlyRight())) == (9, 3)
    assert pair(with_batch_sampler(Base())) == (9, 1)


def test_registered_for_each_place(nodes):
    class NodesSampler(nodes, torch.utils.data.Sampler):
        pass

    class NodesDataset(nodes, Dataset):
        pass

    class NodesStream(nodes, IterableDataset):
        pass

    class NodesLoader(DataLoader):
        num_nodes, node = 2, 1

    class Config:
        num_nodes, node = 2, 1

    for cls in (nodes, NodesLoader, Config):
        register_sharding(cls, read_nodes)

    for loader, cls in [
        (NodesLoader(DATA), NodesLoader),
        (nodes(), nodes),
        (with_sampler(NodesSampler()), NodesSampler),
        (DataLoader(DATA, sampler=NodesSampler(), batch_size=None), NodesSampler),
        (with_batch_sampler(nodes()), nodes),
        (with_batch_sampler(BatchSampler(NodesSampler(), 2, False)), NodesSampler),
        (with_batch_sampler(Bag(base_sampler=Bag(samplers=[Bag(), nodes()]))), nodes),
        (DataLoader(NodesDataset(), sampler=SequentialSampler(DATA)), NodesDataset),
        (DataLoader(NodesStream()), NodesStream),
        (DataLoader(Subset(NodesDataset(), [0])), NodesDataset),
        (DataLoader(Stream(_data=Bag(_datasets=[Bag(), Bag(_dataset=NodesStream())]))), NodesStream),
    ]:
        assert pair(loader) == (2, 1)
        assert type(source_of(loader)) is cls


def test_registered_is_asked_before_the_guesses(nodes):
    register_sharding(nodes, read_nodes)
    # On the object itself, and on another nearer to the loader.
    assert pair(with_batch_sampler(nodes(4, 3, num_replicas=2, rank=1))) == (4, 3)
    assert pair(with_batch_sampler(Bag(num_replicas=2, rank=1, sampler=nodes(4, 3)))) == (4, 3)
    assert pair(Bag(sampler=distributed(2, 1), dataset=nodes(4, 3))) == (4, 3)
    assert pair(Bag(dataset=nodes(4, 3, _distributed=standins.DistributedConfig(1, 2)))) == (4, 3)
    assert pair(Bag(dataset=nodes(4, 3, pipeline=[standins.split_by_node]))) == (4, 3)


def test_registered_for_a_class_of_torch_samplers():
    class Odd(DistributedSampler):
        """Its ranks come in pairs that read the same shard."""

    register_sharding(Odd, lambda sampler: (sampler.num_replicas // 2, sampler.rank // 2))
    loader = with_sampler(Odd(DATA, num_replicas=8, rank=5))
    assert pair(loader) == (4, 2)
    assert is_already_sharded(loader, 4, 2) is True
    assert pair(with_sampler(distributed(8, 5))) == (8, 5)


def test_registered_single_shard_is_the_authors_word():
    class Replicated(DistributedSampler):
        """Keeps the pair of its base class, but every rank reads everything."""

    register_sharding(Replicated, lambda sampler: (1, 0))
    assert_not_sharded(with_sampler(Replicated(DATA, num_replicas=2, rank=1)))


def test_declaration_goes_before_what_is_registered(nodes):
    register_sharding(nodes, read_nodes)
    assert find_sharding(with_batch_sampler(nodes(4, 3, is_sharded=False))) is None
    assert pair(with_batch_sampler(nodes(4, 3, is_sharded=True))) == (None, None)


# Rule 3: a pair on the sampler side

WRAPPERS = ("sampler", "batch_sampler", "_sampler", "base_sampler")


@pytest.mark.parametrize("names", PAIR_NAMES, ids="/".join)
@pytest.mark.parametrize("size_prefix", ["", "_"])
@pytest.mark.parametrize("rank_prefix", ["", "_"])
def test_pair_on_a_sampler(names, size_prefix, rank_prefix):
    attributes = {size_prefix + names[0]: 3, rank_prefix + names[1]: 2}
    assert pair(with_sampler(Sampler(**attributes))) == (3, 2)
    assert pair(DataLoader(DATA, sampler=Sampler(**attributes), batch_size=None)) == (3, 2)
    assert pair(with_batch_sampler(Bag(**attributes))) == (3, 2)
    assert pair(Bag(**attributes)) == (3, 2)


@pytest.mark.parametrize("names", PAIR_NAMES, ids="/".join)
def test_half_a_pair_says_nothing(names):
    assert find_sharding(with_sampler(Sampler(**{names[0]: 3}))) is None
    assert find_sharding(with_sampler(Sampler(**{names[1]: 2}))) is None


@pytest.mark.parametrize("names", PAIR_NAMES, ids="/".join)
def test_class_attributes_and_properties_are_read(names):
    attributes = type("Attributes", (Bag,), {names[0]: 3, names[1]: 2})
    properties = type("Properties", (Bag,), {names[0]: property(lambda _: 3), names[1]: property(lambda _: 2)})
    slots = type("Slots", (), {"__slots__": names})()
    setattr(slots, names[0], 3)
    setattr(slots, names[1], 2)
    for obj in (attributes(), properties(), slots):
        assert pair(with_batch_sampler(obj)) == (3, 2)


NO_PLAIN_INTS = {
    "numpy int": np.int64(1),
    "numpy bool": np.bool_(True),
    "bool": True,
    "float": 1.0,
    "str": "1",
    "tensor": torch.tensor(1),
    "Mock": Mock(),
    "tuple": (1,),
    "function": lambda: 1,
}


@pytest.mark.parametrize("value", NO_PLAIN_INTS.values(), ids=NO_PLAIN_INTS)
def test_rank_that_is_no_plain_int_is_no_rank(value):
    assert find_sharding(with_sampler(Sampler(num_replicas=2, rank=value))) is None
    assert find_sharding(DataLoader(Stream(world_size=2, rank=value))) is None
    assert find_sharding(DataLoader(Stream(_distributed=Bag(world_size=2, rank=value)))) is None


@pytest.mark.parametrize("value", NO_PLAIN_INTS.values(), ids=NO_PLAIN_INTS)
def test_size_that_is_no_plain_int_is_no_size(value):
    assert find_sharding(with_sampler(Sampler(num_replicas=value, rank=0))) is None
    assert find_sharding(DataLoader(Stream(world_size=value, rank=0))) is None
    assert find_sharding(DataLoader(Stream(_distributed=Bag(world_size=value, rank=0)))) is None


@pytest.mark.parametrize("value", NO_PLAIN_INTS.values(), ids=NO_PLAIN_INTS)
def test_another_pair_counts_where_the_first_is_no_pair(value):
    assert pair(with_sampler(Sampler(num_replicas=value, num_processes=2, process_index=1))) == (2, 1)
    assert pair(with_sampler(Sampler(num_replicas=2, rank=value, _rank=1))) == (2, 1)


@pytest.mark.parametrize("size", [0, -1, -2, -(2**70)])
@pytest.mark.parametrize("rank", [0, -1, 1])
def test_size_below_one_is_no_size(size, rank):
    for loader in (with_sampler(Sampler(world_size=size, rank=rank)), DataLoader(Stream(world_size=size, rank=rank))):
        assert find_sharding(loader) is None
        assert is_already_sharded(loader, 2, 0) is False


@pytest.mark.parametrize("size", [2, 4, 1000])
def test_negative_rank_means_not_distributed(size):
    loader = with_sampler(Sampler(world_size=size, rank=-1))
    assert find_sharding(loader) is None
    assert is_already_sharded(loader, size, 0) is False


def test_huge_sizes_are_taken_at_their_word():
    size = 2**70
    loader = with_sampler(Sampler(world_size=size, rank=size - 1))
    assert pair(loader) == (size, size - 1)
    with pytest.raises(ValueError, match=str(size)):
        is_already_sharded(loader, 2, 1)


@pytest.mark.parametrize("process_index", [0, 1, 2])
def test_ranks_counted_from_one_are_refused_on_every_rank(process_index):
    # The last of them, 3 of 3, must not slip through as ordinary while the other ranks stop with an error.
    loader = with_sampler(Sampler(world_size=3, rank=process_index + 1))
    with pytest.raises(ValueError):
        is_already_sharded(loader, 3, process_index)


@pytest.mark.parametrize("name", WRAPPERS)
def test_pair_behind_a_wrapper(name):
    assert pair(with_batch_sampler(Bag(**{name: Bag(num_replicas=3, rank=2)}))) == (3, 2)
    assert pair(with_sampler(Sampler(**{name: Bag(num_replicas=3, rank=2)}))) == (3, 2)
    assert pair(Bag(**{name: Bag(num_replicas=3, rank=2)})) == (3, 2)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_pair_on_one_of_several_samplers(kind, position):
    samplers = [Bag(), Bag(), Bag()]
    samplers[position] = Bag(num_replicas=3, rank=2)
    loader = with_batch_sampler(Bag(samplers=kind(samplers)))
    assert pair(loader) == (3, 2)
    assert source_of(loader) is samplers[position]


@pytest.mark.parametrize("name", ["dataset", "data_source", "inner", "wrapped", "loader"])
def test_other_attributes_of_a_sampler_are_no_wrapping(name):
    assert find_sharding(with_batch_sampler(Bag(**{name: Bag(num_replicas=2, rank=1)}))) is None


@pytest.mark.parametrize("samplers", ["ab", {"a": 1}, 5, np.arange(3), torch.arange(3), iter([1]), Mock()], ids=label)
def test_samplers_that_are_no_list_say_nothing(samplers):
    assert find_sharding(with_batch_sampler(Bag(samplers=samplers))) is None


def test_nearest_pair_is_the_answer():
    shard = BatchSamplerShard(BatchSampler(distributed(2, 1), 2, False), num_processes=4, process_index=3)
    assert pair(with_batch_sampler(shard)) == (4, 3)
    # Beside the samplers of the loader, and behind one of them.
    inner = Bag(sampler=Bag(num_replicas=2, rank=1))
    assert pair(Bag(sampler=inner, batch_sampler=Bag(num_replicas=4, rank=3))) == (4, 3)
    assert pair(Bag(sampler=Bag(num_replicas=4, rank=3), batch_sampler=inner)) == (4, 3)


def test_single_shard_does_not_stop_the_search():
    one = {"num_processes": 1, "process_index": 0}
    # On the same object, further in, and beside it.
    assert pair(with_batch_sampler(Bag(num_replicas=1, rank=0, data_parallel_size=3, data_parallel_rank=2))) == (3, 2)
    shard = BatchSamplerShard(BatchSampler(distributed(3, 2), 2, False), **one)
    loader = with_batch_sampler(shard)
    assert pair(loader) == (3, 2)
    assert type(source_of(loader)) is DistributedSampler
    assert pair(with_batch_sampler(Bag(samplers=[Bag(**one), Bag(**one), Bag(num_replicas=3, rank=2)]))) == (3, 2)
    assert pair(Bag(**one, sampler=Bag(**one, _sampler=distributed(3, 2)))) == (3, 2)
    # In a later rule.
    assert pair(Bag(**one, dataset=hf_iterable(3, 2))) == (3, 2)
    assert pair(DataLoader(Stream(_distributed=Bag(world_size=1, rank=0), world_size=3, rank=2))) == (3, 2)


def test_source_of_a_sampler_inside_a_batch_sampler():
    loader = with_batch_sampler(BatchSampler(distributed(2, 1), 2, False))
    assert find_sharding(loader).source == "DistributedSampler at loader.batch_sampler.sampler"


def test_source_names_the_users_class():
    class MySampler(DistributedSampler):
        pass

    loader = with_sampler(MySampler(DATA, num_replicas=2, rank=1))
    assert find_sharding(loader).source.startswith("MySampler at loader.")
    assert source_of(loader) is loader.sampler


# Rule 4: a config held by the dataset


@pytest.mark.parametrize(("name", "size", "rank"), CONFIG_NAMES)
@pytest.mark.parametrize("dataset_class", [Stream, MapStyle, Bag])
def test_config_of_a_dataset(name, size, rank, dataset_class):
    dataset = dataset_class(**{name: SimpleNamespace(**{size: 3, rank: 2})})
    loader = DataLoader(dataset, sampler=None if dataset_class is Stream else SequentialSampler(DATA))
    assert pair(loader) == (3, 2)
    assert source_of(loader) is dataset


@pytest.mark.parametrize(("name", "size", "rank"), CONFIG_NAMES)
def test_half_a_config_says_nothing(name, size, rank):
    assert find_sharding(DataLoader(Stream(**{name: SimpleNamespace(**{size: 3})}))) is None
    assert find_sharding(DataLoader(Stream(**{name: SimpleNamespace(**{rank: 2})}))) is None
    assert find_sharding(DataLoader(Stream(**{name: SimpleNamespace()}))) is None
    assert find_sharding(DataLoader(Stream(**{name: None}))) is None


@pytest.mark.parametrize(("name", "size", "rank"), CONFIG_NAMES)
def test_config_with_the_names_of_another_says_nothing(name, size, rank):
    others = {(other_size, other_rank) for _, other_size, other_rank in CONFIG_NAMES} - {(size, rank)}
    for other_size, other_rank in others:
        config = SimpleNamespace(**{other_size: 3, other_rank: 2})
        assert find_sharding(DataLoader(Stream(**{name: config}))) is None


@pytest.mark.parametrize("config", [3, "world", {"world_size": 2, "rank": 1}, (2, 1), Mock(), MagicMock()], ids=label)
@pytest.mark.parametrize("name", [name for name, _, _ in CONFIG_NAMES])
def test_config_of_another_kind_says_nothing(name, config):
    assert find_sharding(DataLoader(Stream(**{name: config}))) is None


@pytest.mark.parametrize("name", ["dataset", "_data", "_dataset"])
def test_config_behind_a_wrapper(name):
    dataset = Stream(**{name: hf_iterable(3, 2)})
    loader = DataLoader(dataset)
    assert pair(loader) == (3, 2)
    assert source_of(loader) is getattr(dataset, name)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_config_on_one_of_several_datasets(kind, position):
    datasets = [Stream(), Stream(), Stream()]
    datasets[position] = standins.LitStreamingDataset(3, 2)
    assert pair(DataLoader(Stream(_datasets=kind(datasets)))) == (3, 2)


def test_config_in_a_subset():
    assert pair(DataLoader(Subset(MapStyle(_distributed=standins.DistributedConfig(2, 3)), [0]))) == (3, 2)


def test_config_of_a_single_shard_does_not_stop_the_search():
    one, three = standins.WorkerConfig(rank=0, world_size=1), standins.WorkerConfig(rank=2, world_size=3)
    loader = DataLoader(standins.SavableDatasetWrapper(one, standins.SavableDatasetWrapper(three)))
    assert pair(loader) == (3, 2)


def test_config_on_the_sampler_side_is_no_config_of_the_dataset():
    assert find_sharding(with_batch_sampler(Bag(worker_config=standins.WorkerConfig(1, 2)))) is None


def test_dataset_that_is_huge_is_not_gone_through():
    start = time.perf_counter()
    assert find_sharding(DataLoader(Stream(_datasets=[Stream()] * 1_000_000, _data=list(range(100_000))))) is None
    assert time.perf_counter() - start < AT_ONCE


# Rule 5: WebDataset


def wds(*stages):
    return DataLoader(standins.DataPipeline(standins.SimpleShardList(["a.tar"]), *stages), batch_size=None)


def launched(monkeypatch, world_size, rank):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("RANK", str(rank))


def marked_partial():
    # An attribute of its own keeps a partial from being merged into the one around it.
    stage = functools.partial(standins.split_by_node)
    stage.note = "by hand"
    return stage


WDS_PIPELINES = {
    "nodesplitter": lambda: DataLoader(
        standins.WebDataset(["a.tar"], nodesplitter=standins.split_by_node), batch_size=None
    ),
    "DataPipeline": lambda: wds(standins.split_by_node, standins.split_by_worker),
    "last stage": lambda: wds(standins.split_by_worker, standins.split_by_node),
    "partial": lambda: wds(functools.partial(standins.split_by_node, group=None)),
    "partial of a partial": lambda: wds(functools.partial(marked_partial())),
    "in a mix of datasets": lambda: DataLoader(
        Stream(datasets=[standins.WebDataset(["a.tar"], nodesplitter=standins.split_by_node)]), batch_size=None
    ),
    "inside a dataset": lambda: DataLoader(
        Stream(dataset=standins.WebDataset(["a.tar"], nodesplitter=standins.split_by_node)), batch_size=None
    ),
}
each_pipeline = pytest.mark.parametrize("pipeline", WDS_PIPELINES)


@each_pipeline
def test_split_by_node_under_a_launcher(pipeline, monkeypatch):
    launched(monkeypatch, 4, 3)
    loader = WDS_PIPELINES[pipeline]()
    assert pair(loader) == (4, 3)
    assert isinstance(source_of(loader), standins.DataPipeline)
    assert "split_by_node" in find_sharding(loader).source
    assert is_already_sharded(loader, 4, 3) is True
    # Only the data-parallel half of the launched processes: each reads a quarter, so a part would be lost.
    with pytest.raises(ValueError):
        is_already_sharded(loader, 2, 1)


@each_pipeline
def test_split_by_node_without_a_launch_splits_nothing(pipeline):
    assert_not_sharded(WDS_PIPELINES[pipeline]())


@each_pipeline
def test_split_by_node_in_a_process_group(pipeline, fake_group):
    loader = WDS_PIPELINES[pipeline]()
    assert pair(loader) == (4, 2)
    assert is_already_sharded(loader) is True


def test_launcher_goes_before_the_process_group(fake_group, monkeypatch):
    launched(monkeypatch, 8, 5)
    assert pair(wds(standins.split_by_node)) == (8, 5)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launch_is_none(name, fake_group, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert pair(wds(standins.split_by_node)) == (4, 2)


def test_split_by_node_in_a_group_of_its_own(fake_group):
    group = dist.new_group([0, 2])
    # Rank 2 of the world is the second of the two.
    assert pair(wds(functools.partial(standins.split_by_node, group=group))) == (2, 1)


def test_split_by_node_launched_alone(monkeypatch):
    launched(monkeypatch, 1, 0)
    assert_not_sharded(wds(standins.split_by_node))


class Stage:
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize(
    "pipeline",
    [
        [],
        [standins.single_node_only, standins.split_by_worker],
        ["split_by_node"],
        [Stage("split_by_node")],
        [functools.partial(standins.single_node_only, group=None)],
        [Mock(), MagicMock()],
        [None, 3, object()],
        "split_by_node",
        standins.split_by_node,
        {"split_by_node": standins.split_by_node},
        Mock(),
        None,
    ],
    ids=label,
)
def test_pipeline_without_split_by_node(pipeline, monkeypatch):
    launched(monkeypatch, 2, 1)
    assert_not_sharded(DataLoader(Stream(pipeline=pipeline)))


# Rule 6: a pair on a stream


@pytest.mark.parametrize("names", PAIR_NAMES, ids="/".join)
@pytest.mark.parametrize("prefix", ["", "_"])
def test_pair_on_a_stream_but_not_on_a_map_style_dataset(names, prefix):
    attributes = {prefix + names[0]: 3, prefix + names[1]: 2}
    stream = Stream(**attributes)
    assert pair(DataLoader(stream, batch_size=2)) == (3, 2)
    assert pair(DataLoader(stream, batch_size=None)) == (3, 2)
    assert source_of(DataLoader(stream)) is stream
    for dataset in (MapStyle(**attributes), Bag(**attributes)):
        assert find_sharding(DataLoader(dataset, sampler=SequentialSampler(DATA))) is None


@pytest.mark.parametrize("names", PAIR_NAMES, ids="/".join)
def test_half_a_pair_on_a_stream_says_nothing(names):
    assert find_sharding(DataLoader(Stream(**{names[0]: 3}))) is None
    assert find_sharding(DataLoader(Stream(**{names[1]: 2}))) is None


# One rule before another


def everything(*rules):
    """A loader with the evidence of the given rules, each with numbers of its own: rule 3 says 30 shards, and so on."""
    loader = Bag(dataset=Stream())
    if 1 in rules:
        loader.dataset.is_sharded = True
    if 2 in rules:
        loader._sampler = REGISTERED()
    if 3 in rules:
        loader.sampler = distributed(30, 3)
    if 4 in rules:
        loader.dataset._distributed = standins.DistributedConfig(rank=4, world_size=40)
    if 5 in rules:
        loader.dataset.pipeline = [standins.split_by_node]
    if 6 in rules:
        loader.dataset.world_size, loader.dataset.rank = 60, 6
    return loader


class REGISTERED(standins.LookOnly):
    pass


BY_RULE = {1: (None, None), 2: (20, 2), 3: (30, 3), 4: (40, 4), 5: (50, 5), 6: (60, 6)}


@pytest.mark.parametrize("first", BY_RULE)
def test_rules_are_asked_in_order(first, monkeypatch):
    launched(monkeypatch, 50, 5)
    register_sharding(REGISTERED, lambda obj: (20, 2))
    for second in range(first, 7):
        assert pair(everything(first, second)) == BY_RULE[first]
    assert pair(everything(*range(first, 7))) == BY_RULE[first]


# The decision


def decide(size, index, num_processes, process_index):
    """The rule as it is written: what `is_already_sharded` gives, or `ValueError`."""
    if num_processes == 1 or size == 1:
        return False
    return True if size == num_processes and index == process_index else ValueError


def assert_decides(loader, expected, num_processes, process_index):
    if expected is ValueError:
        with pytest.raises(ValueError):
            is_already_sharded(loader, num_processes, process_index)
    else:
        assert is_already_sharded(loader, num_processes, process_index) is expected


RANKS = [(size, index) for size in range(1, 6) for index in range(size)]


@pytest.mark.parametrize(("size", "index"), RANKS)
def test_decision(size, index):
    loader = with_sampler(distributed(size, index))
    for num_processes, process_index in RANKS:
        assert_decides(loader, decide(size, index, num_processes, process_index), num_processes, process_index)


@st.composite
def ranks(draw):
    size = draw(st.integers(1, 2000))
    return size, draw(st.integers(0, size - 1))


@settings(deadline=None)
@given(ranks(), ranks(), st.booleans())
def test_decision_for_large_worlds(sharded_for, asked_by, equal):
    asked_by = sharded_for if equal else asked_by
    assert_decides(with_sampler(distributed(*sharded_for)), decide(*sharded_for, *asked_by), *asked_by)


def test_every_rank_of_a_world_takes_the_same_branch():
    def outcome(size, num_processes, rank):
        try:
            return is_already_sharded(with_sampler(distributed(size, rank % size)), num_processes, rank)
        except ValueError:
            return ValueError

    for size in range(1, 6):
        for num_processes in range(1, 6):
            outcomes = {outcome(size, num_processes, rank) for rank in range(num_processes)}
            assert len(outcomes) == 1


def test_one_process_shards_nothing():
    for loader in (with_sampler(distributed(2, 1)), placed(True)["loader"], DataLoader(hf_iterable(2, 1))):
        assert is_already_sharded(loader, 1, 0) is False
        assert is_already_sharded(loader, num_processes=1) is False


def test_error_states_both_pairs_and_both_ways_out():
    loader = with_sampler(distributed(14, 11))
    with pytest.raises(ValueError) as error:
        is_already_sharded(loader, 7, 5)
    message = str(error.value)
    assert set(re.findall(r"\d+", message)) >= {"14", "11", "7", "5"}
    assert "already_sharded=True" in message
    assert "already_sharded=False" in message
    assert find_sharding(loader).source in message


def test_error_for_a_sampler_built_for_the_whole_world_under_tensor_parallelism():
    # Four ranks, two of them for each shard: the sampler was given the world's numbers.
    with pytest.raises(ValueError):
        is_already_sharded(with_sampler(distributed(4, 3)), num_processes=2, process_index=1)
    assert is_already_sharded(with_sampler(distributed(2, 1)), num_processes=2, process_index=1) is True


def test_without_a_process_group_there_is_one_process():
    assert not dist.is_initialized()
    assert is_already_sharded(with_sampler(distributed(2, 1))) is False
    assert is_already_sharded(placed(True)["loader"]) is False
    # The index alone defaults to 0.
    assert is_already_sharded(with_sampler(distributed(2, 0)), num_processes=2) is True
    with pytest.raises(ValueError):
        is_already_sharded(with_sampler(distributed(2, 1)), num_processes=2)


def test_process_group_gives_the_defaults(fake_group):
    assert is_already_sharded(with_sampler(distributed(4, 2))) is True
    assert is_already_sharded(placed(True)["loader"]) is True
    assert is_already_sharded(DataLoader(DATA)) is False
    assert is_already_sharded(with_sampler(distributed(1, 0))) is False
    for size, index in [(4, 1), (2, 0), (8, 2)]:
        with pytest.raises(ValueError):
            is_already_sharded(with_sampler(distributed(size, index)))
    # What is given goes before it.
    assert is_already_sharded(with_sampler(distributed(2, 1)), 2, 1) is True
    assert is_already_sharded(with_sampler(distributed(4, 0)), process_index=0) is True
    assert is_already_sharded(with_sampler(distributed(3, 2)), num_processes=3) is True
    assert is_already_sharded(with_sampler(distributed(4, 2)), 1, 0) is False


# Objects that misbehave


class Custom(Exception):
    pass


EXCEPTIONS = [
    RuntimeError,
    AttributeError,
    KeyError,
    NotImplementedError,
    AssertionError,
    OSError,
    StopIteration,
    Custom,
]


def raising(base, *names, error=RuntimeError):
    def get(self):
        raise error("no")

    return type("Raising", (base,), {name: property(get) for name in names})


@pytest.mark.parametrize("error", EXCEPTIONS)
def test_attribute_that_raises_counts_as_absent(error):
    loader = with_sampler(raising(Sampler, "num_replicas", "is_sharded", error=error)(world_size=2, rank=1))
    assert pair(loader) == (2, 1)
    assert find_sharding(with_sampler(raising(Sampler, "rank", error=error)(world_size=2))) is None
    loader = with_sampler(raising(Sampler, "rank", error=error)(world_size=2, _rank=1))
    assert pair(loader) == (2, 1)
    wrapper = raising(Bag, "sampler", "samplers", "batch_sampler", error=error)(base_sampler=distributed(2, 1))
    assert pair(with_batch_sampler(wrapper)) == (2, 1)


@pytest.mark.parametrize("error", EXCEPTIONS)
def test_attribute_of_a_dataset_that_raises_counts_as_absent(error):
    names = [name for name, _, _ in CONFIG_NAMES] + ["pipeline", "dataset", "_data", "_datasets", "is_sharded"]
    assert find_sharding(DataLoader(raising(Stream, *names, error=error)())) is None
    assert pair(DataLoader(raising(Stream, *names, error=error)(world_size=2, rank=1))) == (2, 1)
    config = raising(Bag, "world_size", error=error)(rank=1)
    assert find_sharding(DataLoader(Stream(_distributed=config))) is None
    assert pair(DataLoader(Stream(_distributed=config, _dataset=hf_iterable(2, 1)))) == (2, 1)


@pytest.mark.parametrize("error", EXCEPTIONS)
def test_attribute_of_a_loader_that_raises_counts_as_absent(error):
    loader = raising(Bag, "dataset", "sampler", "is_sharded", "rank", error=error)
    assert find_sharding(loader()) is None
    assert pair(loader(batch_sampler=distributed(2, 1))) == (2, 1)
    loader = raising(Bag, "batch_sampler", "sampler", "num_replicas", error=error)
    assert pair(loader(dataset=hf_iterable(2, 1))) == (2, 1)


def holding(obj):
    """Loaders that hold an object in each place where one is looked at."""
    return [
        obj,
        with_batch_sampler(Bag(sampler=obj)),
        with_batch_sampler(Bag(samplers=[obj])),
        Bag(is_sharded=obj, num_replicas=obj, rank=obj, samplers=obj),
        Bag(dataset=obj),
        DataLoader(Stream(_datasets=[obj])),
        DataLoader(Stream(_datasets=obj)),
        DataLoader(Stream(_distributed=obj)),
        DataLoader(Stream(pipeline=[obj])),
        DataLoader(Stream(pipeline=obj)),
    ]


@pytest.mark.parametrize("error", EXCEPTIONS)
def test_object_that_raises_for_every_name_it_lacks(error):
    class Missing:
        def __getattr__(self, name):
            raise error(name)

    for loader in holding(Missing()):
        assert find_sharding(loader) is None
    assert pair(Bag(dataset=Missing(), samplers=[Missing(), distributed(2, 1)])) == (2, 1)


@pytest.mark.parametrize("error", EXCEPTIONS)
def test_object_that_raises_even_for_its_class(error):
    # A proxy whose target is not there yet, or no longer: `isinstance` reads `__class__`, and that raises as well.
    class Shut:
        def __getattribute__(self, name):
            raise error(name)

    for loader in holding(Shut()):
        assert find_sharding(loader) is None
    assert pair(Bag(dataset=Shut(), samplers=[Shut(), distributed(2, 1)])) == (2, 1)


def test_cycles_end():
    first, second = Bag(), Bag()
    first.sampler = first.batch_sampler = second
    second.sampler, second._sampler, second.samplers = first, second, [first, second]
    assert find_sharding(with_batch_sampler(first)) is None
    second.base_sampler = distributed(2, 1)
    assert pair(with_batch_sampler(first)) == (2, 1)

    loader = Bag()
    loader.sampler = loader.batch_sampler = loader.dataset = loader
    assert find_sharding(loader) is None

    stream, other = Stream(), Stream()
    stream.dataset = stream._data = other
    other._dataset, other._datasets = stream, [stream, other]
    assert find_sharding(DataLoader(stream)) is None
    other._data = hf_iterable(2, 1)
    assert pair(DataLoader(stream)) == (2, 1)


@pytest.mark.parametrize("name", [*WRAPPERS, "samplers", "dataset", "_data", "_dataset", "_datasets"])
def test_deep_chains_end(name):
    obj = Bag(num_replicas=2, rank=1)
    for _ in range(5_000):
        obj = Bag(**{name: [obj] if name.endswith("s") else obj})
    start = time.perf_counter()
    find_sharding(Bag(batch_sampler=obj, dataset=obj))
    find_sharding(obj)
    assert time.perf_counter() - start < AT_ONCE
    while obj is not None:  # taken apart from outside in, since garbage collection would recurse
        obj = vars(obj).pop(name, None)
        obj = obj.pop() if isinstance(obj, list) else obj


def test_chains_of_fresh_objects_end():
    class Endless(standins.LookOnly):
        @property
        def sampler(self):
            return Endless()

        batch_sampler = _sampler = base_sampler = dataset = _data = _dataset = sampler

        @property
        def samplers(self):
            return [Endless() for _ in range(10)]

        _datasets = samplers

    start = time.perf_counter()
    assert find_sharding(Endless()) is None
    assert find_sharding(with_batch_sampler(Endless())) is None
    assert find_sharding(DataLoader(Endless(), sampler=SequentialSampler(DATA))) is None
    assert time.perf_counter() - start < AT_ONCE


MOCKS = {
    "Mock": Mock,
    "MagicMock": MagicMock,
    "Mock of DistributedSampler": lambda: Mock(spec=DistributedSampler),
    "autospec of DistributedSampler": lambda: create_autospec(DistributedSampler, instance=True),
    "Mock of IterableDataset": lambda: Mock(spec=IterableDataset),
    "MagicMock of DataLoader": lambda: MagicMock(spec=DataLoader),
    "Mock like a loader": lambda: Mock(spec_set=with_sampler(RandomSampler(DATA))),
}


@pytest.mark.parametrize("name", MOCKS)
def test_mock_is_not_believed(name):
    mock = MOCKS[name]
    start = time.perf_counter()
    for loader in (
        mock(),
        Bag(sampler=mock(), dataset=mock()),
        with_batch_sampler(Bag(samplers=[mock()])),
        DataLoader(Stream(_datasets=[mock()])),
    ):
        assert find_sharding(loader) is None
    assert is_already_sharded(with_batch_sampler(mock()), 2, 1) is False
    assert time.perf_counter() - start < 3 * AT_ONCE


def test_mock_with_real_numbers_is_believed():
    assert pair(with_batch_sampler(Mock(num_replicas=2, rank=1))) == (2, 1)
    assert pair(Mock(is_sharded=True)) == (None, None)
    assert pair(Mock(is_sharded=False, num_replicas=2, rank=1)) is None


def answering(answer, base=standins.LookOnly):
    class Everything(base):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return answer(self)

    return Everything()


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_object_that_answers_every_name_with_a_number_is_not_sharded(number):
    for loader in (
        answering(lambda _: number),
        with_batch_sampler(answering(lambda _: number)),
        DataLoader(answering(lambda _: number), sampler=SequentialSampler(DATA)),
        DataLoader(answering(lambda _: number, Stream)),
    ):
        assert is_already_sharded(loader, 2, 1) is False
        assert is_already_sharded(loader, 3, 0) is False


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: 2,
        lambda _: 2**70,
        lambda obj: obj,
        lambda obj: type(obj)(),
        lambda obj: [obj] * 100,
        lambda obj: [type(obj)() for _ in range(10)],
        lambda _: "two",
        lambda _: lambda *args, **kwargs: standins.CALLED.append("a method"),
    ],
    ids=["2", "2**70", "itself", "another", "a list of itself", "a list of others", "a string", "a method"],
)
def test_object_that_answers_every_name_does_not_stop_or_hang_detection(answer):
    start = time.perf_counter()
    for loader in (
        answering(answer),
        with_batch_sampler(answering(answer)),
        DataLoader(answering(answer), sampler=SequentialSampler(DATA)),
        DataLoader(answering(answer, Stream)),
    ):
        sharding = find_sharding(loader)
        # 2 of 2 and the like is no shard that can exist.
        assert sharding is None or sharding.num_shards == sharding.index
    assert time.perf_counter() - start < AT_ONCE


# Looking only


def tripwires(base):
    """A class of `base` whose every method raises, the operators too, and that notes it."""

    def wire(name):
        return lambda self, *args, **kwargs: standins.refuse(self, name)

    names = """__iter__ __next__ __len__ __length_hint__ __getitem__ __setitem__ __delitem__ __contains__ __reversed__
    __call__ __bool__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __int__ __index__ __float__ __repr__ __str__
    __format__ __enter__ __exit__ __add__ __radd__ __or__ __and__ __copy__ __deepcopy__ __reduce__ __reduce_ex__
    __getstate__ __getitems__ __dir__ __fspath__ __setattr__ __delattr__
    is_sharded num_replicas set_epoch state_dict load_state_dict size shard split pipeline reader""".split()
    return type("Tripwire", (base,), {name: wire(name) for name in names})


def tripwire(base=object, **attributes):
    obj = tripwires(base)()
    vars(obj).update(attributes)
    return obj


def test_the_wire_trips():
    for trip in (iter, len, bool, repr, hash, lambda obj: obj[0], lambda obj: obj == 1, lambda obj: obj.is_sharded()):
        with pytest.raises(AssertionError):
            trip(tripwire())
    assert len(standins.CALLED) == 8
    standins.CALLED.clear()


def test_nothing_is_called():
    def loader(**attributes):
        # A loader that is not torch's: torch's constructor would call some of these itself.
        return tripwire(**attributes)

    assert find_sharding(loader()) is None
    assert find_sharding(loader(sampler=tripwire(), batch_sampler=tripwire(), dataset=tripwire())) is None
    assert find_sharding(loader(dataset=tripwire(IterableDataset))) is None
    assert is_already_sharded(loader(sampler=tripwire()), 2, 1) is False

    assert pair(loader(sampler=tripwire(world_size=2, rank=1))) == (2, 1)
    assert pair(loader(batch_sampler=tripwire(sampler=tripwire(samplers=[tripwire(world_size=2, rank=1)])))) == (2, 1)
    assert pair(loader(dataset=tripwire(_distributed=tripwire(world_size=2, rank=1)))) == (2, 1)
    assert pair(loader(dataset=tripwire(_datasets=[tripwire(_data=hf_iterable(2, 1))]))) == (2, 1)
    assert pair(loader(dataset=tripwire(IterableDataset, world_size=2, rank=1))) == (2, 1)
    assert is_already_sharded(loader(sampler=tripwire(world_size=2, rank=1)), 2, 1) is True
    with pytest.raises(ValueError, match="already_sharded=True"):
        is_already_sharded(loader(sampler=tripwire(world_size=2, rank=1)), 2, 0)


def test_stages_of_a_pipeline_are_not_called(monkeypatch):
    launched(monkeypatch, 2, 1)
    stages = [tripwire(), tripwire(), standins.split_by_node]
    assert pair(DataLoader(Stream(pipeline=stages))) == (2, 1)


class Methods(standins.LookOnly):
    """Every name that is read, as a method: a bound method is no value, and must not be asked for one."""


for _name in {name for names in PAIR_NAMES for name in names} | {
    *WRAPPERS,
    *("is_sharded", "samplers", "dataset", "_data", "_dataset", "_datasets", "pipeline"),
    *(name for name, _, _ in CONFIG_NAMES),
}:
    setattr(Methods, _name, functools.partialmethod(standins.refuse, _name))


def test_methods_with_the_names_of_attributes_are_not_called():
    for loader in (Methods(), with_batch_sampler(Methods()), DataLoader(Methods(), sampler=SequentialSampler(DATA))):
        assert find_sharding(loader) is None


def snapshot(obj, seen=None):
    """The attributes of an object and of those it holds, by identity and by value."""
    seen = {} if seen is None else seen
    if id(obj) not in seen and hasattr(obj, "__dict__") and not isinstance(obj, type):
        seen[id(obj)] = {name: (id(value), repr(value)) for name, value in vars(obj).items()}
        for value in list(vars(obj).values()):
            for item in value if type(value) in (list, tuple) else [value]:
                snapshot(item, seen)
    return seen


@each_library
def test_nothing_is_changed(library):
    loader = LIBRARIES[library](4, 3)
    before, torch_rng, python_rng = snapshot(loader), torch.get_rng_state(), random.getstate()
    find_sharding(loader)
    is_already_sharded(loader, 4, 3)
    assert snapshot(loader) == before
    assert torch.equal(torch.get_rng_state(), torch_rng)
    assert random.getstate() == python_rng


def test_iteration_is_as_before():
    loader = with_sampler(distributed(2, 1, shuffle=False))
    find_sharding(loader)
    assert torch.cat(list(loader)).tolist() == list(range(1, 16, 2))


# Chains of wrappers


@st.composite
def sampler_chains(draw):
    """A pair behind up to ten wrappers of any kind, with other samplers beside it, and nothing said on the way."""
    names = draw(st.sampled_from(PAIR_NAMES))
    size, index = draw(ranks().filter(lambda pair: pair[0] > 1))
    prefixes = draw(st.tuples(*[st.sampled_from(["", "_"])] * 2))
    innermost = obj = Bag(**{prefixes[0] + names[0]: size, prefixes[1] + names[1]: index})
    for name in draw(st.lists(st.sampled_from([*WRAPPERS, "samplers"]), max_size=10)):
        if name == "samplers":
            beside = [Bag() for _ in range(draw(st.integers(0, 2)))]
            beside.insert(draw(st.integers(0, len(beside))), obj)
            obj = Bag(samplers=draw(st.sampled_from([list, tuple]))(beside))
        else:
            obj = Bag(**{name: obj})
        if draw(st.booleans()):
            # What does not stop the search: half a pair, or a single shard.
            vars(obj).update(draw(st.sampled_from([{"world_size": 4}, {"num_replicas": 1, "rank": 0}])))
    return obj, innermost, size, index


@settings(deadline=None, max_examples=200)
@given(sampler_chains(), st.sampled_from(["batch_sampler", "sampler", "itself"]))
def test_pair_is_found_behind_any_chain_of_wrappers(chain, place):
    obj, innermost, size, index = chain
    if place == "itself":
        loader = obj
    elif place == "sampler":
        loader = DataLoader(DATA, sampler=obj, batch_size=None)
    else:
        loader = with_batch_sampler(obj)
    assert pair(loader) == (size, index)
    assert source_of(loader) is innermost
    assert is_already_sharded(loader, size, index) is True


@st.composite
def dataset_chains(draw):
    name, size_name, rank_name = draw(st.sampled_from(CONFIG_NAMES))
    size, index = draw(ranks().filter(lambda pair: pair[0] > 1))
    config = SimpleNamespace(**{size_name: size, rank_name: index})
    innermost = obj = draw(st.sampled_from([Stream, MapStyle]))(**{name: config})
    for wrapper in draw(st.lists(st.sampled_from(["dataset", "_data", "_dataset", "_datasets"]), max_size=10)):
        if wrapper == "_datasets":
            beside = [Stream() for _ in range(draw(st.integers(0, 2)))]
            beside.insert(draw(st.integers(0, len(beside))), obj)
            obj = Stream(_datasets=draw(st.sampled_from([list, tuple]))(beside))
        else:
            obj = draw(st.sampled_from([Stream, MapStyle]))(**{wrapper: obj})
    return obj, innermost, size, index


@settings(deadline=None, max_examples=200)
@given(dataset_chains())
def test_config_is_found_behind_any_chain_of_datasets(chain):
    obj, innermost, size, index = chain
    loader = DataLoader(obj, batch_size=None)
    assert pair(loader) == (size, index)
    assert source_of(loader) is innermost
    assert is_already_sharded(loader, size, index) is True


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["num_shards", "n_shards", "nshards", "index", "shard_id", "seed", "epoch", "rank", "size"]),
        st.integers(-1, 5),
    )
)
def test_numbers_under_other_names_say_nothing(attributes):
    for loader in (Bag(**attributes), with_batch_sampler(Bag(**attributes)), DataLoader(Stream(**attributes))):
        assert find_sharding(loader) is None
