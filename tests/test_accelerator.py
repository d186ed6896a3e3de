# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What `already_sharded` means in every place where it can be said, and that ordinary loaders never notice."""

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import random
import sys
import types
from unittest import mock

import accelerate
import accelerate.accelerator
import accelerate.data_loader
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from parameterized import parameterized
from ranks import run
from shared import (
    CUT,
    Logged,
    NoLoader,
    RankBatches,
    SizedStream,
    Stream,
    collectives,
    dealt,
    lists,
    needs_fsdp2,
    needs_parallelism_config,
    raised,
    seeded,
    stand_in_gpus,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

import accelerate_presharded
from accelerate_presharded import DataLoaderConfiguration, PreshardedDataLoader


pytestmark = pytest.mark.usefixtures("fresh_state")


def marked(accelerator, length: int = 12, **settings) -> DataLoader:
    """A loader that says that it is sharded, and how."""
    sampler = DistributedSampler(range(length), accelerator.num_processes, accelerator.process_index, shuffle=False)
    return DataLoader(range(length), sampler=sampler, **{"batch_size": 2, **settings})


def unmarked(accelerator, length: int = 12) -> DataLoader:
    """A loader that says nothing."""
    return DataLoader(range(length), batch_size=2)


def configured(**settings):
    return accelerate_presharded.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))


# The nearest word wins


def nearest_words() -> dict:
    results = {}
    words = (None, True, False)
    for config, call, make_loader in itertools.product(words, words, (marked, unmarked)):
        for through in ("prepare", "list", "tuple", "method", "function"):
            if through == "function" and config is not None:
                continue
            accelerator = configured(already_sharded=config)
            loader = make_loader(accelerator)
            if through == "prepare":
                prepared = accelerator.prepare(loader, already_sharded=call)
            elif through == "list":
                prepared, _ = accelerator.prepare(loader, {}, already_sharded=[call, None])
            elif through == "tuple":
                _, prepared = accelerator.prepare({}, loader, already_sharded=(None, call))
            elif through == "method":
                prepared = accelerator.prepare_data_loader(loader, already_sharded=call)
            else:
                prepared = accelerate_presharded.prepare_data_loader(loader, already_sharded=call)
            if through != "function":
                assert accelerator._dataloaders == [prepared]
            results[config, call, make_loader.__name__, through] = type(prepared).__name__, lists(prepared)
    return results


@parameterized.expand([(2,), (3,)])
def test_call_before_config_before_detection(world_size):
    per_rank = run(world_size, nearest_words)
    for rank, results in enumerate(per_rank):
        assert len(results) == 3 * 3 * 2 * 4 + 3 * 2
        for (config, call, maker, through), (kind, batches) in results.items():
            word = config if call is None else call
            presharded = maker == "marked" if word is None else word
            case = (config, call, maker, through)
            assert kind == ("PreshardedDataLoader" if presharded else "DataLoaderShard"), case
            if maker == "marked":
                mine = dealt(12, world_size, rank)
            else:
                mine = [[item, item + 1] for item in range(0, 12, 2)]
            if not presharded:
                # Batches are dealt out to the ranks in turn, and dealt from the beginning again for even numbers.
                mine = [mine[step] for step in range(rank, len(mine), world_size)]
                batches = batches[: len(mine)]
            assert batches == mine, case


def test_old_configurations_say_nothing():
    accelerator = accelerate_presharded.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(even_batches=False)
    )
    assert accelerator.already_sharded is None
    assert type(accelerator.prepare(unmarked(accelerator))) is accelerate.data_loader.DataLoaderShard


def test_the_configuration_is_accelerates_with_one_setting_more():
    theirs = {field.name: field.default for field in dataclasses.fields(accelerate.DataLoaderConfiguration)}
    ours = {field.name: field.default for field in dataclasses.fields(DataLoaderConfiguration)}
    assert ours == {**theirs, "already_sharded": None}
    assert isinstance(DataLoaderConfiguration(), accelerate.DataLoaderConfiguration)
    for word in (None, True, False):
        assert configured(already_sharded=word).already_sharded is word


# Lists, and objects that are no loaders


def among_other_objects(flags, config: bool | None = None) -> dict:
    def prepare(kind, **settings):
        accelerator = kind
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        objects = (marked(accelerator), model, optimizer, unmarked(accelerator), scheduler, "text", None, [1, 2])
        prepared = accelerator.prepare(*objects, **settings)
        known = accelerator._dataloaders, accelerator._models, accelerator._optimizers, accelerator._schedulers
        return objects, prepared, [len(container) for container in known]

    objects, ours, known = prepare(configured(already_sharded=config), already_sharded=flags)
    _, plain, known_to_plain = prepare(accelerate.Accelerator(cpu=True))
    names = [type(obj).__name__ for obj in ours]
    return {
        "names": names,
        "plain names": [type(obj).__name__ for obj in plain],
        "known": (known, known_to_plain),
        "untouched": all(mine is given for mine, given in zip(ours[5:], objects[5:])),
    }


@parameterized.expand(
    [
        # What is said for the first and the fourth object, the loaders; the others' entries mean nothing.
        ([True, True, True, True, True, True, True, True], (True, True)),
        ([True, None, None, False, None, None, None, None], (True, False)),
        ([False, "nonsense", 7, True, object(), b"", {}, []], (False, True)),
        ((None, True, True, None, True, False, False, True), (True, False)),
        ([False, True, True, False, True, True, True, True], (False, False)),
        (True, (True, True)),
        (False, (False, False)),
        (None, (True, False)),
    ]
)
def test_only_loaders_have_a_flag(flags, expected):
    for result in run(2, among_other_objects, flags):
        wanted = list(result["plain names"])
        for place, presharded in zip((0, 3), expected):
            wanted[place] = "PreshardedDataLoader" if presharded else "DataLoaderShard"
        assert result["names"] == wanted
        assert result["known"] == ([2, 1, 1, 1], [2, 1, 1, 1])
        assert result["untouched"]


@parameterized.expand([(True, (True, True)), (False, (False, False))])
def test_only_loaders_have_a_flag_in_the_configuration(config, expected):
    for result in run(2, among_other_objects, None, config):
        kinds = [result["names"][place] == "PreshardedDataLoader" for place in (0, 3)]
        assert kinds == list(expected)
        assert result["names"][1:3] == result["plain names"][1:3]
        assert result["untouched"]


@parameterized.expand([((None, None, None),), ((None, True, False),), ((None, False, True),), ((True, None, False),)])
def test_loaders_are_known_in_the_order_of_the_arguments(flags):
    # Accelerate numbers the files of a checkpoint by it.
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    prepared = accelerator.prepare(*(unmarked(accelerator) for _ in flags), already_sharded=flags)
    places = [[loader is known for loader in prepared].index(True) for known in accelerator._dataloaders]
    assert places == [0, 1, 2]


@parameterized.expand([([],), ([True],), ([True, False, None],), ((True,),)])
def test_a_list_of_another_length(flags):
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    loaders = unmarked(accelerator), unmarked(accelerator)
    with pytest.raises(ValueError, match="already_sharded") as error:
        accelerator.prepare(*loaders, already_sharded=flags)
    assert str(len(flags)) in str(error.value) and "2" in str(error.value)
    assert accelerator._dataloaders == []


def values_refused(value) -> dict:
    by_call = accelerate_presharded.Accelerator(cpu=True)
    by_config = configured(already_sharded=value)
    loader = unmarked(by_call)
    return {
        "prepare": raised(by_call.prepare, loader, already_sharded=value),
        "list": raised(by_call.prepare, loader, already_sharded=[value]),
        "method": raised(by_call.prepare_data_loader, loader, already_sharded=value),
        "function": raised(accelerate_presharded.prepare_data_loader, loader, already_sharded=value),
        "config": raised(by_config.prepare, loader),
        "config, method": raised(by_config.prepare_data_loader, loader),
    }


@parameterized.expand([("yes",), (1,), (0,), ("",), (1.0,), (object,)])
def test_values_that_are_neither_true_nor_false_nor_none(value):
    results = run(1, values_refused, value) + run(2, values_refused, value)
    for result in results:
        for place, error in result.items():
            assert error is not None, place
            kind, message = error
            assert kind == "ValueError", place
            assert "already_sharded" in message and repr(value) in message, place


def test_a_device_placement_of_another_length_is_reported_by_accelerate():
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    loader = unmarked(accelerator)
    expected = raised(accelerate.Accelerator(cpu=True).prepare, loader, device_placement=[True, True])
    assert raised(accelerator.prepare, loader, device_placement=[True, True], already_sharded=True) == expected
    assert expected[0] == "ValueError"


# Every route through prepare


@contextlib.contextmanager
def stand_in_deepspeed(accelerator):
    """
    Stands in for the library deepspeed, for calls of `prepare` with loaders only: the settings that Accelerate reads
    there before it hands a model over.
    """

    class Plugin:
        deepspeed_config: dict = {}
        enable_msamp = False
        is_train_batch_min = True

        def is_auto(self, name):
            return name == "train_micro_batch_size_per_gpu"

        def fill_match(self, name, **values):
            pass

        def get_value(self, name):
            return 1

    library = types.ModuleType("deepspeed")
    library.initialize = None
    library.runtime = types.SimpleNamespace(lr_schedules=types.SimpleNamespace(VALID_LR_SCHEDULES=[]))
    nothing = type("Nothing", (), {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, deepspeed=library))
        for name in ("DummyOptim", "DummyScheduler"):
            stack.enter_context(mock.patch.object(accelerate.accelerator, name, nothing, create=True))
        AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        AcceleratorState._shared_state["deepspeed_plugins"] = Plugin()
        yield


ROUTES = {
    "plain": ({}, {}),
    "fsdp2": ({"fsdp": True}, {}),
    "fsdp2 on a mesh": ({"fsdp": True}, {"dp_replicate": 2, "dp_shard": 2}),
    "tp": ({}, {"dp_shard": 2, "tp": 2}),
    "fsdp2 and tp": ({"fsdp": True}, {"dp_shard": 2, "tp": 2}),
    "fsdp2 and cp": ({"fsdp": True}, {"dp_shard": 2, "cp": 2}),
    "deepspeed": ({}, {}),
}


def along_a_route(route: str, with_model: bool) -> dict:
    settings, dimensions = ROUTES[route]
    with contextlib.ExitStack() as stack:
        arguments = {"cpu": True}
        if route not in ("plain", "deepspeed"):
            arguments = stack.enter_context(stand_in_gpus(dimensions or None, **settings))
        accelerator = accelerate_presharded.Accelerator(**arguments)
        rank = accelerator.process_index
        shared = dimensions.get("tp", 1) * dimensions.get("cp", 1)
        size, index = accelerator.num_processes // shared, rank // shared
        if route == "deepspeed":
            stack.enter_context(stand_in_deepspeed(accelerator))

        detected = DataLoader(range(16), 2, sampler=DistributedSampler(range(16), size, index, shuffle=False))
        flagged = DataLoader(list(range(16))[index::size], 2)
        ordinary = DataLoader(range(16), 2)
        iterable = NoLoader([torch.tensor([index])])
        iterable.batch_size = 1
        objects = [detected, flagged, ordinary, iterable]
        flags = [None, True, None if route == "deepspeed" else False, True]
        if with_model:
            model = torch.nn.Linear(1, 1)
            objects += [model, torch.optim.SGD(model.parameters(), lr=0.1)]
            flags += [None, None]
        methods = []
        names = ("_prepare_fsdp2", "_prepare_tp", "_prepare_cp", "_prepare_deepspeed")
        for name in [each for each in names if hasattr(accelerator, each)]:
            real = getattr(accelerator, name)

            def noting(*args, name=name, real=real):
                methods.append(name)
                return real(*args)

            setattr(accelerator, name, noting)
        prepared = accelerator.prepare(*objects, already_sharded=flags)
        return {
            "methods": methods,
            "kinds": [type(loader).__name__ for loader in prepared[:4]],
            "same": [prepared[place].base_dataloader is objects[place] for place in (0, 1, 3)],
            "batches": [lists(loader) for loader in prepared[:4]],
            "place": (size, index),
            "known": [[known is loader for loader in prepared[:4]] for known in accelerator._dataloaders],
            # DeepSpeed itself refuses what Accelerate has prepared: it has no batch size any more.
            "again": route == "deepspeed"
            or list(map(id, accelerator.prepare(*prepared[:4]))) == list(map(id, prepared[:4])),
            "model": type(prepared[4]).__name__ if with_model else None,
        }


@parameterized.expand(
    [
        ("plain", 2, True, []),
        ("plain", 4, False, []),
        ("fsdp2", 2, True, ["_prepare_fsdp2"]),
        ("fsdp2", 4, False, ["_prepare_fsdp2"]),
        ("fsdp2 on a mesh", 4, True, ["_prepare_fsdp2"]),
        ("tp", 4, False, ["_prepare_tp"]),
        ("fsdp2 and tp", 4, False, ["_prepare_tp", "_prepare_fsdp2"]),
        ("fsdp2 and cp", 4, False, ["_prepare_cp", "_prepare_fsdp2"]),
        ("deepspeed", 2, False, ["_prepare_deepspeed"]),
        ("deepspeed", 4, False, ["_prepare_deepspeed"]),
    ]
)
def test_every_route_through_prepare(route, world_size, with_model, methods):
    settings, dimensions = ROUTES[route]
    if dimensions:
        needs_parallelism_config()
    if "fsdp" in settings:
        needs_fsdp2()
    per_rank = run(world_size, along_a_route, route, with_model)
    for result in per_rank:
        size, index = result["place"]
        assert result["methods"][: len(methods)] == methods
        assert result["kinds"] == ["PreshardedDataLoader", "PreshardedDataLoader", "DataLoaderShard"] + [
            "PreshardedDataLoader"
        ]
        assert result["same"] == [True] * 3
        mine = dealt(16, size, index)
        whole = [[item, item + 1] for item in range(0, 16, 2)]
        assert result["batches"] == [mine, mine, whole[index::size], [[index]]]
        # Each of them once.
        assert sorted(row.index(True) for row in result["known"]) == [0, 1, 2, 3]
        assert all(sum(row) == 1 for row in result["known"])
        assert result["again"]
        if with_model:
            assert result["model"] == ("FSDPLinear" if "fsdp2" in route else "DistributedDataParallel")


def deepspeed_with_an_ordinary_loader(call: bool | None, config: bool | None) -> tuple:
    def prepare(accelerator, **said):
        with stand_in_deepspeed(accelerator):
            prepared = accelerator.prepare(DataLoader(range(16), batch_size=2), **said)
            return type(prepared).__name__, lists(prepared)

    with_this_package, without = configured(already_sharded=config), accelerate.Accelerator(cpu=True)
    plain = prepare(without)
    try:
        ours = prepare(with_this_package, already_sharded=call)
    except ValueError as error:
        ours = str(error)
    return ours, plain


@parameterized.expand([(None, None), (False, None), (None, False)])
def test_deepspeed_finds_the_batch_size_of_an_ordinary_loader(call, config):
    # It reads the micro batch size off the loaders that `prepare` is called with, before they are prepared.
    for ours, plain in run(2, deepspeed_with_an_ordinary_loader, call, config):
        assert ours == plain


def deepspeed_mesh() -> tuple:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    with stand_in_deepspeed(accelerator):
        rank = accelerator.process_index
        accelerator.state.ds_device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sampler = DistributedSampler(range(16), 2, rank // 2, shuffle=False)
        prepared = accelerator.prepare(DataLoader(range(16), 2, sampler=sampler))
        wrong = raised(accelerator.prepare, marked(accelerator))
        return type(prepared).__name__, lists(prepared), wrong


def test_deepspeed_with_its_own_mesh():
    for rank, (kind, batches, wrong) in enumerate(run(4, deepspeed_mesh)):
        assert kind == "PreshardedDataLoader"
        assert batches == dealt(16, 2, rank // 2)
        assert wrong[0] == "ValueError"
        assert f"size 4 and index {rank}" in wrong[1] and f"size 2 and index {rank // 2}" in wrong[1]


# What cannot be combined


def with_settings(**settings) -> dict:
    accelerator = configured(**settings)
    function = functools.partial(
        accelerate_presharded.prepare_data_loader,
        put_on_device=True,
        device=torch.device("cpu"),
        **{name: value for name, value in settings.items() if name != "already_sharded"},
    )
    return {
        "detected": raised(accelerator.prepare, marked(accelerator)),
        "flagged": raised(accelerator.prepare, unmarked(accelerator), already_sharded=True),
        "stream": raised(accelerator.prepare, DataLoader(Stream(range(4)), 2), already_sharded=True),
        "method": raised(accelerator.prepare_data_loader, unmarked(accelerator), already_sharded=True),
        "function, detected": raised(function, marked(accelerator)),
        "function, flagged": raised(function, unmarked(accelerator), already_sharded=True),
        "ordinary": raised(accelerator.prepare, unmarked(accelerator), already_sharded=False),
        "forced": raised(accelerator.prepare, marked(accelerator), already_sharded=False),
    }


@parameterized.expand(
    [("dispatch_batches", 2), ("split_batches", 2), ("dispatch_batches", 3), ("split_batches", 1)],
)
def test_dispatching_and_splitting_are_refused(setting, world_size):
    for result in run(world_size, with_settings, **{setting: True}):
        assert result.pop("ordinary") is None
        assert result.pop("forced") is None
        if world_size == 1:
            # One process has nothing to detect.
            assert result.pop("detected") is None
            assert result.pop("function, detected") is None
        for place, error in result.items():
            assert error is not None, place
            kind, message = error
            assert kind == "ValueError", place
            assert f"{setting}=True" in message and "already_sharded" in message, place


def test_what_is_not_set_to_true_is_no_contradiction():
    for result in run(2, with_settings, dispatch_batches=False, split_batches=False, even_batches=False):
        assert set(result.values()) == {None}


# Sharded for others


def sharded_for_others(size: int, shift: int) -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    index = (accelerator.process_index + shift) % size

    def make_loader():
        return DataLoader(range(8 * size), 2, sampler=DistributedSampler(range(8 * size), size, index, shuffle=False))

    results = {}
    for name, prepare in (
        ("prepare", accelerator.prepare),
        ("method", accelerator.prepare_data_loader),
        ("function", accelerate_presharded.prepare_data_loader),
    ):
        results[name] = {"error": raised(prepare, make_loader())}
        for word in (True, False):
            with Logged() as lines:
                prepared = prepare(make_loader(), already_sharded=word)
            results[name][word] = lines, lists(prepared)
    return results


@parameterized.expand(
    # The number of ranks, the size that the sampler is built for, and by how much its index is off.
    [(2, 4, 0), (2, 3, 0), (3, 6, 1), (4, 8, 0), (2, 2, 1), (3, 3, 1), (4, 4, 2)]
)
def test_sharded_for_another_size_or_index(world_size, size, shift):
    for rank, results in enumerate(run(world_size, sharded_for_others, size, shift)):
        index = (rank + shift) % size
        bare = dealt(8 * size, size, index)
        for name, result in results.items():
            kind, message = result["error"]
            assert kind == "ValueError", name
            assert f"size {size} and index {index}" in message
            assert f"size {world_size} and index {rank}" in message
            assert "DistributedSampler" in message
            assert "already_sharded=True" in message and "already_sharded=False" in message

            # Said explicitly, it is done and remarked upon: a wrong size once, a wrong index by each rank that has one.
            for word in (True, False):
                lines, batches = result[word]
                said = [line for level, line in lines if level == "WARNING"]
                if rank == 0 or size == world_size:
                    assert len(said) == 1, said
                    assert f"size {size} and index {index}" in said[0]
                    assert f"size {world_size} and index {rank}" in said[0]
                    assert f"already_sharded={word}" in said[0]
                else:
                    assert said == []
                assert batches[:1] == (bare[:1] if word else bare[rank : rank + 1])
                assert len(batches) == (4 if word else -(-4 // world_size))


# What is logged


class Samples(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index


def logged(word: bool | None, maker: str) -> list:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    sampler = DistributedSampler(range(12), accelerator.num_processes, accelerator.process_index)
    loaders = {
        "detected": DataLoader(Samples(), 2, sampler=sampler),
        "ordinary": DataLoader(Samples(), 2),
        "shuffled": DataLoader(Samples(), 2, shuffle=True),
        "stream": DataLoader(SizedStream(range(12)), 2),
    }
    with Logged() as lines:
        prepared = accelerator.prepare(loaders[maker], already_sharded=word)
        if not (maker == "stream" and word is False):
            lists(prepared)
            accelerator.prepare(prepared)
    return lines


@parameterized.expand([(2,), (3,)])
def test_detection_says_so_once(world_size):
    first, *others = run(world_size, logged, None, "detected")
    assert others == [[]] * (world_size - 1)
    ((level, line),) = first
    assert level == "WARNING"
    assert "DataLoader over Samples" in line
    assert "DistributedSampler at loader.sampler" in line
    assert "already_sharded=True" in line and "already_sharded=False" in line


@parameterized.expand(
    [
        (True, "detected"),
        (True, "ordinary"),
        (True, "shuffled"),
        (True, "stream"),
        (False, "detected"),
        (False, "ordinary"),
        (None, "ordinary"),
        (None, "shuffled"),
    ]
)
def test_nothing_is_said_where_nothing_surprises(word, maker):
    assert run(2, logged, word, maker) == [[], []]


# One process


def alone() -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    plain = accelerate.Accelerator(cpu=True)

    def make_loader(kind):
        if kind == "marked for two":
            return DataLoader(range(12), 2, sampler=DistributedSampler(range(12), 2, 1, shuffle=False))
        if kind == "marked for one":
            return marked(accelerator)
        if kind == "rank batches":
            return DataLoader(range(6), batch_sampler=RankBatches([[0, 1, 2], [3], [4, 5]], 1, 0))
        return unmarked(accelerator)

    results = {}
    for kind in ("unmarked", "marked for one", "marked for two", "rank batches"):
        detected = accelerator.prepare(make_loader(kind))
        loader = make_loader(kind)
        flagged = accelerator.prepare(loader, already_sharded=True)
        results[kind] = {
            "detected": type(detected).__name__,
            "flagged": type(flagged).__name__,
            "same": flagged.base_dataloader is loader,
            "batches": [lists(detected), lists(flagged), lists(make_loader(kind)), lists(plain.prepare(loader))],
            "ends": [flagged.end_of_dataloader for _ in flagged],
        }
    return results


@parameterized.expand([("a group of one",), ("no group",)])
def test_one_process(group):
    results = alone() if group == "no group" else run(1, alone)[0]
    for kind, result in results.items():
        assert result["detected"] == "DataLoaderShard", kind
        assert result["flagged"] == "PreshardedDataLoader", kind
        assert result["same"], kind
        first, *others = result["batches"]
        assert others == [first] * 3, kind
        assert result["ends"] == [False] * (len(first) - 1) + [True], kind


# Prepared once


def prepared_before() -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    plain = accelerate.Accelerator(cpu=True)
    makers = {
        "our function": lambda: accelerate_presharded.prepare_data_loader(marked(accelerator)),
        "our method": lambda: accelerator.prepare_data_loader(unmarked(accelerator), already_sharded=True),
        "our method, ordinary": lambda: accelerator.prepare_data_loader(unmarked(accelerator)),
        "our class": lambda: PreshardedDataLoader(unmarked(accelerator)),
        "accelerate's function": lambda: accelerate.data_loader.prepare_data_loader(unmarked(accelerator)),
        "accelerate's function, marked": lambda: accelerate.data_loader.prepare_data_loader(marked(accelerator)),
        "accelerate's function, dispatching": lambda: accelerate.data_loader.prepare_data_loader(
            unmarked(accelerator), device=torch.device("cpu"), put_on_device=True, dispatch_batches=True
        ),
        "plain prepare": lambda: plain.prepare(unmarked(accelerator)),
    }
    results = {}
    for name, make in makers.items():
        for word in (None, True):
            accelerator._dataloaders.clear()
            prepared = make()
            kind = type(prepared)
            results[name, word] = {
                "same": [
                    again is prepared and type(again) is kind
                    for again in (
                        accelerate_presharded.prepare_data_loader(prepared, already_sharded=word),
                        accelerator.prepare_data_loader(prepared, already_sharded=word),
                        accelerator.prepare(prepared, already_sharded=word),
                        accelerator.prepare(prepared, {}, already_sharded=word)[0],
                        configured(already_sharded=True).prepare(prepared),
                        configured(already_sharded=False).prepare(prepared),
                    )
                ],
                "known": len(accelerator._dataloaders) == 1 and accelerator._dataloaders[0] is prepared,
            }
    return results


def test_a_prepared_loader_is_returned_unchanged():
    for results in run(2, prepared_before):
        assert len(results) == 16
        for case, result in results.items():
            assert result == {"same": [True] * 6, "known": True}, case


# Iterables of batches that are no DataLoader


def iterables() -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    rank = accelerator.process_index
    batches = [torch.tensor([10 * rank + step]) for step in range(3)]
    given = NoLoader(batches), NoLoader(batches), NoLoader(batches)
    by_prepare = accelerator.prepare(given[0], already_sharded=True)
    by_method = accelerator.prepare_data_loader(given[1], already_sharded=True)
    by_config = configured(already_sharded=True).prepare(given[2])
    prepared = by_prepare, by_method, by_config
    left = [
        accelerator.prepare(given[0]),
        accelerator.prepare(given[0], already_sharded=False),
        accelerator.prepare(given[0], already_sharded=[None]),
    ]
    return {
        "kinds": [(type(loader).__name__, isinstance(loader, DataLoader)) for loader in prepared],
        "same": [loader.base_dataloader is iterable for loader, iterable in zip(prepared, given)],
        "batches": [lists(loader) for loader in prepared],
        "ends": [[loader.end_of_dataloader for _ in loader] for loader in prepared],
        "known": [known is loader for known, loader in zip(accelerator._dataloaders, prepared)],
        "left alone": [obj is given[0] for obj in left],
    }


def test_any_iterable_of_batches_with_true():
    for rank, result in enumerate(run(2, iterables)):
        assert result["kinds"] == [("PreshardedDataLoader", True)] * 3
        assert result["same"] == [True] * 3
        assert result["batches"] == [[[10 * rank], [10 * rank + 1], [10 * rank + 2]]] * 3
        assert result["ends"] == [[False, False, True]] * 3
        assert result["known"] == [True, True]
        assert result["left alone"] == [True] * 3


# Ordinary loaders are Accelerate's own


def portrait(obj, depth: int = 6):
    """An object's class and attributes, and theirs, as far as two objects made in the same way have them in common."""
    if obj is None or isinstance(obj, (bool, int, float, str, bytes, torch.device, range)):
        return obj
    if isinstance(obj, enum.Enum):
        return str(obj)
    if isinstance(obj, torch.Generator):
        return hashlib.sha256(obj.get_state().numpy().tobytes()).hexdigest()
    if isinstance(obj, torch.Tensor):
        return obj.tolist()
    if callable(obj) and hasattr(obj, "__qualname__"):
        return obj.__qualname__
    kind = type(obj).__qualname__
    if depth == 0 or isinstance(obj, (GradientState, PartialState)):
        return kind
    if isinstance(obj, dict):
        return kind, {name: portrait(value, depth - 1) for name, value in obj.items()}
    if isinstance(obj, (list, tuple, set)):
        return kind, [portrait(value, depth - 1) for value in obj]
    return kind, {name: portrait(value, depth - 1) for name, value in getattr(obj, "__dict__", {}).items()}


def attempted(function):
    try:
        return portrait(function())
    except Exception as error:
        return type(error).__name__, str(error)


def record(make_loader, prepare) -> dict:
    """All that can be seen of a loader, from before it is prepared until two passes later."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(rank)
    result = {}
    state = GradientState()

    def passes():
        for _ in range(2):
            result["passes"].append([])
            for batch in prepared:
                row = portrait(batch), prepared.end_of_dataloader, prepared.remainder, state.remainder
                result["passes"][-1].append(row)

    with Logged() as lines, collectives() as calls:
        loader = make_loader()
        try:
            prepared = prepare(loader)
            result["class"] = type(prepared), isinstance(prepared, DataLoader)
            result["vars"] = portrait(prepared)
            result["given"] = portrait(loader)
            result["calls in prepare"] = list(calls)
            for name in ("total_batch_size", "total_dataset_length"):
                result[name] = attempted(lambda name=name: getattr(prepared, name))
            result["length"] = attempted(lambda: len(prepared))
            result["passes"] = []
            passes()
            result["vars after"] = portrait(prepared)
        except Exception as error:
            result["error"] = type(error).__name__, str(error)
            state.dataloader_references = [None]
    result["calls"] = calls
    result["lines"] = lines
    result["random"] = torch.rand(1).item()
    return result


def first_difference(ours, plain) -> tuple[str, str]:
    """Two long values from a little before the place where they begin to differ, short enough for a message."""
    texts = str(ours), str(plain)
    start = next((place for place, (one, other) in enumerate(zip(*texts)) if one != other), min(map(len, texts)))
    return tuple(text[max(0, start - 100) : start + 100] for text in texts)


def compared(cases) -> dict:
    """Run cases with this package and with plain Accelerate: `(name, make_loader, prepare_ours, prepare_plain)`."""
    summary: dict = {"different": {}, "classes": collections.Counter(), "errors": collections.Counter(), "calls": 0}
    for name, make_loader, prepare_ours, prepare_plain in cases():
        plain, ours = record(make_loader, prepare_plain), record(make_loader, prepare_ours)
        different = [key for key in {**ours, **plain} if ours.get(key) != plain.get(key)]
        if different:
            key = different[0]
            summary["different"][name] = (different, *first_difference(ours.get(key), plain.get(key)))
        if "class" in plain:
            summary["classes"][plain["class"][0].__name__] += 1
        if "error" in plain:
            summary["errors"][plain["error"][0]] += 1
        summary["calls"] += len(plain["calls"])
    return summary


def with_accelerators(word: bool | None = None, device_placement=True, rng_types=None, method=None, **settings):
    """How this package prepares a loader with some settings, and how plain Accelerate does."""
    both = []
    for package, config, said in (
        (accelerate_presharded, DataLoaderConfiguration, {} if word is None else {"already_sharded": word}),
        (accelerate, accelerate.DataLoaderConfiguration, CUT),
    ):
        accelerator = package.Accelerator(
            cpu=True,
            device_placement=device_placement,
            rng_types=None if rng_types is None else list(rng_types),
            dataloader_config=config(**settings),
        )
        both.append(functools.partial(accelerator.prepare if method is None else method(accelerator), **said))
    return both


# The batch size, and `split_batches`: two ranks can split both sizes, and three only one of them.
SIZES = [(4, False), (4, True), (6, True)]


def grid_of_datasets():
    """Settings and loaders of map-style datasets, all with all."""
    for (batch_size, split), drop_last, shuffle, (even, dispatch) in itertools.product(
        SIZES, (False, True), ("no", "yes", "generator"), ((True, None), (False, None), (True, True))
    ):
        for seedable in (False, True) if shuffle != "no" else (False,):

            def make_loader(batch_size=batch_size, drop_last=drop_last, shuffle=shuffle):
                return DataLoader(
                    range(21),
                    batch_size=batch_size,
                    drop_last=drop_last,
                    shuffle=shuffle != "no",
                    generator=seeded(3) if shuffle == "generator" else None,
                )

            settings = {
                "even_batches": even,
                "split_batches": split,
                "dispatch_batches": dispatch,
                "use_seedable_sampler": seedable,
            }
            yield (batch_size, drop_last, shuffle, *settings.values()), make_loader, *with_accelerators(**settings)


class WithGenerator(SizedStream):
    """A stream that shuffles, the way Accelerate keeps in step by itself."""

    def __init__(self, items):
        super().__init__(items)
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(len(self.items), generator=self.generator).tolist())


def grid_of_streams():
    for (batch_size, split), drop_last, dispatch, kind in itertools.product(
        SIZES, (False, True), (None, True, False), (Stream, SizedStream, WithGenerator)
    ):

        def make_loader(batch_size=batch_size, drop_last=drop_last, kind=kind):
            return DataLoader(kind(range(21)), batch_size=batch_size, drop_last=drop_last)

        settings = {"split_batches": split, "dispatch_batches": dispatch}
        name = (batch_size, drop_last, kind.__name__, *settings.values())
        yield name, make_loader, *with_accelerators(**settings)


class Seeding(Dataset):
    """Keeps its rank to seed its augmentations, and has all the data on every rank."""

    def __init__(self):
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.num_shards = self.n_shards = 8

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return index


class Subclass(DataLoader):
    def __iter__(self):
        return (1000 * batch for batch in super().__iter__())


class NoBatches(Stream):
    """Tensors of two numbers, to be used without batches."""

    def __iter__(self):
        return (torch.tensor([item, item]) for item in self.items)


def joined(samples):
    return {"numbers": torch.tensor(samples), "texts": [str(sample) for sample in samples]}


def other_loaders():
    plain = with_accelerators()
    loaders = {
        "batch_size=None": lambda: DataLoader(torch.arange(12), batch_size=None),
        "batch sampler as sampler": lambda: DataLoader(
            torch.arange(21), batch_size=None, sampler=BatchSampler(range(21), 4, False)
        ),
        "batches of any size": lambda: DataLoader(range(6), batch_sampler=[[0, 1, 2], [3], [4, 5]]),
        "batch sampler": lambda: DataLoader(range(21), batch_sampler=BatchSampler(range(20, -1, -1), 4, True)),
        "list as sampler": lambda: DataLoader(range(21), batch_size=4, sampler=[5, 3, 20, 7, 9]),
        "weighted": lambda: DataLoader(range(21), batch_size=4, sampler=WeightedRandomSampler(range(1, 22), 17)),
        "cut for one": lambda: DataLoader(range(21), 4, sampler=DistributedSampler(range(21), 1, 0)),
        "seeding": lambda: DataLoader(Seeding(), batch_size=4, shuffle=True),
        "subclass": lambda: Subclass(range(21), batch_size=4),
        "collate_fn": lambda: DataLoader(range(21), batch_size=4, collate_fn=joined),
        "empty": lambda: DataLoader([], batch_size=4),
        "smaller than the ranks": lambda: DataLoader(range(1), batch_size=4),
    }
    for name, make_loader in loaders.items():
        yield name, make_loader, *plain

    def stream():
        return DataLoader(NoBatches(range(12)), batch_size=None)

    for dispatch in (None, False):
        yield ("stream without batches", dispatch), stream, *with_accelerators(dispatch_batches=dispatch)

    def dataset():
        return DataLoader(range(21), batch_size=4, shuffle=True)

    for name, settings in {
        "device_placement": {"device_placement": False},
        "dispatching without placement": {"device_placement": False, "dispatch_batches": True},
        "non_blocking": {"non_blocking": True},
        "data_seed": {"use_seedable_sampler": True, "data_seed": 5},
        "stateful": {"use_stateful_dataloader": True},
        "rng_types": {"rng_types": ["torch", "generator"]},
        "said": {"word": False},
        "method": {"method": lambda accelerator: accelerator.prepare_data_loader},
        "method with a placement": {
            "method": lambda accelerator: lambda loader, **said: accelerator.prepare_data_loader(loader, False, **said)
        },
        "method with a slicing function": {
            "dispatch_batches": True,
            "method": lambda accelerator: (
                lambda loader, **said: accelerator.prepare_data_loader(
                    loader, slice_fn_for_dispatch=reversed_slice, **said
                )
            ),
        },
        "skipping": {
            "method": lambda accelerator: (
                lambda loader, **said: accelerator.skip_first_batches(accelerator.prepare(loader, **said), 2)
            )
        },
    }.items():
        yield name, dataset, *with_accelerators(**settings)
    for name, settings in {
        "nothing": {},
        "placed": {"device": torch.device("cpu"), "put_on_device": True, "non_blocking": True},
        "for others": {"num_processes": 4, "process_index": 1, "even_batches": False},
        "for one": {"num_processes": 1, "process_index": 0},
        "dispatching": {"device": torch.device("cpu"), "put_on_device": True, "dispatch_batches": True},
        "dispatching without placement": {"dispatch_batches": True},
        "slicing function": {
            "device": torch.device("cpu"),
            "put_on_device": True,
            "dispatch_batches": True,
            "slice_fn_for_dispatch": reversed_slice,
        },
        "splitting": {"split_batches": True, "num_processes": 2},
        "splitting what cannot be": {"split_batches": True, "num_processes": 3},
        "generator": {"rng_types": ["generator"]},
        "no generator": {"rng_types": ["generator", "torch"], "num_processes": 1, "process_index": 0},
        "seedable": {"use_seedable_sampler": True, "data_seed": 4},
    }.items():
        yield (
            ("function", name),
            dataset,
            functools.partial(accelerate_presharded.prepare_data_loader, **copied(settings)),
            functools.partial(accelerate.data_loader.prepare_data_loader, **copied(settings), **CUT),
        )


def copied(settings: dict) -> dict:
    """With lists of their own: Accelerate removes things from them."""
    return {name: list(value) if isinstance(value, list) else value for name, value in settings.items()}


def reversed_slice(batch, part, process_index=None, num_processes=None):
    return accelerate.utils.slice_tensors(batch, part).flip(0)


def grid_of_workers():
    for name, settings, data in (
        ("dataset", {}, range(21)),
        ("dispatched dataset", {"dispatch_batches": True}, range(21)),
        ("stream", {"dispatch_batches": False}, Stream(range(21))),
    ):

        def make_loader(data=data):
            return DataLoader(data, batch_size=4, num_workers=2)

        yield name, make_loader, *with_accelerators(**settings)


def forced():
    """Loaders that are sharded already, and are to be sharded once more."""

    def rank_batches():
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        return DataLoader(range(30), batch_sampler=RankBatches([[0, 1, 2], [3], [4, 5], [6], [7, 8]], size, rank))

    for shuffle, settings in itertools.product(
        (True, False), ({}, {"even_batches": False}, {"split_batches": True}, {"dispatch_batches": True})
    ):

        def make_loader(shuffle=shuffle):
            sampler = DistributedSampler(
                range(36), torch.distributed.get_world_size(), torch.distributed.get_rank(), shuffle=shuffle
            )
            return DataLoader(range(36), batch_size=6, sampler=sampler)

        yield (shuffle, str(settings)), make_loader, *with_accelerators(word=False, **settings)
    yield "rank batches", rank_batches, *with_accelerators(word=False)


GRIDS = {
    "datasets": grid_of_datasets,
    "streams": grid_of_streams,
    "workers": grid_of_workers,
    "others": other_loaders,
    "forced": forced,
}


@parameterized.expand(list(itertools.product(GRIDS, (1, 2, 3))))
def test_ordinary_loaders_are_accelerates_own(name, world_size):
    for rank, summary in enumerate(run(world_size, compared, GRIDS[name], timeout=120)):
        assert not summary["different"], f"rank {rank}: {list(summary['different'].items())[:3]}"
        # What is compared are loaders in use, and not one error with another.
        assert sum(summary["classes"].values()) >= 2 * sum(summary["errors"].values())
        assert summary["calls"] > 0
