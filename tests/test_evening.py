# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The same number of steps on every rank, whatever the number of batches that each has."""

import contextlib
import functools
import itertools
import time
import tracemalloc
import warnings
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized
from ranks import run
from shared import (
    Listening,
    ListeningList,
    Logged,
    RankBatches,
    SizedStream,
    Stream,
    collectives,
    in_blocks,
    joins_as_on_gpus,
    lists,
    raised,
)
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from accelerate_presharded import Accelerator, DataLoaderConfiguration
from accelerate_presharded.channel import MOST_BYTES


PROMPT = 15.0  # seconds
KINDS = ("map-style", "stream", "sized stream", "dynamic", "iterable")


def items_of(rank: int, number: int) -> list[int]:
    """Items that no other rank has."""
    return list(range(1000 * rank, 1000 * rank + number))


def batches_of(items: list[int], drop_last: bool = False, size: int = 2) -> list[list[int]]:
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


class Batches:
    """An iterable of batches that is no DataLoader, and counts how often it was begun."""

    def __init__(self, items: list[int], drop_last: bool = False):
        self.batches, self.drop_last, self.begun = batches_of(items, drop_last), drop_last, 0

    def __iter__(self):
        self.begun += 1
        return map(torch.tensor, self.batches)


def make_loader(kind: str, items: list[int], drop_last: bool = False):
    """A loader over this rank's items in batches of two."""
    if kind == "map-style":
        return DataLoader(items, batch_size=2, drop_last=drop_last)
    if kind == "stream":
        return DataLoader(Stream(items), batch_size=2, drop_last=drop_last)
    if kind == "sized stream":
        return DataLoader(SizedStream(items), batch_size=2, drop_last=drop_last)
    if kind == "dynamic":
        indices = batches_of(list(range(len(items))), drop_last)
        sampler = RankBatches(indices, dist.get_world_size(), dist.get_rank())
        sampler.drop_last = drop_last
        return DataLoader(items, batch_sampler=sampler)
    assert kind == "iterable"
    return Batches(items, drop_last)


def an_accelerator(even_batches: bool = True) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even_batches))


def expected_steps(own: list[list[list[int]]], even_batches: bool, drop_last: bool) -> list[list[list[int]]]:
    """What each rank yields, from the batches that it has."""
    if not even_batches:
        return own
    if drop_last:
        return [batches[: min(map(len, own))] for batches in own]
    return [[batches[step % len(batches)] for step in range(max(map(len, own)))] for batches in own]


# the table


def table(lengths: list[int]) -> dict:
    results = {}
    for kind, even_batches, drop_last in itertools.product(KINDS, (True, False), (True, False)):
        accelerator = an_accelerator(even_batches)
        items = items_of(accelerator.process_index, lengths[accelerator.process_index])
        loader = accelerator.prepare(make_loader(kind, items, drop_last), already_sharded=True)
        epochs = [[(batch.tolist(), loader.end_of_dataloader) for batch in loader] for _ in range(2)]
        results[kind, even_batches, drop_last] = epochs, raised(len, loader) or len(loader), loader.iteration
    return results


@parameterized.expand(
    [
        ([4, 6],),
        ([9, 2],),
        ([3, 3],),
        ([2, 11, 5],),
        ([6, 5, 4],),
        ([9, 2, 4, 3],),
        ([2, 13, 2, 2],),
    ]
)
def test_the_number_of_steps(lengths):
    for rank, results in enumerate(run(len(lengths), table, lengths)):
        for (kind, even_batches, drop_last), (epochs, length, iteration) in results.items():
            own = [batches_of(items_of(r, number), drop_last) for r, number in enumerate(lengths)]
            steps = expected_steps(own, even_batches, drop_last)[rank]
            case = (rank, kind, even_batches, drop_last)
            flagged = [(batch, number + 1 == len(steps)) for number, batch in enumerate(steps)]
            assert epochs == [flagged, flagged], case
            assert iteration == 2, case
            if kind == "map-style":
                assert length == len(steps), case


# replays


class Shuffling(Sampler):
    """Another order in each epoch."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed, self.epoch, self.begun = length, seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.begun += 1
        return iter(order(self.length, self.seed, self.epoch))

    def __len__(self) -> int:
        return self.length


def order(length: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


class TestReplay:
    def test_begins_anew_for_every_round(self):
        def replay(lengths):
            accelerator = Accelerator(cpu=True)
            base = Batches(items_of(accelerator.process_index, lengths[accelerator.process_index]))
            loader = accelerator.prepare(base, already_sharded=True)
            return lists(loader), base.begun, lists(loader), base.begun

        one, five = run(2, replay, [2, 10])
        assert one[0] == one[2] == [[0, 1]] * 5
        assert (one[1], one[3]) == (5, 10)  # the own pass and four more
        assert (five[1], five[3]) == (1, 2)
        two, _, seven = run(3, replay, [4, 1, 14])
        assert two[0] == [[0, 1], [2, 3]] * 3 + [[0, 1]]
        assert two[1] == 4
        assert seven[1] == 1

    def test_touches_no_epoch(self):
        def heard(lengths):
            accelerator = Accelerator(cpu=True)
            rank = accelerator.process_index
            results = []
            for exact in (True, False):
                dataset = ListeningList(items_of(rank, lengths[rank]))
                cls = Listening if exact else type("Own", (Listening,), {"__len__": lambda self: self.num_samples})
                sampler = cls(dataset, num_replicas=1, rank=0, shuffle=False)
                loader = accelerator.prepare(DataLoader(dataset, 2, sampler=sampler), already_sharded=True)
                seen = [lists(loader) for _ in range(3)]
                results.append((seen, sampler.heard, dataset.heard, loader.iteration))
            return results

        for rank, results in enumerate(run(2, heard, [2, 7])):
            for seen, by_sampler, by_dataset, iteration in results:
                assert seen == [[[[0, 1]] * 4, batches_of(items_of(1, 7))][rank]] * 3
                assert by_sampler in ([0, 1, 2], [1, 2])
                assert by_dataset == [0, 1, 2]
                assert iteration == 3

    def test_repeats_the_order_of_its_epoch(self):
        def orders(lengths):
            accelerator = Accelerator(cpu=True)
            rank = accelerator.process_index
            sampler = Shuffling(lengths[rank], rank)
            loader = DataLoader(list(range(lengths[rank])), batch_size=2, sampler=sampler)
            loader = accelerator.prepare(loader, already_sharded=True)
            return [lists(loader) for _ in range(3)], sampler.begun

        lengths = [4, 10]
        per_rank = run(2, orders, lengths)
        for rank, (epochs, begun) in enumerate(per_rank):
            own = [batches_of(order(lengths[rank], rank, epoch)) for epoch in range(3)]
            assert epochs == [[batches[step % len(batches)] for step in range(5)] for batches in own]
            assert begun == [9, 3][rank]

    @parameterized.expand([(kind,) for kind in ("map-style", "stream")])
    def test_with_workers(self, kind):
        def with_workers(lengths):
            accelerator = Accelerator(cpu=True)
            items = items_of(accelerator.process_index, lengths[accelerator.process_index])
            dataset = items if kind == "map-style" else Stream(items)
            loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
            loader = accelerator.prepare(loader, already_sharded=True)
            return [lists(loader) for _ in range(2)]

        short, long = run(2, with_workers, [4, 10])
        own = batches_of(items_of(0, 4))
        assert short == [[own[step % 2] for step in range(5)]] * 2
        assert long == [batches_of(items_of(1, 10))] * 2

    @parameterized.expand([([1, 2],), ([1, 4],), ([3, 2, 5],), ([2, 3, 2],), ([2, 5, 3, 3],)])
    def test_of_what_can_be_read_once_only(self, counts):
        def once(counts, patience):
            accelerator = Accelerator(cpu=True)
            items = items_of(accelerator.process_index, counts[accelerator.process_index])
            loader = accelerator.prepare(DataLoader(Stream(iter(items)), batch_size=1), already_sharded=True)
            steps = []
            start = time.monotonic()
            with in_blocks(patience):
                error = raised(lambda: [steps.append(batch) for batch in loader])
            return error, len(steps), time.monotonic() - start

        for patience in (None, 0):
            per_rank = run(len(counts), once, counts, patience, timeout=20.0)
            for rank, (error, steps, seconds) in enumerate(per_rank):
                assert error is not None, f"rank {rank} has not heard of it"
                assert error[0] == "RuntimeError"
                assert "yields none when it is iterated again" in error[1]
                assert "even_batches=False" in error[1]
                if counts[rank] == max(counts):
                    assert any(f"rank {other} raised" in error[1] for other in range(len(counts)) if other != rank)
                # Where the first rank has come to its end, and nowhere earlier.
                assert steps == min(counts)
                assert seconds < PROMPT


class FailingReplay(Batches):
    """Cannot read one of the batches that it repeats, once."""

    def __init__(self, items: list[int], at: int):
        super().__init__(items)
        self.at = at

    def __iter__(self):
        for batch in super().__iter__():
            if self.begun > 1:
                if self.at == 0:
                    self.at = -1
                    raise OSError("the disk is full")
                self.at -= 1
            yield batch


def pass_with_a_failing_replay(counts: list[int], at: int, patience: int | None) -> tuple:
    accelerator = Accelerator(cpu=True)
    items = items_of(accelerator.process_index, 2 * counts[accelerator.process_index])
    source = FailingReplay(items, at) if accelerator.process_index == 0 else Batches(items)
    loader = accelerator.prepare(source, already_sharded=True)
    with in_blocks(patience):
        passes = []
        for _ in range(3):
            steps = []
            error = raised(lambda steps=steps: [steps.append(batch.tolist()) for batch in loader])
            passes.append((error, steps))
    return passes, loader._pace.size


@parameterized.expand(
    itertools.product(([2, 9], [2, 150], [30, 200], [3, 90, 20], [80, 100]), (0, 1, 4, 14), (None, 0, 1))
)
def test_a_replay_that_cannot_be_read(counts, at, patience):
    per_rank = run(len(counts), pass_with_a_failing_replay, counts, at, patience, timeout=30.0)
    own = [batches_of(items_of(rank, 2 * count)) for rank, count in enumerate(counts)]
    expected = expected_steps(own, True, False)
    # All ranks take the steps for which the first, which has the fewest batches, has one or can repeat one.
    until = counts[0] + at
    fails = until < max(counts)
    for rank, ((first, *others), size) in enumerate(per_rank):
        error, steps = first
        if not fails:
            assert error is None
            assert steps == expected[rank]
            continue
        assert steps == expected[rank][:until]
        assert error[1] == "the disk is full" if rank == 0 else "rank 0 raised OSError: the disk is full" in error[1]
        # The ranks go on in step.
        for error, steps in others:
            assert error is None
            assert steps == expected[rank]
        assert size == per_rank[0][1]


def test_once_only_is_enough_where_all_are_even():
    def once():
        accelerator = Accelerator(cpu=True)
        items = items_of(accelerator.process_index, 3)
        loader = accelerator.prepare(DataLoader(Stream(iter(items)), batch_size=1), already_sharded=True)
        return lists(loader)

    assert run(2, once) == [[[0], [1], [2]], [[1000], [1001], [1002]]]


# what is said


def of_each(kinds: tuple, function, *args) -> dict:
    """What a function returns on this rank for each kind of loader."""
    return {kind: function(kind, *args) for kind in kinds}


def by_kind(per_rank: list[dict]) -> list[tuple]:
    """Kinds, and for each what all ranks have returned."""
    return [(kind, [results[kind] for results in per_rank]) for kind in per_rank[0]]


def said(kind: str, lengths: list[int], drop_last: bool, even_batches: bool = True) -> list:
    accelerator = an_accelerator(even_batches)
    items = items_of(accelerator.process_index, lengths[accelerator.process_index])
    loader = accelerator.prepare(make_loader(kind, items, drop_last), already_sharded=True)
    results = []
    for _ in range(3):
        with Logged() as lines:
            for _ in loader:
                pass
        results.append([(level, text) for level, text in lines if level != "DEBUG"])
    return results


@parameterized.expand(itertools.product(([4, 10], [10, 6, 8]), (True, False)))
def test_uneven_ranks_are_told_of_once_an_epoch(lengths, drop_last):
    for kind, per_rank in by_kind(run(len(lengths), of_each, KINDS, said, lengths, drop_last)):
        assert_told_once(kind, per_rank, lengths, drop_last)


def assert_told_once(kind: str, per_rank: list, lengths: list[int], drop_last: bool) -> None:
    main, *others = per_rank
    assert others == [[[], [], []]] * len(others)
    assert [[level for level, _ in epoch] for epoch in main] == [["WARNING"], ["INFO"], ["INFO"]]
    counts = [length // 2 for length in lengths]
    short, long = min(counts), max(counts)
    for ((_, text),) in main:
        if kind == "map-style":
            assert f"rank {counts.index(short)} has {short} batches" in text
            assert f"rank {counts.index(long)} has {long}" in text
            assert f"{short if drop_last else long} steps" in text
        elif drop_last:
            # The first that have no batch for the step behind the last.
            assert f"1 of {len(lengths)} ranks" in text and f"after {short} steps" in text
        else:
            assert f"1 of {len(lengths)} ranks" in text and f"step {short + 1}" in text
        assert ("drop_last=True" in text) == drop_last


@parameterized.expand([(False,), (True,)])
def test_nothing_is_said_of_even_ranks(drop_last):
    nothing = dict.fromkeys(KINDS, [[], [], []])
    assert run(2, of_each, KINDS, said, [6, 6], drop_last) == [nothing] * 2
    assert run(2, of_each, KINDS, said, [6, 8], drop_last, False) == [nothing] * 2


# what it costs


class NotingStore:
    def __init__(self, store):
        self.store, self.calls = store, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.store, name)


@contextlib.contextmanager
def noted_sums():
    """Every all-reduce: its number of elements and dtype kind, whether it is asynchronous, its group."""
    real, notes = dist.all_reduce, []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        notes.append((tensor.numel(), tensor.is_floating_point(), async_op, group))
        return real(tensor, op, group, async_op)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield notes


def cost(kind: str, lengths: list[int], drop_last: bool, even_batches: bool) -> dict:
    accelerator = an_accelerator(even_batches)
    items = items_of(accelerator.process_index, lengths[accelerator.process_index])
    loader = accelerator.prepare(make_loader(kind, items, drop_last), already_sharded=True)
    store = NotingStore(dist.distributed_c10d._get_default_store())
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
        with noted_sums() as sums, collectives() as calls:
            steps = sum(1 for _ in loader)
    groups = {group for *_, group in sums}
    return {
        "steps": steps,
        "calls": calls,
        "store": store.calls,
        "sums": [note[:3] for note in sums],
        "groups": len(groups),
        "default group": bool(groups & {None, dist.group.WORLD}),
        "backends": [dist.get_backend(group) for group in groups],
        "sizes": [dist.get_world_size(group) for group in groups],
    }


@parameterized.expand(itertools.product(([4, 10], [10, 6, 9], [6, 6, 6, 6]), (True, False), (True, False)))
def test_known_counts_need_no_communication(lengths, drop_last, even_batches):
    for result in run(len(lengths), cost, "map-style", lengths, drop_last, even_batches):
        assert result["calls"] == []
        assert result["store"] == []
        assert result["steps"] > 0


@parameterized.expand(itertools.product(([4, 10], [10, 6, 9]), (True, False)))
def test_unknown_counts_take_one_short_word_a_step(lengths, drop_last):
    per_rank = run(len(lengths), of_each, KINDS[1:], cost, lengths, drop_last, True)
    for result in (result for results in per_rank for result in results.values()):
        # One for each step, and one that tells that there is no other.
        assert result["calls"] == ["all_reduce"] * (result["steps"] + 1)
        ((number, is_float, is_async),) = set(result["sums"])
        assert number < 100 and not is_float and is_async
        assert result["groups"] == 1
        assert not result["default group"]
        assert result["backends"] == ["gloo"]
        assert result["sizes"] == [len(lengths)]
        assert result["store"] == []


def test_streams_left_uneven_need_no_communication():
    for result in run(2, cost, "stream", [4, 10], False, False):
        assert result["calls"] == []


def words_before_steps() -> list[int]:
    """How many sums are on their way or done when each step begins."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(list(range(6)))), already_sharded=True)
    sent, own = [], dist.all_reduce

    def counting(*args, **kwargs):
        sent.append(None)
        return own(*args, **kwargs)

    dist.all_reduce = counting
    return [len(sent) for _ in loader]


def test_the_word_travels_while_the_step_is_taken():
    # Before a step is taken, the word about the one after the next has been sent: 3 before the first step. The last
    # word, that there is a seventh step on no rank, is sent before the fifth.
    assert run(2, words_before_steps) == [[3, 4, 5, 6, 7, 7]] * 2


class Opaque:
    """A batch of which nobody can say how much memory it takes."""


def sparse(number: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([float(number)]), (2, 2))


BATCHES = {
    "small": lambda number: torch.full((1,), number),
    "a megabyte": lambda number: torch.full((2**20,), number % 256, dtype=torch.uint8),
    "mostly small": lambda number: torch.zeros(2**23 if 100 <= number < 130 else 1, dtype=torch.uint8),
    "opaque": lambda number: Opaque(),
    # None of those says how much memory it takes.
    "sparse": sparse,
    "sparse among others": lambda number: {"features": [sparse(number)], "label": torch.zeros(1)},
    "objects": lambda number: numpy.array([Opaque()], dtype=object),
}


class Counting:
    """Makes batches, and knows how many it has made."""

    def __init__(self, kind: str, number: int):
        self.kind, self.number, self.drawn = kind, number, 0

    def __iter__(self):
        for number in range(self.number):
            self.drawn += 1
            yield BATCHES[self.kind](number)


def in_blocks_of(kind: str, numbers: list[int], patience: int) -> tuple:
    """The steps, the words, and how many batches were read ahead at most before each step."""
    accelerator = Accelerator(cpu=True)
    source = Counting(kind, numbers[accelerator.process_index])
    loader = accelerator.prepare(source, already_sharded=True)
    with in_blocks(patience), noted_sums() as sums:
        ahead = [source.drawn - step for step, _ in enumerate(loader)]
    return len(ahead), len(sums), ahead


@parameterized.expand(
    [
        # One word about 1 step, one about 4, one about 16, and then about 64 each.
        ("small", 1000, 1 + 1 + 1 + 16, 3 * 64),
        # All are full, so it takes one more to say that there is no other step.
        ("small", 1 + 4 + 16 + 2 * 64, 3 + 2 + 1, 3 * 64),
        # Three blocks of 16 batches would take 48 of the 32 megabytes.
        ("a megabyte", 40, 1 + 10, 3 * 4),
        ("opaque", 40, 40 + 1, 3),
        ("sparse", 40, 40 + 1, 3),
        ("sparse among others", 40, 40 + 1, 3),
        ("objects", 40, 40 + 1, 3),
    ]
)
def test_words_about_many_steps(kind, number, words, most):
    for rank_steps, rank_words, ahead in run(2, in_blocks_of, kind, [number] * 2, 0):
        assert (rank_steps, rank_words) == (number, words)
        assert max(ahead) <= most


def test_words_about_fewer_steps_when_batches_grow():
    for steps, _, ahead in run(2, in_blocks_of, "mostly small", [200] * 2, 0):
        assert steps == 200
        assert max(ahead[:40]) > 16
        # Of 8 megabytes each, the fifth is more than the 32 that are held.
        assert max(ahead[115:124]) <= 5


MEGABYTE = 2**20


class Weighing:
    """Yields batches of these sizes, and keeps a state of these, all in bytes."""

    def __init__(self, batches: list[int], states: list[int]):
        self.batches, self.states, self.position = batches, states, 0

    def __iter__(self):
        for self.position, size in enumerate(self.batches, start=1):
            yield numpy.zeros(size, dtype=numpy.uint8)


class WeighingWithState(Weighing):
    def state_dict(self):
        return {"payload": numpy.zeros(self.states[self.position - 1], dtype=numpy.uint8)}

    def load_state_dict(self, state):
        raise NotImplementedError


def most_held(batches: list[list[int]], states: list[int] | None) -> tuple[int, int]:
    """The steps of a pass, and how many bytes were held at most before one."""
    accelerator = Accelerator(cpu=True)
    own = batches[accelerator.process_index]
    source = Weighing(own, []) if states is None else WeighingWithState(own, states)
    loader = accelerator.prepare(source, already_sharded=True)
    held = []
    tracemalloc.start()
    try:
        with in_blocks(0):
            for _ in loader:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return len(held), max(held)


@parameterized.expand(
    [
        # Small at first, so that the ranks come to speak of many steps at once.
        ("batches that grow", [[1] * 100 + [MEGABYTE] * 100] * 2, None),
        ("batches that jump", [[1] * 100 + [8 * MEGABYTE, 1, 1] * 30] * 2, None),
        # A replay begins with the first ones.
        ("replays", [[8 * MEGABYTE] * 12 + [1] * 60, [1] * 200], None),
        ("states", [[1] * 200] * 2, [1] * 100 + [MEGABYTE] * 100),
    ]
)
def test_what_is_read_ahead_is_bounded(_, batches, states):
    largest = max(*itertools.chain(*batches), *(states or [0]))
    per_rank = run(2, most_held, batches, states)
    assert max(held for _, held in per_rank) > 2 * MEGABYTE
    for steps, held in per_rank:
        assert steps == max(map(len, batches))
        # Beside what is held, the batch that is yielded, the one read last, and what Python itself needs.
        assert held < MOST_BYTES + 2 * largest + MEGABYTE


@parameterized.expand(itertools.product((0, 1, 3), ([90, 90], [90, 7], [1, 90], [30, 31], [5, 21, 20])))
def test_blocks_of_uneven_ranks(patience, numbers):
    for steps, _, _ in run(len(numbers), in_blocks_of, "small", numbers, patience):
        assert steps == max(numbers)


def test_it_takes_all_ranks_to_speak_of_more_steps_at_once():
    def of_ranks():
        return in_blocks_of("small", [40, 40], 10**9 if dist.get_rank() else 0)

    assert [words for _, words, _ in run(2, of_ranks)] == [41, 41]


def words_of_passes(patience: int, steps: int, passes: int) -> list[int]:
    loader = Accelerator(cpu=True).prepare(Counting("small", steps), already_sharded=True)
    words = []
    for _ in range(passes):
        with in_blocks(patience), noted_sums() as sums:
            list(loader)
        words.append(len(sums))
    return words


def test_short_passes_are_timed_together():
    # The 17th word about one step is the sixth of the second pass, and the fifth about four is the last of the third.
    assert run(2, words_of_passes, 16, 10, 4) == [[11, 6 + 1 + 1, 3, 1]] * 2


def words_of_long_steps(seconds: float, steps: int) -> int:
    loader = Accelerator(cpu=True).prepare(Counting("small", steps), already_sharded=True)
    with mock.patch("accelerate_presharded.channel._PATIENCE", 0), noted_sums() as sums:
        for _ in loader:
            time.sleep(seconds)
    return len(sums)


def test_long_steps_are_spoken_of_one_by_one():
    # However fast the words before the first of them follow each other.
    assert run(2, words_of_long_steps, 0.06, 12) == [13, 13]


class Slow(Counting):
    def __init__(self, number: int, seconds: float):
        super().__init__("small", number)
        self.seconds = seconds

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(self.seconds)
            yield batch


def drawn_of_a_slow_pass() -> list[int]:
    """How many batches were read before each of the first steps of a pass in which that takes long, behind a fast one."""
    source = Slow(300, 0.0)
    loader = Accelerator(cpu=True).prepare(source, already_sharded=True)
    with in_blocks(0):
        list(loader)
    source.seconds, source.number, source.drawn = 0.03, 20, 0
    return [source.drawn for _ in loader]


def test_nobody_waits_for_many_slow_batches():
    for drawn in run(2, drawn_of_a_slow_pass):
        # Within a twentieth of a second it reads two, so two for each of two words before the first step, and with each
        # step one, or two for a word.
        assert all(number <= 5 + 2 * step for step, number in enumerate(drawn))
        assert drawn[-1] == 20


def ahead_of_long_steps(late: float) -> list[int]:
    """How far was read ahead in the long steps of a pass, behind one with short steps."""
    source = Counting("small", 700)
    loader = Accelerator(cpu=True).prepare(source, already_sharded=True)
    with in_blocks(0):
        list(loader)
    source.drawn, ahead = 0, []
    with mock.patch("accelerate_presharded.channel._LATE", late):
        for step, _ in enumerate(loader):
            ahead.append(source.drawn - step)
            time.sleep(0.002)
    return ahead


def test_long_steps_are_spoken_of_one_by_one_behind_short_ones():
    # Five blocks of 64 steps have been read when the ranks know how long they take; with those of 16 and 4 it is the same.
    for ahead in run(2, ahead_of_long_steps, 0.001):
        assert max(ahead[:64]) > 100
        assert max(ahead[500:]) <= 3
    for ahead in run(2, ahead_of_long_steps, 60.0):
        assert max(ahead[500:600]) > 100


class Endless:
    def __iter__(self):
        return itertools.repeat(torch.zeros(1))


def endless(steps: int) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(Endless(), already_sharded=True)
    store = dist.distributed_c10d._get_default_store()
    sizes = []
    for step, _ in enumerate(loader, start=1):
        if step == steps // 10:
            dist.barrier()
            tracemalloc.start()
            sizes.append((tracemalloc.get_traced_memory()[0], store.num_keys()))
        if step == steps:
            sizes.append((tracemalloc.get_traced_memory()[0], store.num_keys()))
            dist.barrier()
            break
    return sizes


def test_an_endless_stream_takes_no_memory():
    for (memory, keys), (memory_later, keys_later) in run(2, endless, 10_000):
        # 9,000 steps later. What one step says takes more than 150 bytes; the caches that fill up hold 100,000.
        assert memory_later - memory < 9_000 * 30
        assert keys_later == keys


# empty ranks


def empty(kind: str, lengths: list[int], drop_last: bool, even_batches: bool) -> tuple:
    dist.barrier()
    accelerator = an_accelerator(even_batches)
    items = items_of(accelerator.process_index, lengths[accelerator.process_index])
    prepared, steps = [], []

    def prepare():
        prepared.append(accelerator.prepare(make_loader(kind, items, drop_last), already_sharded=True))

    start = time.monotonic()
    at_prepare = raised(prepare)
    at_iteration = at_prepare or raised(lambda: steps.extend(lists(prepared[0])))
    return at_prepare is not None, at_iteration, steps, time.monotonic() - start


# One item is no batch of two where the last is dropped.
@parameterized.expand([([0, 6], False), ([6, 0, 2], False), ([0, 1, 0, 3], False), ([6, 1], True), ([0, 4, 1], True)])
def test_case_18_an_empty_rank(lengths, drop_last):
    counts = [length // 2 if drop_last else (length + 1) // 2 for length in lengths]
    without = [rank for rank, count in enumerate(counts) if not count]
    named = ", ".join(map(str, without))
    named = f"rank {named} has no batch" if len(without) == 1 else f"ranks {named} have no batch"
    # One after the other: ranks that have all refused are as good as before.
    for kind, per_rank in by_kind(run(len(lengths), of_each, KINDS, empty, lengths, drop_last, True, timeout=20.0)):
        assert {error and error[0] for _, error, _, _ in per_rank} == {"ValueError"}, kind
        texts = {text for _, (_, text), _, _ in per_rank}
        assert len(texts) == 1, kind
        text = texts.pop()
        assert named in text and "even_batches=False" in text
        for at_prepare, _, steps, seconds in per_rank:
            assert at_prepare == (kind == "map-style")
            assert steps == []
            assert seconds < PROMPT


@parameterized.expand(itertools.product((True, False), (True, False)))
def test_all_ranks_empty(drop_last, even_batches):
    for results in run(2, of_each, KINDS, empty, [0, int(drop_last)], drop_last, even_batches):
        assert {(error, len(steps)) for _, error, steps, _ in results.values()} == {(None, 0)}


def test_an_empty_rank_among_uneven_ones():
    for kind, per_rank in by_kind(run(3, of_each, KINDS, empty, [0, 3, 1], False, False)):
        assert [error for _, error, _, _ in per_rank] == [None] * 3, kind
        assert [steps for _, _, steps, _ in per_rank] == [[], [[1000, 1001], [1002]], [[2000]]], kind


# counts that change


class Changing:
    """A batch sampler that has another number of batches in each epoch."""

    def __init__(self, counts: list[int], num_replicas: int, rank: int):
        self.counts, self.num_replicas, self.rank, self.epoch = counts, num_replicas, rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([[10 * self.epoch + number] for number in range(self.counts[self.epoch])])

    def __len__(self) -> int:
        return self.counts[self.epoch]


def changing(counts: list[list[int]], drop_last: bool) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    sampler = Changing(counts[rank], accelerator.num_processes, rank)
    sampler.drop_last = drop_last
    loader = accelerator.prepare(DataLoader(range(100), batch_sampler=sampler))
    return [lists(loader) for _ in counts[rank]]


@parameterized.expand(
    itertools.product(([[3, 1, 4], [2, 5, 4]], [[1, 2, 3, 1], [3, 2, 1, 1], [2, 2, 2, 7]]), (True, False))
)
def test_counts_that_change_from_epoch_to_epoch(counts, drop_last):
    own = [[[[10 * epoch + i] for i in range(n)] for epoch, n in enumerate(of_rank)] for of_rank in counts]
    for rank, epochs in enumerate(run(len(counts), changing, counts, drop_last)):
        for epoch, batches in enumerate(epochs):
            assert batches == expected_steps([of_rank[epoch] for of_rank in own], True, drop_last)[rank]


def growing() -> tuple:
    accelerator = Accelerator(cpu=True)
    items = items_of(accelerator.process_index, 4)
    loader = accelerator.prepare(DataLoader(items, batch_size=2), already_sharded=True)
    first = lists(loader)
    items += [7, 8]
    return first, raised(list, loader)


def test_a_dataset_that_grows_behind_the_others_back():
    for rank, (first, error) in enumerate(run(2, growing)):
        assert first == batches_of(items_of(rank, 4))
        assert error[0] == "ValueError"
        assert "had 2 batches" in error[1] and "it has 3 now" in error[1]


# several loaders


def streams_of(rank: int) -> tuple[list[int], list[int]]:
    return items_of(rank, 2 + rank), items_of(rank + 10, 4 - rank)


def steps_of(world_size: int, which: int, rank: int) -> list[int]:
    own = [[[item] for item in streams_of(r)[which]] for r in range(world_size)]
    return expected_steps(own, True, False)[rank]


def two_streams(how: str) -> list:
    accelerator = Accelerator(cpu=True)
    first, second = (DataLoader(Stream(items), batch_size=1) for items in streams_of(accelerator.process_index))
    first, second = accelerator.prepare(first, second, already_sharded=True)
    results = []
    for _ in range(2):
        if how == "alternately":
            iterators, seen = [iter(first), iter(second)], []
            while iterators:
                for iterator in list(iterators):
                    batch = next(iterator, None)
                    if batch is None:
                        iterators.remove(iterator)
                    else:
                        seen.append(batch.tolist())
        elif how == "zip":
            seen = [(a.tolist(), b.tolist()) for a, b in zip(first, second)]
        elif how == "nested":
            seen = [(a.tolist(), lists(second)) for a in first]
        elif how == "nested in itself":
            seen = [(a.tolist(), lists(first)) for a in first]
        else:
            seen = []
            for step, a in enumerate(first):
                for b in second:
                    seen.append((a.tolist(), b.tolist()))
                    if step:
                        break
        results.append(seen)
    return results


WAYS = ("alternately", "zip", "nested", "nested in itself", "nested with break")


@parameterized.expand(itertools.product((2, 3), WAYS))
def test_two_streams(world_size, how):
    for rank, results in enumerate(run(world_size, two_streams, how, timeout=20.0)):
        first, second = steps_of(world_size, 0, rank), steps_of(world_size, 1, rank)
        if how == "alternately":
            pairs = itertools.zip_longest(first, second)
            expected = [batch for pair in pairs for batch in pair if batch is not None]
        elif how == "zip":
            expected = list(zip(first, second))
        elif how == "nested":
            expected = [(a, second) for a in first]
        elif how == "nested in itself":
            expected = [(a, first) for a in first]
        else:
            expected = [(first[0], b) for b in second] + [(a, second[0]) for a in first[1:]]
        assert results == [expected, expected]


# skipping


def skipped(kind: str, lengths: list[int], drop_last: bool, most: int) -> list:
    accelerator = Accelerator(cpu=True)
    items = items_of(accelerator.process_index, lengths[accelerator.process_index])
    loader = accelerator.prepare(make_loader(kind, items, drop_last), already_sharded=True)

    def steps(loader):
        return [(batch.tolist(), accelerator.gather_for_metrics(batch).tolist()) for batch in loader]

    results = [steps(loader)]
    for number in range(most + 1):
        skipping = accelerator.skip_first_batches(loader, number)
        results.append(([*steps(skipping)], [*steps(skipping)]))
    return results


@parameterized.expand(
    [([4, 12], False), ([5, 1, 9], False), ([2, 6, 3, 11], False), ([4, 12, 9], True), ([6, 6], False)]
)
def test_skipping_past_a_rank_s_own_end(lengths, drop_last):
    counts = [length // 2 if drop_last else (length + 1) // 2 for length in lengths]
    steps = min(counts) if drop_last else max(counts)
    for kind, per_rank in by_kind(run(len(lengths), of_each, KINDS, skipped, lengths, drop_last, steps + 1)):
        own = [batches_of(items_of(rank, length), drop_last) for rank, length in enumerate(lengths)]
        expected = expected_steps(own, True, drop_last)
        for rank, (whole, *parts) in enumerate(per_rank):
            assert [batch for batch, _ in whole] == expected[rank], kind
            for step, (_, gathered) in enumerate(whole):
                assert gathered == sum((of_rank[step] for of_rank in own if step < len(of_rank)), []), kind
            for number, (first, second) in enumerate(parts):
                # As if it had not been interrupted, and the second pass from the beginning.
                assert first == whole[number:], (kind, number)
                assert second == whole, (kind, number)


def case_20_and_21() -> tuple:
    accelerator = Accelerator(cpu=True)
    sampler = DistributedSampler(range(13), accelerator.num_processes, accelerator.process_index, shuffle=False)
    loader = accelerator.prepare(DataLoader(range(13), batch_size=2, sampler=sampler))
    skipping = accelerator.skip_first_batches(loader, 1)
    return [[(batch.tolist(), accelerator.gather_for_metrics(batch).tolist()) for batch in skipping] for _ in range(2)]


@functools.cache
def skipped_13() -> list:
    return run(2, case_20_and_21)


def test_case_20_metrics_behind_what_was_skipped():
    # 0, 2, ..., 12 and 1, 3, ..., 11 and 0 again. The first step has 0 to 3.
    for first, _ in skipped_13():
        assert [gathered for _, gathered in first] == [[4, 6, 5, 7], [8, 10, 9, 11], [12]]


def test_case_21_skipped_in_the_first_epoch_only():
    for rank, (first, second) in enumerate(skipped_13()):
        own = [[[0, 2], [4, 6], [8, 10], [12]], [[1, 3], [5, 7], [9, 11], [0]]][rank]
        assert [batch for batch, _ in first] == own[1:]
        assert [batch for batch, _ in second] == own
        assert sorted(sum((gathered for _, gathered in second), [])) == list(range(13))


# joining


class Interrupted(Exception):
    pass


def joined(kind: str, config: bool, even_batches: bool | None, through: str) -> dict:
    """Own and ordinary loaders before, in and after `join_uneven_inputs`."""
    accelerator = an_accelerator(config)
    rank = accelerator.process_index
    model = torch.nn.Linear(1, 1)
    model = accelerator.prepare(model)
    loader = accelerator.prepare(make_loader(kind, items_of(rank, 4 + 4 * rank)), already_sharded=True)
    # 5 batches over 2 ranks.
    ordinary = accelerator.prepare(DataLoader(range(10), batch_size=2)) if through != "alone" else None

    def pass_over():
        return len(lists(loader)), None if ordinary is None else len(lists(ordinary))

    results = {"before": pass_over()}
    with contextlib.suppress(Interrupted), joins_as_on_gpus():
        with accelerator.join_uneven_inputs([model], even_batches=even_batches):
            results["inside"] = pass_over()
            results["attribute"] = loader.even_batches
            results["ordinary"] = ordinary and ordinary.batch_sampler.even_batches
            if through == "interrupted":
                raise Interrupted
    results["after"] = pass_over()
    results["restored"] = loader.even_batches, ordinary and ordinary.batch_sampler.even_batches
    results["known"] = [known is one for known, one in zip(accelerator._dataloaders, (loader, ordinary))]
    return results


@parameterized.expand(itertools.product((True, False), (None, True, False), ("alone", "mixed", "interrupted")))
def test_case_19_join_uneven_inputs(config, even_batches, through):
    inside = config if even_batches is None else even_batches
    per_rank = run(2, of_each, KINDS, joined, config, even_batches, through)
    for rank, results in [(rank, results) for rank, kinds in enumerate(per_rank) for results in kinds.values()]:

        def steps(even):
            own = 4 if even else [2, 4][rank]
            # 5 batches dealt to two: 3 and 2, or 3 and 3 where they are even.
            return own, None if through == "alone" else 3 if even else [3, 2][rank]

        assert results["before"] == results["after"] == steps(config)
        assert results["inside"] == steps(inside)
        assert results["attribute"] == inside
        of_ordinary = None if through == "alone" else inside
        assert results["ordinary"] == of_ordinary
        assert results["restored"] == (config, None if through == "alone" else config)
        assert results["known"] == [True] * (1 if through == "alone" else 2)


def joined_with_a_dispatched_one() -> tuple:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(DataLoader(items_of(0, 2 + accelerator.process_index)), already_sharded=True)
    accelerator.prepare(DataLoader(Stream(list(range(4)))))
    with joins_as_on_gpus(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            steps = len(lists(loader))
    return steps, [str(warning.message) for warning in caught if "even_batches" in str(warning.message)]


def test_joining_beside_a_dispatched_loader():
    for rank, (steps, said) in enumerate(run(2, joined_with_a_dispatched_one)):
        assert steps == 2 + rank
        assert len(said) == 1  # Accelerate's own


def joined_on_cpu() -> tuple:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(DataLoader(items_of(0, 2 + accelerator.process_index)), already_sharded=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            steps = len(lists(loader))
    return steps, [str(warning.message) for warning in caught if "join_uneven_inputs" in str(warning.message)]


def test_joining_has_no_effect_on_cpu_as_in_accelerate():
    for steps, said in run(2, joined_on_cpu):
        assert steps == 3
        assert len(said) == 1


def train_joined(kind: str, counts: list[int]) -> tuple:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = [float(rank + step + 1) for step in range(counts[rank])]
    dataset = Stream([torch.tensor([value]) for value in data]) if kind == "stream" else torch.tensor(data)[:, None]
    loader = accelerator.prepare(DataLoader(dataset, batch_size=1), already_sharded=True)
    steps = 0
    with joins_as_on_gpus(), accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).sum())
            optimizer.step()
            steps += 1
    return steps, model.module.weight.item()


@parameterized.expand(itertools.product(("map-style", "stream"), ([2, 4], [3, 1, 2], [1, 1, 4, 2])))
def test_a_model_that_really_joins(kind, counts):
    world_size = len(counts)
    per_rank = run(world_size, train_joined, kind, counts, timeout=30.0)
    assert [steps for steps, _ in per_rank] == counts
    # The gradient of a step is the mean over all ranks of their data, where those that have ended add nothing. Those
    # that have ended first hear the last weights from the last.
    weight = 1.0
    for step in range(max(counts)):
        weight -= 0.1 * sum(rank + step + 1 for rank in range(world_size) if step < counts[rank]) / world_size
    assert [value for _, value in per_rank] == pytest.approx([weight] * world_size)


# cases


def sums(kind: str, counts: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = torch.arange(2.0 * counts[rank])[:, None] + 100 * rank
    dataset = data if kind == "map-style" else Stream(list(data))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=2), already_sharded=True
    )
    results = []
    for batch in loader:
        accelerator.backward(model(batch).mean())
        results.append((model.module.weight.grad.item(), accelerator.gather_for_metrics(batch).flatten().tolist()))
        optimizer.zero_grad()
    return results


@parameterized.expand(itertools.product(("map-style", "stream"), ([2, 3], [1, 4, 2])))
def test_case_16_uneven_ranks_and_a_model(kind, counts):
    world_size = len(counts)
    own = [[[100.0 * rank + 2 * i, 100.0 * rank + 2 * i + 1] for i in range(n)] for rank, n in enumerate(counts)]
    steps = expected_steps(own, True, False)
    for results in run(world_size, sums, kind, counts, timeout=30.0):
        assert len(results) == max(counts)
        for step, (gradient, gathered) in enumerate(results):
            means = [sum(of_rank[step]) / 2 for of_rank in steps]
            assert gradient == pytest.approx(sum(means) / world_size)
            assert gathered == sum((of_rank[step] for of_rank in own if step < len(of_rank)), [])


class SelfCounting(DataLoader):
    """Counts its passes by itself and yields the number of the pass with each sample, as LitData's loader shuffles."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.current_epoch = 0

    def __iter__(self):
        self.current_epoch += 1
        for batch in super().__iter__():
            yield batch + 100 * self.current_epoch


def epochs_of_self_counting(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    items = Stream(range(lengths[accelerator.process_index]))
    loader = accelerator.prepare(SelfCounting(items, batch_size=1), already_sharded=True)
    return [[batch.item() for batch in loader] for _ in range(2)]


def test_a_replay_is_no_epoch_of_a_loader_that_counts_them_itself():
    first, second = run(2, epochs_of_self_counting, [1, 3])
    assert first == [[100, 100, 100], [200, 200, 200]]
    assert second == [[100, 101, 102], [200, 201, 202]]
