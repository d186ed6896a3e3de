# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What the ranks say to each other at `prepare`: they settle on one plan, or all hear the same error in time."""

import itertools
import time
from unittest import mock

import accelerate
import accelerate.data_loader
import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized
from ranks import Failure, run
from shared import (
    Logged,
    RankBatches,
    Stream,
    collectives,
    dealt,
    flat,
    lists,
    needs_an_end_of_groups,
    needs_parallelism_config,
    raised,
    stand_in_gpus,
)
from torch.utils.data import DataLoader, DistributedSampler

from accelerate_presharded import Accelerator, DataLoaderConfiguration, prepare_data_loader
from accelerate_presharded.agreement import (
    TIMEOUT_VARIABLE,
    Facts,
    Plan,
    agree,
    can_speak,
    settle,
    timeout_from_environment,
)


WORLD_SIZES = [(2,), (3,), (4,)]
PROMPT = 15.0  # seconds; the deadline is 60


pytestmark = pytest.mark.usefixtures("fresh_state")


# settle


def fact(rank: int, **changes) -> Facts:
    """One of three ranks with a shard of its own, 4 batches of 2 samples."""
    said = {
        "rank": rank,
        "num_processes": 3,
        "process_index": rank,
        "loader": "The DataLoader over Letters",
        "num_shards": 3,
        "index": rank,
        "num_batches": 4,
        "num_samples": 8,
    }
    return Facts(**{**said, **changes})


def facts(**changes: list) -> list[Facts]:
    """The facts of all ranks. Each change is a list with one value for each rank."""
    number = len(next(iter(changes.values())))
    sizes = {"num_processes": [number] * number, "num_shards": [number] * number}
    return [
        fact(rank, **{name: values[rank] for name, values in {**sizes, **changes}.items()}) for rank in range(number)
    ]


def error_of(said: list[Facts]) -> str:
    """The message with which `settle` refuses, the same for every order of the facts."""
    messages = set()
    for order in itertools.permutations(said):
        with pytest.raises(ValueError) as caught:
            settle(order)
        messages.add(str(caught.value))
    assert len(messages) == 1
    message = messages.pop()
    assert "The DataLoader over Letters" in message
    return message


class TestSettle:
    def test_the_counts(self):
        plan = settle(facts(num_batches=[4, 2, 5], num_samples=[8, 3, 9]))
        assert plan == Plan(2, 5, 1, 2, drop_last=False, num_samples=20)
        assert plan.steps() == 5

    def test_all_drop_the_last(self):
        plan = settle(facts(num_batches=[4, 2, 5], num_samples=[8, 5, 11], drop_last=[True] * 3))
        assert plan == Plan(2, 5, 1, 2, drop_last=True, num_samples=24)
        assert plan.steps() == 2

    def test_some_drop_the_last(self):
        # One rank that keeps its last batch would lose it if all stopped at the shortest.
        assert settle(facts(num_batches=[4, 2, 5], drop_last=[True, False, True])).steps() == 5

    def test_any_order(self):
        said = facts(num_batches=[4, 2, 5], num_samples=[8, 3, 9])
        assert len({settle(order) for order in itertools.permutations(said)}) == 1

    def test_one_unknown_count_is_enough(self):
        plan = settle(facts(num_batches=[4, None, 5], num_samples=[8, 3, 9], drop_last=[True] * 3))
        assert plan == Plan(drop_last=True, num_samples=20)
        assert plan.steps() is None
        assert settle(facts(num_samples=[8, None, 9])).num_samples is None
        assert settle(facts(num_samples=[8, None, 9])).steps() == 4

    def test_no_mark_no_question(self):
        assert settle(facts(num_shards=[None] * 3, index=[None] * 3)).steps() == 4
        assert settle(facts(num_shards=[1] * 3, index=[0] * 3)).steps() == 4

    def test_ranks_that_share_a_batch_are_counted_once(self):
        shared = {"num_processes": [2] * 4, "num_shards": [2] * 4}
        plan = settle(
            facts(
                process_index=[0, 0, 1, 1],
                index=[0, 0, 1, 1],
                num_batches=[2, 2, 3, 3],
                num_samples=[3, 3, 5, 5],
                **shared,
            )
        )
        assert (plan.shortest, plan.longest, plan.num_samples) == (2, 3, 8)
        assert plan.shortest_rank in (0, 1) and plan.longest_rank in (2, 3)

    def test_nobody_has_a_batch(self):
        plan = settle(facts(num_batches=[0, 0, 0], num_samples=[0, 0, 0]))
        assert plan.steps() == 0
        assert plan.num_samples == 0

    def test_different_sizes(self):
        message = error_of(facts(num_processes=[3, 2, 3]))
        assert "rank 0 says 3" in message and "rank 1 says 2" in message

    def test_the_same_shard(self):
        message = error_of(facts(index=[0, 1, 1]))
        assert "ranks 1 and 2" in message and "shard 1 of 3" in message
        assert "already_sharded=False" in message

    def test_the_same_data_parallel_index_and_different_shards(self):
        message = error_of(
            facts(num_processes=[2] * 4, num_shards=[4] * 4, process_index=[0, 0, 1, 1], index=[0, 1, 2, 3])
        )
        assert "ranks 0 and 1" in message and "0 of 4" in message and "1 of 4" in message

    @parameterized.expand([(False,), (True,)])
    def test_an_empty_rank(self, drop_last):
        message = error_of(facts(num_batches=[2, 0, 3], drop_last=[drop_last] * 3))
        assert "rank 1 has no batch" in message and "rank 2 has some" in message
        assert "even_batches=False" in message
        assert "ranks 0, 2 have no batch" in error_of(facts(num_batches=[0, 1, 0]))

    def test_an_empty_rank_among_uneven_ones(self):
        plan = settle(facts(num_batches=[2, 0, 3], even_batches=[False] * 3))
        assert (plan.shortest, plan.longest) == (0, 3)

    def test_many_empty_ranks(self):
        with pytest.raises(ValueError, match="ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more have no batch"):
            settle(facts(num_batches=[1] + [0] * 11))


class TestTimeout:
    @parameterized.expand([("2", 2.0), ("0.5", 0.5), ("1e3", 1000.0), ("", 60.0), (None, 60.0)])
    def test_good_values(self, text, seconds):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(TIMEOUT_VARIABLE, raising=False)
            if text is not None:
                patch.setenv(TIMEOUT_VARIABLE, text)
            assert timeout_from_environment() == seconds

    @parameterized.expand([("0",), ("-1",), ("soon",), ("nan",), ("1 s",)])
    def test_bad_values(self, text):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TIMEOUT_VARIABLE, text)
            with pytest.raises(ValueError, match=f"{TIMEOUT_VARIABLE}.*{text}"):
                timeout_from_environment()

    def test_a_bad_value_is_heard_at_prepare(self):
        for error in run(2, lambda: raised(prepare_own, 8), env={TIMEOUT_VARIABLE: "soon"}):
            assert error[0] == "ValueError" and TIMEOUT_VARIABLE in error[1] and "soon" in error[1]


# agree


def own_loader(length: int, index: int | None = None) -> DataLoader:
    """A loader with torch's sampler for this rank, or for another index."""
    index = dist.get_rank() if index is None else index
    return DataLoader(
        range(length), batch_size=2, sampler=DistributedSampler(range(length), dist.get_world_size(), index, False)
    )


def prepare_own(length: int):
    return Accelerator(cpu=True).prepare(own_loader(length))


def timed(function, *args, **kwargs) -> tuple:
    """The error of a call, and how many seconds it took."""
    start = time.monotonic()
    error = raised(function, *args, **kwargs)
    return error, time.monotonic() - start


def only_text(errors: list) -> str:
    """The message that all ranks have heard."""
    assert all(error is not None for error in errors), errors
    assert {kind for kind, _ in errors} == {"ValueError"}
    assert len({text for _, text in errors}) == 1, errors
    return errors[0][1]


def disagree(ordinary: list[int], late: list[int], flags: bool) -> tuple:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank in late:
        time.sleep(0.4)
    loader = own_loader(8) if flags or rank not in ordinary else DataLoader(range(8), batch_size=2)
    return timed(accelerator.prepare, loader, already_sharded=rank not in ordinary if flags else None)


@parameterized.expand(
    [
        (2, [0], [0], False),
        (2, [1], [0], True),
        (3, [0, 1], [2], False),
        (4, [1, 2], [1, 3], False),
    ]
)
def test_ranks_that_disagree(world_size, ordinary, late, flags):
    per_rank = run(world_size, disagree, ordinary, late, flags)
    presharded = [rank for rank in range(world_size) if rank not in ordinary]
    text = only_text([per_rank[rank][0] for rank in presharded])
    assert f"already sharded on rank {presharded[0]}, but on rank {ordinary[0]}" in text
    assert "already_sharded=True" in text and "already_sharded=False" in text
    assert [per_rank[rank][0] for rank in ordinary] == [None] * len(ordinary)
    assert all(seconds < PROMPT for _, seconds in per_rank)


def same_shard(indices: list[int], flag: bool | None) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = own_loader(8, indices[accelerator.process_index])
    return timed(accelerator.prepare, loader, already_sharded=flag)


@parameterized.expand([([0, 0],), ([0, 1, 1],), ([2, 1, 2],), ([3, 1, 2, 1],)])
def test_the_same_shard_twice_explicit(indices):
    per_rank = run(len(indices), same_shard, indices, True)
    text = only_text([error for error, _ in per_rank])
    first, second = next(pair for pair in itertools.combinations(range(len(indices)), 2) if is_same(indices, pair))
    assert f"ranks {first} and {second} both read shard {indices[first]} of {len(indices)}" in text
    assert all(seconds < PROMPT for _, seconds in per_rank)


def is_same(indices: list[int], pair: tuple[int, int]) -> bool:
    return indices[pair[0]] == indices[pair[1]]


@parameterized.expand([([0, 0], 1), ([1, 1], 0), ([0, 1, 1], 2), ([0, 1, 2, 0], 3)])
def test_the_same_shard_twice_detected(indices, refusing):
    world_size = len(indices)
    per_rank = run(world_size, same_shard, indices, None)
    own = per_rank[refusing][0]
    assert own[0] == "ValueError"
    assert f"size {world_size} and index {indices[refusing]}" in own[1]
    assert f"size {world_size} and index {refusing}" in own[1]
    text = only_text([error for rank, (error, _) in enumerate(per_rank) if rank != refusing])
    assert f"Rank {refusing}" in text and own[1] in text
    assert all(seconds < PROMPT for _, seconds in per_rank)


def settings_of_one_rank(kind: str, name: str) -> tuple:
    """The last rank has another setting than the others."""
    accelerate.PartialState(cpu=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    changed = {"even_batches": False, "dispatch_batches": True, "split_batches": True}[name]
    config = DataLoaderConfiguration(**({name: changed} if rank == world_size - 1 else {}))
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = own_loader(8) if kind == "map-style" else DataLoader(Stream(list(range(rank + 1))))
    return timed(lambda: list(accelerator.prepare(loader, already_sharded=True)))


@parameterized.expand(
    [
        (2, "map-style", "even_batches"),
        (2, "stream", "even_batches"),
        (3, "stream", "even_batches"),
        (2, "map-style", "dispatch_batches"),
        (3, "stream", "dispatch_batches"),
        (2, "map-style", "split_batches"),
    ]
)
def test_a_setting_of_one_rank_alone(world_size, kind, name):
    outcomes = run(world_size, settings_of_one_rank, kind, name, timeout=8.0, outcomes=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for error, _ in outcomes:
        assert error is not None and error[0] == "ValueError"
        assert f"ank {world_size - 1}" in error[1] and name in error[1]


def absent(ranks: list[int]) -> tuple:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index in ranks:
        return None, 0.0
    return timed(accelerator.prepare, own_loader(8))


@parameterized.expand([(2, [1]), (3, [0]), (4, [0, 3])])
def test_a_rank_that_never_arrives(world_size, ranks):
    per_rank = run(world_size, absent, ranks, env={TIMEOUT_VARIABLE: "1.5"})
    waiting = [outcome for rank, outcome in enumerate(per_rank) if rank not in ranks]
    text = only_text([error for error, _ in waiting])
    assert ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) in text
    assert "1.5 seconds" in text and TIMEOUT_VARIABLE in text and "already_sharded=False" in text
    # The first hears of it when its own time is up, and all others at once.
    assert all(seconds < 1.5 + PROMPT / 3 for _, seconds in waiting)
    assert max(seconds for _, seconds in waiting) > 1.4


def late(ranks: list[int], delay: float) -> tuple:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index in ranks:
        time.sleep(delay)
    prepared = []
    error, seconds = timed(lambda: prepared.append(accelerator.prepare(own_loader(8 * accelerator.num_processes))))
    return error, seconds, [lists(loader) for loader in prepared]


@parameterized.expand([(2, [0]), (3, [1, 2]), (4, [2])])
def test_a_rank_that_comes_too_late_hears_the_same(world_size, ranks):
    per_rank = run(world_size, late, ranks, 1.5, env={TIMEOUT_VARIABLE: "0.5"})
    text = only_text([error for error, _, _ in per_rank])
    assert "0.5 seconds" in text and all(str(rank) in text for rank in ranks)
    assert all(per_rank[rank][1] < PROMPT for rank in ranks)


@parameterized.expand([(2, [0]), (3, [1, 2]), (4, [2])])
def test_a_rank_that_comes_later_but_in_time(world_size, ranks):
    per_rank = run(world_size, late, ranks, 1.3, env={TIMEOUT_VARIABLE: "30"})
    assert [error for error, _, _ in per_rank] == [None] * world_size
    assert [batches for _, _, batches in per_rank] == [
        [dealt(8 * world_size, world_size, rank)] for rank in range(world_size)
    ]
    waiting = [seconds for rank, (_, seconds, _) in enumerate(per_rank) if rank not in ranks]
    assert all(1.0 < seconds < PROMPT for seconds in waiting)


def agree_directly() -> tuple:
    rank = dist.get_rank()
    said = fact(rank, num_processes=2, num_shards=2, num_batches=3 + rank, num_samples=5 + rank)
    plan = agree(said, timeout=30.0)
    return plan, timed(agree, said, timeout=0.4) if rank else None


def test_agree_with_a_timeout_of_its_own():
    (plan, _), (same, (error, seconds)) = run(2, agree_directly)
    assert plan == same == Plan(3, 4, 0, 1, num_samples=11)
    assert error[0] == "ValueError" and "0.4 seconds" in error[1] and "rank 0" in error[1]
    assert 0.3 < seconds < PROMPT


# ordinary loaders


def ordinary_adds_nothing() -> list:
    ours, plain = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    results = []
    for accelerator in (ours, plain):
        with collectives() as calls:
            loader = accelerator.prepare(DataLoader(range(9), batch_size=2))
            list(loader)
            stream = accelerator.prepare(DataLoader(Stream(list(range(9))), batch_size=2))
            list(stream)
        results.append((calls, type(loader) is accelerate.data_loader.DataLoaderShard, type(stream).__name__))
    return results


@parameterized.expand(WORLD_SIZES)
def test_an_ordinary_loader_adds_no_collective(world_size):
    for ours, plain in run(world_size, ordinary_adds_nothing):
        assert ours == plain
        assert ours[1]
        assert len(ours[0]) > 0  # reading a stream on one rank for all does take some


def prepare_here(accelerator, loader):
    """One line that prepares everything."""
    return accelerator.prepare(loader)


def main_process_alone(through: str, pause: float) -> tuple:
    """Prepare ordinary loaders on the main process, and presharded ones on all, in turn."""
    accelerator = Accelerator(cpu=True)
    length = 4 * accelerator.num_processes
    prepare = accelerator.prepare if through == "lines" else lambda loader: prepare_here(accelerator, loader)

    def ordinary():
        if not accelerator.is_main_process:
            return None
        start = time.monotonic()
        with collectives() as calls:
            loader = prepare(DataLoader(range(length), batch_size=2))
        assert not calls
        seconds = time.monotonic() - start
        time.sleep(pause)
        return lists(loader), seconds

    if through != "loop":
        before = ordinary()
        first = prepare(own_loader(length))
        between = ordinary()
        second = prepare(own_loader(length))
        third = prepare(own_loader(length))
        after = ordinary()
        return [before, between, after], [lists(loader) for loader in (first, second, third)]
    # Everything from the same line of the same place, the main process' own loaders included.
    alone, together = [], []
    for kind in "OPOPPO":
        if kind == "P" or accelerator.is_main_process:
            loader = prepare(own_loader(length) if kind == "P" else DataLoader(range(length), batch_size=2))
            if kind == "O":
                time.sleep(pause)
            (together if kind == "P" else alone).append(lists(loader) if kind == "P" else (lists(loader), 0.0))
    return alone, together


@parameterized.expand(
    [(size, through, 0.0) for size in (2, 3) for through in ("lines", "helper", "loop")]
    # Longer than a rank waits before it looks around for the reason.
    + [(2, "helper", 1.3), (2, "loop", 1.3)]
)
def test_an_ordinary_loader_on_the_main_process_alone(world_size, through, pause):
    per_rank = run(world_size, main_process_alone, through, pause)
    length = 4 * world_size
    every = [[item, item + 1] for item in range(0, length, 2)]
    for rank, (alone, together) in enumerate(per_rank):
        assert together == [dealt(length, world_size, rank)] * 3
        if rank == 0:
            assert [batches for batches, _ in alone] == [every[::world_size]] * 3
            assert all(seconds < 1.0 for _, seconds in alone)


class Marked(list):
    """A dataset with a mark of its contents, as Hugging Face Datasets have."""

    def __init__(self, items, fingerprint):
        super().__init__(items)
        self._fingerprint = fingerprint


def different_datasets(per_rank: list[tuple[int, str | None]], flag: bool | None, times: int) -> list[str]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    length, fingerprint = per_rank[rank]
    dataset = list(range(length)) if fingerprint is None else Marked(range(length), fingerprint)
    results = []
    for number in range(times):
        # Whoever comes first.
        time.sleep(0.03 * ((rank + number) % accelerator.num_processes))
        with Logged() as lines:
            accelerator.prepare(DataLoader(dataset, batch_size=2), already_sharded=flag)
        dist.barrier()
        results.append([text for level, text in lines if level == "WARNING"])
    return results


@parameterized.expand(
    [
        ("length", [(8, None), (10, None)], ("length 8", "length 10")),
        ("length", [(8, None), (8, None), (11, None)], ("length 8", "length 11")),
        ("all lengths", [(8, None), (9, None), (10, None), (11, None)], ("length",)),
        ("fingerprint", [(8, "f00d"), (8, "beef")], ("fingerprint f00d", "fingerprint beef")),
        ("fingerprint", [(8, "f00d"), (8, "beef"), (8, "f00d")], ("fingerprint f00d", "fingerprint beef")),
    ]
)
def test_case_02_ordinary_loaders_over_different_datasets(_, datasets, names):
    times = 4
    per_rank = run(len(datasets), different_datasets, datasets, None, times)
    for number in range(times):
        said = flat([results[number] for results in per_rank])
        assert len(said) == 1, said
        assert all(name in said[0] for name in names)
        assert "already_sharded=True" in said[0] and "already_sharded=False" in said[0]


@parameterized.expand(
    [
        ("equal", [(8, None), (8, None), (8, None)], None),
        ("equal with a mark", [(8, "f00d"), (8, "f00d")], None),
        ("said to be sharded", [(8, None), (10, None), (8, None)], True),
        ("said to be whole", [(8, None), (10, None), (8, None)], False),
        ("said to be whole, with a mark", [(8, "f00d"), (8, "beef")], False),
    ]
)
def test_nothing_is_said_where_all_is_well(_, datasets, flag):
    for results in run(len(datasets), different_datasets, datasets, flag, 3):
        assert results == [[], [], []]


# numbers that are not the group's


def test_numbers_without_a_process_group():
    assert not can_speak(2, 0)
    loader = prepare_data_loader(
        DataLoader(range(9), batch_size=2, sampler=DistributedSampler(range(9), 2, 0, shuffle=False)),
        num_processes=2,
        process_index=0,
    )
    assert lists(loader) == [[0, 2], [4, 6], [8]]
    assert len(loader) == 3
    assert loader.total_batch_size == 4
    own = prepare_data_loader(
        DataLoader(range(5), batch_size=2), num_processes=2, process_index=1, already_sharded=True
    )
    assert lists(own) == [[0, 1], [2, 3], [4]]


def numbers_of_another_group() -> tuple:
    rank = dist.get_rank()
    half = rank // 2
    length = 8 + 4 * half
    sampler = DistributedSampler(range(length), 2, half, shuffle=False)
    with collectives() as calls:
        loader = prepare_data_loader(
            DataLoader(range(length), batch_size=2, sampler=sampler), num_processes=2, process_index=half
        )
        batches = lists(loader)
        stream = prepare_data_loader(
            DataLoader(Stream(list(range(rank + 1)))), num_processes=2, process_index=half, already_sharded=True
        )
        streamed = lists(stream)
    return can_speak(2, half), len(loader), batches, streamed, calls


def test_numbers_of_another_group():
    for rank, (speaks, length, batches, streamed, calls) in enumerate(run(4, numbers_of_another_group)):
        half = rank // 2
        assert not speaks
        assert batches == dealt(8 + 4 * half, 2, half)
        assert length == 2 + half
        assert streamed == [[item] for item in range(rank + 1)]
        assert calls == []


# the store


class NotingStore:
    """The store of the process group, which notes what it is asked."""

    def __init__(self, store):
        self.store, self.calls = store, []

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def call(*args):
            self.calls.append(name)
            return method(*args)

        return call


def round_trips() -> dict:
    accelerator = Accelerator(cpu=True)
    makers = {
        "counted": lambda: own_loader(8 * accelerator.num_processes),
        "dynamic": lambda: DataLoader(
            range(8),
            batch_sampler=RankBatches([[0, 1], [2]], accelerator.num_processes, accelerator.process_index),
        ),
        "ordinary": lambda: DataLoader(range(8)),
    }
    accelerator.prepare(makers["dynamic"]())  # makes the group for the steps, once
    results = {}
    for kind, make in makers.items():
        loader = make()
        store = NotingStore(dist.distributed_c10d._get_default_store())
        dist.barrier()
        with mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
            accelerator.prepare(loader)
        dist.barrier()
        # How often one looks while waiting is a matter of time.
        results[kind] = [name for name in store.calls if name != "check"]
    return results


def test_what_a_rank_says_does_not_grow_with_the_world_size():
    two, eight = run(2, round_trips), run(8, round_trips)
    for kind in ("counted", "dynamic", "ordinary"):
        most = [max(len(results[kind]) for results in per_rank) for per_rank in (two, eight)]
        total = [sum(len(results[kind]) for results in per_rank) for per_rank in (two, eight)]
        assert 0 < most[1] <= most[0]
        assert total[1] / 8 <= total[0] / 2


def num_keys_after(kinds: list[str], times: int) -> list[int]:
    accelerator = Accelerator(cpu=True)
    results = []
    for number in range(times + 1):
        for kind in kinds if number else kinds[:] * 2:
            if kind == "counted":
                accelerator.prepare(own_loader(8))
            elif kind == "stream":
                list(accelerator.prepare(DataLoader(Stream([1, 2])), already_sharded=True))
            elif kind == "ordinary":
                list(accelerator.prepare(DataLoader(range(8))))
            else:
                list(accelerator.prepare(DataLoader(range(8 + accelerator.process_index))))
        dist.barrier()
        results.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    return results


@parameterized.expand(WORLD_SIZES)
def test_the_store_is_left_as_it_was(world_size):
    for numbers in run(world_size, num_keys_after, ["counted", "stream", "ordinary", "different"], 10):
        assert len(set(numbers)) == 1, numbers


# many


def many_loaders() -> list:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    rank, world_size = first.process_index, first.num_processes
    results = []
    for number in range(30):
        accelerator = (first, second)[number % 2]
        time.sleep(0.002 * ((rank * 7 + number) % 3))
        loader = DataLoader(range(number % 5 + rank + 1), batch_size=1)
        if number % 3:
            loader = accelerator.prepare(loader, already_sharded=True)
        else:
            loader = accelerator.prepare_data_loader(loader, already_sharded=True)
        results.append((len(loader), loader.total_dataset_length))
        if number % 4 == 0:
            accelerator.prepare(DataLoader(range(8)))
    both = first.prepare(own_loader(4 * world_size), DataLoader(range(8)), own_loader(8 * world_size))
    return results, lists(both[0]), lists(both[2])


@parameterized.expand(WORLD_SIZES)
def test_many_loaders_in_a_row_and_two_accelerators(world_size):
    for rank, (results, short, long) in enumerate(run(world_size, many_loaders)):
        for number, (steps, samples) in enumerate(results):
            counts = [number % 5 + other + 1 for other in range(world_size)]
            assert (steps, samples) == (max(counts), sum(counts))
        assert short == dealt(4 * world_size, world_size, rank)
        assert long == dealt(8 * world_size, world_size, rank)


def another_group(fault: str | None) -> tuple:
    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    error = None
    if fault == "same shard":
        error = raised(accelerator.prepare, own_loader(8, 0), already_sharded=True)
    elif fault == "refused":
        error = raised(accelerator.prepare, own_loader(8, 0))
    elif fault == "absent" and rank:
        error = raised(accelerator.prepare, own_loader(8))
    elif fault == "left early":
        stream = accelerator.prepare(DataLoader(Stream(list(range(5)))), already_sharded=True)
        for _ in stream:
            break
    elif fault is None:
        accelerator.prepare(own_loader(8), DataLoader(range(8)))
        lists(accelerator.prepare(DataLoader(Stream(list(range(rank + 1)))), already_sharded=True))
    dist.barrier()
    # A group of the same ranks on the same server, under a name of its own, as a launcher gives to each attempt.
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with Logged() as lines:
        loader = accelerator.prepare(own_loader(8 * world_size))
        stream = accelerator.prepare(DataLoader(Stream(list(range(rank + 1)))), already_sharded=True)
        accelerator.prepare(DataLoader(range(10)))
    problems = [text for level, text in lines if level == "WARNING" and "is already sharded (" not in text]
    return error is not None, lists(loader), lists(stream), problems


@parameterized.expand(
    itertools.product((2, 3), (None, "same shard", "refused", "absent", "left early")),
)
def test_another_process_group(world_size, fault):
    needs_an_end_of_groups()
    per_rank = run(world_size, another_group, fault, timeout=20.0, env={TIMEOUT_VARIABLE: "2"})
    for rank, (failed, batches, streamed, problems) in enumerate(per_rank):
        assert failed == (fault in ("same shard", "refused") or fault == "absent" and rank > 0)
        assert batches == dealt(8 * world_size, world_size, rank)
        assert streamed == [[step % (rank + 1)] for step in range(world_size)]
        assert problems == []


# a mesh


def on_a_mesh(cut_for_data_parallel: bool) -> dict:
    accelerate.PartialState(cpu=True)
    rank = dist.get_rank()
    index = rank // 2
    with stand_in_gpus({"dp_shard": 2, "tp": 2}) as settings:
        accelerator = Accelerator(**settings)
        # 5 samples for the first two ranks, 3 for the others.
        own = DataLoader([10 * index + item for item in range(5 - 2 * index)], batch_size=2)
        uneven = accelerator.prepare(own, already_sharded=True)
        place = (2, index) if cut_for_data_parallel else (4, rank)
        sampler = DistributedSampler(range(11), *place, shuffle=False)
        error = raised(accelerator.prepare, DataLoader(range(11), batch_size=2, sampler=sampler))
        result = {"error": error}
        if error is None:
            cut = accelerator.prepare(DataLoader(range(11), batch_size=2, sampler=sampler))
            result["cut"] = [(b.tolist(), accelerator.gather_for_metrics(b).tolist()) for b in cut]
            result["cut length"] = cut.total_dataset_length
        result["uneven"] = [(b.tolist(), accelerator.gather_for_metrics(b).tolist()) for b in uneven]
        result["length"] = uneven.total_dataset_length, uneven.total_batch_size
        stream = DataLoader(Stream([10 * index + item for item in range(2 + index)]))
        stream = accelerator.prepare(stream, already_sharded=True)
        result["stream"] = [(b.tolist(), accelerator.gather_for_metrics([f"{b.item()}"])) for b in stream]
    return result


def test_ranks_that_share_a_batch_agree():
    needs_parallelism_config()
    for rank, result in enumerate(run(4, on_a_mesh, True)):
        index = rank // 2
        assert result["error"] is None
        # 11 samples cut for two: 0, 2, ..., 10 and 1, 3, ..., 9, and 0 again to fill up.
        own = [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 0]]][index]
        assert result["cut"] == list(zip(own, [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9]]))
        assert result["cut length"] == 11
        own = [[[0, 1], [2, 3], [4]], [[10, 11], [12], [10, 11]]][index]
        assert result["uneven"] == list(zip(own, [[0, 1, 10, 11], [2, 3, 12], [4]]))
        assert result["length"] == (8, 4)
        own = [[[0], [1], [0]], [[10], [11], [12]]][index]
        assert result["stream"] == list(zip(own, [["0", "10"], ["1", "11"], ["12"]]))


def test_ranks_that_should_share_a_batch_refuse():
    needs_parallelism_config()
    for result in run(4, on_a_mesh, False):
        assert result["error"][0] == "ValueError"


def agree_on_shared_batches(indices: list[int]) -> tuple:
    rank = dist.get_rank()
    said = fact(
        rank, num_processes=2, process_index=rank // 2, num_shards=2, index=indices[rank], num_batches=rank // 2 + 1
    )
    return raised(lambda: torch.tensor(agree(said).steps()))


def test_ranks_that_share_an_index_need_the_same_shard():
    assert run(4, agree_on_shared_batches, [0, 0, 1, 1]) == [None] * 4
    text = only_text(run(4, agree_on_shared_batches, [0, 1, 1, 1]))
    assert "ranks 1 and 2" in text
    text = only_text(run(4, agree_on_shared_batches, [0, 0, 0, 0]))
    assert "ranks 0 and 2" in text
