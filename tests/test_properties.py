# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""
Every sample once, and the same number of steps on every rank, for whatever loader hypothesis can think of.

What has to be seen is worked out by arithmetic in `model.py`. Real ranks cost more to start than an example takes, so
they go through many examples one after the other. Only an example that fails is tried alone, and made smaller.

Environment variables:

- `PRESHARDED_EXAMPLES`: how many examples to try, 500 by default. More are drawn at random, anew in every run.
- `PRESHARDED_SEED`: from which seed to draw them, for those of an earlier run with as many examples.
"""

import collections
import math
import os
import random
import time

import pytest
import torch
from accelerate.state import GradientState
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from model import (
    Dealt,
    DealtBatches,
    Dynamic,
    Example,
    Lists,
    Pass,
    Streams,
    duplicates,
    expected,
    items_of,
    shuffled,
)
from ranks import RankError, run
from shared import DealtBatches as DealtBatchSampler
from shared import in_blocks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from accelerate_presharded import Accelerator, DataLoaderConfiguration


IN_CI = 500
EXAMPLES = int(os.environ.get("PRESHARDED_EXAMPLES", IN_CI))
SEED = int(os.environ.get("PRESHARDED_SEED", 0 if EXAMPLES <= IN_CI else random.randrange(2**32)))
# Of which part of the examples there are how many ranks.
PARTS = {1: 0.1, 2: 0.35, 3: 0.25, 4: 0.25, 8: 0.05}
AT_ONCE = 25
OFFERED = 3  # examples of hypothesis for one that is tried
SHRINKING = 60.0  # seconds to make an example that fails smaller


# ------------------------------------------------------------------------------------------------------ the examples


def rarely(one_in: int):
    return st.integers(1, one_in).map(lambda number: number == one_in)


@st.composite
def dealt(draw) -> Dealt:
    form = draw(
        st.sampled_from(["sampler", "batch_sampler", "batches as sampler", "wrapped", "wrapped batch_sampler"])
    )
    batch_size = draw(st.integers(1, 9))
    if form in ("sampler", "wrapped") and draw(rarely(5)):
        batch_size = None
    return Dealt(
        length=draw(st.integers(0, 60)),
        batch_size=batch_size,
        form=form,
        shuffle=draw(st.booleans()),
        drop_last=batch_size is not None and draw(rarely(3)),
        sampler_drop_last=draw(rarely(4)),
        as_tensor=form == "batches as sampler" or draw(st.booleans()),
    )


def lengths(draw, world_size: int, at_least: int) -> tuple[int, ...]:
    """By rank. Of a few examples some ranks have nothing, or not enough for a batch that is not dropped."""
    lowest, highest = (0, draw(st.sampled_from([0, 3, 20]))) if draw(rarely(3)) else (at_least, 20)
    return tuple(draw(st.integers(lowest, highest)) for _ in range(world_size))


@st.composite
def lists(draw, world_size: int) -> Lists:
    form = draw(st.sampled_from(["sampler", "batch_sampler", "batches as sampler"]))
    batch_size = draw(st.integers(1, 9))
    if form == "sampler" and draw(rarely(5)):
        batch_size = None
    # Where batches are drawn as if they were samples, nothing is said of dropping.
    drop_last = form != "batches as sampler" and batch_size is not None and draw(rarely(3))
    return Lists(
        lengths=lengths(draw, world_size, batch_size if drop_last else 1),
        batch_size=batch_size,
        form=form,
        order=draw(st.sampled_from(["given", "epoch", "random"])),
        drop_last=drop_last,
        as_tensor=form == "batches as sampler" or draw(st.booleans()),
    )


@st.composite
def streams(draw, world_size: int) -> Streams:
    batch_size = draw(st.none() | st.integers(1, 9))
    drop_last = batch_size is not None and draw(rarely(3))
    return Streams(
        lengths=lengths(draw, world_size, batch_size if drop_last else 1),
        batch_size=batch_size,
        ready=batch_size is None and draw(st.booleans()),
        drop_last=drop_last,
        as_tensor=draw(st.booleans()),
    )


@st.composite
def dynamic(draw, world_size: int) -> Dynamic:
    at_least = 0 if draw(rarely(3)) else 1
    of_rank = st.lists(st.integers(1, 9), min_size=at_least, max_size=7).map(tuple)
    of_epoch = st.tuples(*[of_rank] * world_size)
    return Dynamic(
        sizes=tuple(draw(of_epoch) for _ in range(draw(st.integers(1, 2)))),
        drop_last=draw(rarely(3)),
        as_tensor=draw(st.booleans()),
    )


@st.composite
def dealt_batches(draw, world_size: int) -> DealtBatches:
    batch_size = draw(st.integers(1, 9))
    enough = 0 if draw(rarely(3)) else min(60, 1 + batch_size * (world_size - 1))
    return DealtBatches(draw(st.integers(enough, 60)), batch_size, draw(st.booleans()), draw(st.booleans()))


@st.composite
def examples(draw, world_size: int) -> Example:
    kinds = [dealt(), lists(world_size), streams(world_size), dynamic(world_size), dealt_batches(world_size)]
    data = draw(st.one_of(*kinds))
    even_batches = not draw(rarely(4))
    workers = 2 if draw(rarely(40)) else 0
    # What is skipped before an epoch that cannot be evened has to leave something to some rank.
    counts = [[len(data.own(world_size, rank, epoch, workers)) for rank in range(world_size)] for epoch in (0, 1)]
    most = 8 if all(map(all, counts)) else max(0, min(map(max, counts)) - 1)
    passes = []
    for _ in range(draw(st.integers(1, 3))):
        again = bool(passes) and draw(rarely(3))
        passes.append(
            Pass(
                skip=draw(st.integers(0, most)) if not again and draw(rarely(3)) else 0,
                again=again,
                stop=draw(st.integers(1, 8)) if draw(rarely(4)) else None,
                # Ranks that go on by themselves do not know when others end their epoch.
                epoch=draw(st.integers(0, 9)) if not even_batches or draw(rarely(4)) else None,
            )
        )
    return Example(
        data=data,
        passes=tuple(passes),
        even_batches=even_batches,
        accumulation=draw(st.integers(1, 3)),
        # Lists and streams have no mark, and on one rank nothing is detected.
        already_sharded=True
        if world_size == 1 or isinstance(data, (Lists, Streams))
        else draw(st.sampled_from([True, None])),
        as_objects=draw(st.booleans()),
        workers=workers,
        persistent_workers=workers > 0 and draw(st.booleans()),
        patience=draw(st.none() | st.integers(0, 3)),
    )


def found_before(world_size: int) -> list[Example]:
    """Small examples that were wrong once. They are tried in every run, one after the other."""
    same = (2,) * world_size
    behind_one = (Pass(skip=1),)
    return [
        # Workers draw from a sampler twice before they draw the first batch.
        Example(Lists(same, batch_size=1), passes=behind_one, workers=2),
        # An item alone has no length.
        Example(Streams(same, batch_size=None), passes=behind_one),
        Example(Dealt(1, batch_size=1, form="wrapped")),
        # The ranks were no longer in step for the next loader after an empty rank.
        Example(Lists((*same[1:], 0), batch_size=8, order="epoch")),
        Example(Dynamic((((8, 3),) * (world_size - 1) + ((2, 2, 4),),))),
        # What was skipped once is not skipped again.
        Example(Lists(same, batch_size=1), passes=(*behind_one, Pass(again=True))),
    ]


# --------------------------------------------------------------------------------------- the loaders, as a user's are


class Stream(IterableDataset):
    """What a rank reads; each worker reads a part of it."""

    def __init__(self, entries: list):
        self.entries = entries

    def __iter__(self):
        worker = get_worker_info()
        return iter(self.entries if worker is None else self.entries[worker.id :: worker.num_workers])


class ByEpoch:
    """A rank's own sampler, which draws another order in each epoch."""

    def __init__(self, number: int, rank: int):
        self.number, self.rank, self.epoch = number, rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(shuffled(self.number, self.rank, self.epoch))

    def __len__(self) -> int:
        return self.number


class Wrapped:
    """A sampler of the user's own that passes on the indices of another."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class DynamicBatches:
    """A batch sampler of the user's own, whose batches have any size, on each rank and in each epoch another."""

    def __init__(self, data: Dynamic, num_replicas: int, rank: int):
        self.data, self.num_replicas, self.rank = data, num_replicas, rank
        self.drop_last = data.drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        first = items_of(self.rank, 1)[0]
        return iter([[item - first for item in batch] for batch in self.data.batches(self.rank, self.epoch)])


def loader_of(example: Example, world_size: int, rank: int) -> DataLoader:
    data = example.data
    settings = {"num_workers": example.workers, "persistent_workers": example.persistent_workers}

    if isinstance(data, Streams):
        entries = data.entries(rank)
        if data.ready or data.as_tensor:
            entries = [torch.tensor(entry) for entry in entries]
        return DataLoader(Stream(entries), batch_size=data.batch_size, drop_last=data.drop_last, **settings)

    if isinstance(data, Lists):
        items = items_of(rank, data.lengths[rank])
    elif isinstance(data, Dynamic):
        items = items_of(rank, data.length(rank))
    else:
        items = list(range(data.length))
    dataset = torch.tensor(items, dtype=torch.int64) if data.as_tensor else items

    if isinstance(data, Dynamic):
        return DataLoader(dataset, batch_sampler=DynamicBatches(data, world_size, rank), **settings)
    if isinstance(data, DealtBatches):
        # torch has no random sampler for nothing.
        sampler = RandomSampler(dataset) if data.shuffle and items else SequentialSampler(dataset)
        return DataLoader(
            dataset, batch_sampler=DealtBatchSampler(sampler, data.batch_size, world_size, rank), **settings
        )

    if isinstance(data, Dealt):
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=data.shuffle, drop_last=data.sampler_drop_last)
        if "wrapped" in data.form:
            sampler = Wrapped(sampler)
    elif data.order == "epoch":
        sampler = ByEpoch(len(items), rank)
    else:
        sampler = RandomSampler(dataset) if data.order == "random" and items else SequentialSampler(dataset)
    if data.form in ("sampler", "wrapped"):
        return DataLoader(dataset, batch_size=data.batch_size, sampler=sampler, drop_last=data.drop_last, **settings)
    batches = BatchSampler(sampler, data.batch_size, data.drop_last)
    if data.form == "batches as sampler":
        return DataLoader(dataset, batch_size=None, sampler=batches, **settings)
    return DataLoader(dataset, batch_sampler=batches, **settings)


# ---------------------------------------------------------------------------------------------------- on every rank


class Deviation(Exception):
    """A rank has made another number of steps. It says so at once: the others wait for it."""


def items_in(batch) -> list[int]:
    """The items of a batch, or of what was gathered: a tensor, an item alone, or a list of them."""
    if isinstance(batch, (list, tuple)):
        return [item for part in batch for item in items_in(part)]
    return batch.reshape(-1).tolist() if isinstance(batch, torch.Tensor) else [batch]


def known(read):
    try:
        return read()
    except TypeError:
        return None


def seen(number: int, example: Example, num_steps: list[list[int]], fails: bool) -> dict:
    """
    Goes through an example on this rank.

    Args:
        number (`int`): Which of the examples it is.
        example (`Example`): What to do.
        num_steps (`list[list[int]]`): The steps that each rank should make in each pass, by pass and rank.
        fails (`bool`): Whether an error is due.
    """
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=example.accumulation,
        dataloader_config=DataLoaderConfiguration(even_batches=example.even_batches),
    )
    rank = accelerator.process_index
    found = {"passes": [], "error": None, "total": None}
    try:
        prepared = accelerator.prepare(
            loader_of(example, accelerator.num_processes, rank), already_sharded=example.already_sharded
        )
        found["total"] = known(lambda: prepared.total_dataset_length)
        for one, due in zip(example.passes, num_steps):
            if one.epoch is not None:
                prepared.set_epoch(one.epoch)
            if not one.again:
                loader = accelerator.skip_first_batches(prepared, one.skip) if one.skip else prepared
            steps: list[dict] = []
            found["passes"].append({"length": known(lambda: len(loader)), "steps": steps})
            for step, batch in enumerate(loader, 1):
                if step > due[rank]:
                    raise Deviation(f"example {number} on rank {rank}: more than {due[rank]} steps: {example}")
                with accelerator.accumulate():
                    steps.append(
                        {
                            "items": items_in(batch),
                            "ends": (loader.end_of_dataloader, accelerator.gradient_state.end_of_dataloader),
                            "syncs": accelerator.sync_gradients,
                        }
                    )
                    # Together, as long as there are all.
                    if step <= min(due):
                        mine = batch
                        if example.as_objects:
                            mine = items_in(batch)
                        steps[-1]["gathered"] = items_in(accelerator.gather_for_metrics(mine))
                if step == one.stop:
                    break
            if len(steps) < due[rank]:
                raise Deviation(
                    f"example {number} on rank {rank}: {len(steps)} steps instead of {due[rank]}: {example}"
                )
    except ValueError as error:
        if not fails:
            raise
        found["error"] = str(error)
    return found


def all_seen(tasks: list[tuple]) -> list[dict]:
    found = []
    for number, task in enumerate(tasks):
        with in_blocks(task[0].patience):
            found.append(seen(number, *task))
    return found


# ------------------------------------------------------------------------------------------------------- the checks


def check(example: Example, world_size: int, due: list, found: list[dict]) -> None:
    """Compares what was seen, by rank, with what is due, by pass."""
    data = example.data
    for rank in range(world_size):
        if due[-1].empty:
            numbers = ", ".join(map(str, due[-1].empty))
            named = f"rank {numbers} has no batch" if len(due[-1].empty) == 1 else f"ranks {numbers} have no batch"
            assert named in (found[rank]["error"] or "no error"), (rank, found[rank]["error"])
        else:
            assert found[rank]["error"] is None
            assert len(found[rank]["passes"]) == len(example.passes)
            total = found[rank]["total"]
            assert (
                total == data.total(world_size)
                if data.knows_total
                else total is None or total == data.total(world_size)
            )

    for number, this in enumerate(due):
        if this.empty:
            assert not any(rank["passes"][number:] and rank["passes"][number]["steps"] for rank in found)
            continue
        passes = [rank["passes"][number] for rank in found]
        for rank in range(world_size):
            check_rank(example, this.steps[rank], passes[rank]["steps"], data.everything(world_size, this.epoch)[rank])
            if data.has_length:
                assert passes[rank]["length"] == this.length[rank]
        if example.even_batches:
            for steps in zip(*(of_rank["steps"] for of_rank in passes), strict=True):
                assert len({(step["ends"], step["syncs"]) for step in steps}) == 1
        check_samples(example, world_size, number, this, passes)


def check_rank(example: Example, due: list, found: list[dict], everything: set[int]) -> None:
    """The batches of one rank in their order, and what each step says of itself."""
    assert len(found) == len(due)
    for step, is_due in zip(found, due):
        items = [item for item, _ in is_due.samples]
        if example.data.has_exact_order:
            assert step["items"] == items
        else:
            assert len(step["items"]) == len(items)
            assert not duplicates(step["items"])
            assert everything.issuperset(step["items"])
        assert step["ends"] == (is_due.is_last, is_due.is_last)
        assert step["syncs"] == is_due.sync_gradients


def check_samples(example: Example, world_size: int, number: int, due, passes: list[dict]) -> None:
    """Each real sample once: in what the ranks have together, and in what they gather."""
    real = [
        [
            [item for item, sample in zip(step["items"], is_due.samples) if sample.is_real]
            for step, is_due in zip(of_rank["steps"], of_rank_due)
        ]
        for of_rank, of_rank_due in zip(passes, due.steps)
    ]
    for of_rank in passes:
        for step, parts in zip(of_rank["steps"], zip(*real)):
            assert step["gathered"] == [item for part in parts for item in part]
    if example.even_batches:
        union = [item for step in passes[0]["steps"] for item in step["gathered"]]
    else:
        union = [item for of_rank in real for step in of_rank for item in step]
    # What a sampler of the user's own repeats is taken as real; each step has been compared above.
    if "wrapped" not in getattr(example.data, "form", ""):
        assert not duplicates(union)
    one = example.passes[number]
    if example.data.is_complete and not one.skip and one.stop is None:
        assert set(union) == set().union(*example.data.everything(world_size, due.epoch))


# -------------------------------------------------------------------------------------------------------- the tests


def share(world_size: int) -> int:
    return math.ceil(EXAMPLES * PARTS[world_size])


def drawn(world_size: int) -> list[Example]:
    """
    Examples that all differ. What hypothesis offers in a row is often alike, so it is asked for more, and some are
    chosen.
    """
    offered: list[Example] = []
    configured(lambda example: offered.append(example), world_size, [Phase.generate])()
    distinct = list(dict.fromkeys(offered))
    return random.Random(SEED).sample(distinct, min(share(world_size), len(distinct)))


def configured(test, world_size: int, phases: list[Phase]):
    """A property of single examples, of which every call tries the same ones in the same order."""
    configuration = settings(
        max_examples=OFFERED * share(world_size),
        phases=phases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    return seed(SEED + world_size)(configuration(given(examples(world_size))(test)))


def attempt(world_size: int, batch: list[Example]) -> None:
    """Runs examples on ranks, one after the other, and checks them all."""
    due = [expected(example, world_size) for example in batch]
    tasks = [
        (example, [this.num_steps for this in passes], bool(passes[-1].empty)) for example, passes in zip(batch, due)
    ]
    found = run(world_size, all_seen, tasks, timeout=120, grace=1, env={"ACCELERATE_PRESHARDED_TIMEOUT": "30"})
    for example, passes, by_rank in zip(batch, due, zip(*found)):
        try:
            check(example, world_size, passes, by_rank)
        except AssertionError as error:
            raise AssertionError(f"{error}\n\nin {example}\n\ndue: {passes}\n\nseen: {by_rank}") from error


def failure_of(world_size: int, batch: list[Example]) -> Exception | None:
    try:
        attempt(world_size, batch)
    except (AssertionError, RankError) as error:
        return error
    return None


def show_smaller(world_size: int, batch: list[Example]) -> None:
    """Raises the failure of a single example, if one fails, as small as hypothesis can make it in the time."""
    deadline = time.monotonic() + SHRINKING
    failures: dict[Example, Exception | None] = {}

    def alone(example: Example) -> None:
        # First those of the batch come along again, among others that are not tried, and then what is made of one.
        shrinking = any(failures.values())
        if example not in failures and (example in batch or shrinking) and time.monotonic() < deadline:
            failures[example] = failure_of(world_size, [example])
        if failures.get(example) is not None:
            raise failures[example]

    configured(alone, world_size, [Phase.generate, Phase.shrink])()


def show_fewer(world_size: int, batch: list[Example], failure: Exception) -> None:
    """Raises the failure of examples that fail together, without those that it does not take."""
    deadline = time.monotonic() + SHRINKING
    for example in batch:
        rest = [other for other in batch if other is not example]
        found = failure_of(world_size, rest) if time.monotonic() < deadline else None
        if found is not None:
            batch, failure = rest, found
    listed = "\n".join(map(repr, batch))
    raise AssertionError(f"These examples fail, one after the other:\n{listed}") from failure


@pytest.mark.parametrize("world_size", PARTS)
def test_every_sample_once_in_equal_steps(world_size):
    print(f"\nseed {SEED}")
    chosen = found_before(world_size) + drawn(world_size)
    for start in range(0, len(chosen), AT_ONCE):
        batch = chosen[start : start + AT_ONCE]
        failure = failure_of(world_size, batch)
        if failure is not None:
            show_smaller(world_size, batch)
            show_fewer(world_size, batch, failure)
    kinds = collections.Counter(type(example.data).__name__ for example in chosen)
    print(f"{len(chosen)} examples on {world_size} ranks: {dict(kinds)}")
    assert len(set(chosen)) >= share(world_size)


def test_there_are_enough_examples():
    assert IN_CI >= 500
    assert sum(map(share, PARTS)) >= EXAMPLES
