# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What can go wrong on one rank, and what the others hear of it: an error, in time, and not nothing."""

import gc
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parameterized import parameterized
from ranks import Failure, run
from shared import Stream, in_blocks, lists, raised
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from accelerate_presharded import Accelerator
from accelerate_presharded.agreement import TIMEOUT_VARIABLE


PROMPT = 15.0  # seconds


class Broken(Exception):
    pass


def gone() -> None:
    """End like a process that was killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Failing(IterableDataset):
    """A stream of ten that does something in the place of one of its samples."""

    def __init__(self, at: int | None, act=None, items: int = 10):
        self.at, self.act, self.items = at, act, items

    def __iter__(self):
        for item in range(self.items):
            if item == self.at:
                self.act()
            yield torch.tensor([float(item)])


class FailingList(Dataset):
    """The same, map-style."""

    def __init__(self, at: int | None, act=None, items: int = 10):
        self.at, self.act, self.items = at, act, items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        if index == self.at:
            self.act()
        return torch.tensor([float(index)])


def breaks() -> None:
    raise Broken("the disk is full")


def dies_in_worker() -> None:
    assert get_worker_info() is not None
    gone()


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def make_loader(accelerator, kind: str, at: int, act, **settings):
    """A loader that fails on the last rank."""
    cls = Failing if kind == "stream" else FailingList
    dataset = cls(at, act) if last_rank() else cls(None)
    return accelerator.prepare(DataLoader(dataset, batch_size=1, **settings), already_sharded=True)


def timed_pass(loader, step=lambda batch: None) -> tuple:
    """The error of a pass, the number of its steps, and how many seconds it took."""
    start, steps = time.monotonic(), []

    def whole_pass():
        for batch in loader:
            step(batch)
            steps.append(batch)

    return raised(whole_pass), len(steps), time.monotonic() - start


def training(accelerator) -> tuple:
    """A model under DDP, and a function that takes a step with a batch."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def step(batch):
        optimizer.zero_grad()
        accelerator.backward(model(batch).mean())
        optimizer.step()

    return model, step


def run_to_the_end(world_size: int, function, *args, env: dict | None = None) -> tuple[list, Failure]:
    """Run a function on ranks that end with it, as scripts do. Returns what all but the last have returned, and how
    the last has ended. Whoever hears of a fault ends too, and so the next one hears of it.
    """

    def to_the_end(directory: str) -> None:
        result = function(*args)
        (Path(directory) / str(dist.get_rank())).write_text(json.dumps(result))
        os._exit(0)

    with tempfile.TemporaryDirectory() as directory:
        ends = run(world_size, to_the_end, directory, timeout=40.0, grace=20.0, outcomes=True, env=env)
        results = []
        for rank, end in enumerate(ends[:-1]):
            file = Path(directory) / str(rank)
            assert file.exists(), f"rank {rank}: {end}"
            results.append(json.loads(file.read_text()))
    return results, ends[-1]


def assert_heard(outcome: tuple, *words: str) -> None:
    error, _, seconds = outcome[:3]
    assert error is not None, "it has not heard of the fault"
    assert error[0] == "RuntimeError", error
    for word in words:
        assert word in error[1], error[1]
    assert seconds < PROMPT


# at prepare


def prepare_unlike_the_others(fault: str) -> tuple:
    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if last_rank() and fault == "absent":
        return None
    if last_rank() and fault == "killed":
        gone()
    start = time.monotonic()
    index = 0 if last_rank() and fault == "shard" else rank
    sampler = DistributedSampler(range(8), world_size, index, shuffle=False)
    loader = DataLoader(range(8), batch_size=2, sampler=sampler)
    ordinary = last_rank() and fault == "ordinary"
    error = raised(accelerator.prepare, DataLoader(range(8)) if ordinary else loader)
    return error, 0, time.monotonic() - start


@parameterized.expand(
    [(2, "absent"), (3, "absent"), (2, "killed"), (3, "killed"), (2, "ordinary"), (2, "shard"), (3, "shard")]
)
def test_a_rank_that_prepares_something_else(world_size, fault):
    deadline = "2" if fault in ("absent", "killed") else "60"
    others, _ = run_to_the_end(world_size, prepare_unlike_the_others, fault, env={TIMEOUT_VARIABLE: deadline})
    texts = set()
    for error, _, seconds in others:
        assert error[0] == "ValueError"
        assert f"ank {world_size - 1}" in error[1]
        assert seconds < PROMPT
        texts.add(error[1])
    assert len(texts) == 1


# an error in the data


def error_in_stream(at: int, num_workers: int, patience: int | None) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, "stream", at, breaks, num_workers=num_workers)
    with in_blocks(patience):
        outcome = timed_pass(loader)
    gc.collect()
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return *outcome, len(multiprocessing.active_children())


@parameterized.expand(
    [(2, 0, 0), (2, 1, 0), (2, 4, 0), (3, 9, 0), (4, 5, 0), (3, 4, 1)]
    + [(2, at, 0, 0) for at in (0, 1, 2, 3, 4, 6, 7)]
)
def test_an_error_in_a_stream(world_size, at, num_workers, patience=None):
    *others, failed = run(world_size, error_in_stream, at, num_workers, patience, timeout=30.0)
    assert failed[0][0] == "Broken" and "the disk is full" in failed[0][1]
    for outcome in others:
        assert_heard(outcome, f"rank {world_size - 1}", "Broken", "the disk is full")
    # All ranks have taken the steps before the one that cannot be taken.
    assert [outcome[1] for outcome in (*others, failed)] == [at] * world_size
    assert [outcome[3] for outcome in (*others, failed)] == [0] * world_size  # no worker is left


def error_in_the_loop(at: int) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, "stream", 0, lambda: None)

    def step(batch):
        if last_rank() and batch.item() == at:
            breaks()

    return timed_pass(loader, step)


@parameterized.expand([(2, 0), (3, 4), (4, 7)])
def test_an_error_in_the_loop_over_a_stream(world_size, at):
    *others, failed = run(world_size, error_in_the_loop, at, timeout=30.0)
    assert failed[0] == ("Broken", "the disk is full")
    for outcome in others:
        assert_heard(outcome, f"rank {world_size - 1}", "left its loop")
        assert at <= outcome[1] <= at + 3


def error_ends_the_process(kind: str, at: int) -> tuple:
    """As a script does that does not catch it."""
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, kind, at, breaks)
    model, step = training(accelerator)
    outcome = timed_pass(loader, step)
    if outcome[0][0] == "Broken":
        os._exit(1)
    return outcome


@parameterized.expand([("map-style", 2, 3), ("map-style", 3, 5), ("stream", 2, 3), ("stream", 3, 5)])
def test_an_error_that_ends_a_process_in_training(kind, world_size, at):
    others, end = run_to_the_end(world_size, error_ends_the_process, kind, at)
    assert end.type_name == "Died" and "code 1" in end.message
    for outcome in others:
        assert_heard(outcome)
        assert outcome[1] <= at


# killed


def killed(kind: str, trains: bool, at: int) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, kind, at, gone)
    return timed_pass(loader, training(accelerator)[1] if trains else lambda batch: None)


@parameterized.expand(itertools.product((2, 3), (("stream", False), ("stream", True), ("map-style", True)), (0, 5)))
def test_a_rank_that_is_killed(world_size, how, at):
    kind, trains = how
    others, end = run_to_the_end(world_size, killed, kind, trains, at)
    assert end.type_name == "Died" and "SIGKILL" in end.message
    for outcome in others:
        assert_heard(outcome)
        if not trains:
            assert "a rank has gone" in outcome[0][1]
        assert outcome[1] <= at


# leaving early


def leave_early(at: int) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, "stream", 0, lambda: None)
    if not last_rank():
        return timed_pass(loader)
    for step, _ in enumerate(loader):
        if step == at:
            break
    return None


@parameterized.expand([(2, 0), (2, 7), (3, 4), (4, 1)])
def test_a_rank_that_breaks_out_of_its_loop(world_size, at):
    *others, left = run(world_size, leave_early, at, timeout=30.0)
    assert left is None
    for outcome in others:
        assert_heard(outcome, f"rank {world_size - 1}", "left its loop")
        assert at <= outcome[1] <= at + 3


def all_leave(at: int) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    items = list(range(10 * rank, 10 * rank + 4 - rank % 2))
    loader = accelerator.prepare(DataLoader(Stream(items)), already_sharded=True)
    results = []
    for stop_at in (at, None, at, at, None):
        seen = []
        for step, batch in enumerate(loader):
            seen.append(batch.item())
            if step == stop_at:
                break
        results.append(seen)
    return results


@parameterized.expand(itertools.product((2, 3, 4), (0, 1, 2, 3)))
def test_all_ranks_break_at_the_same_step(world_size, at):
    for rank, results in enumerate(run(world_size, all_leave, at, timeout=30.0)):
        first = 10 * rank
        whole = [first, first + 1, first + 2, first if rank % 2 else first + 3]
        part = whole[: at + 1]
        assert results == [part, whole, part, part, whole]


class Holder:
    """Something in a cycle, which only the garbage collector ends."""

    def __init__(self, held):
        self.held, self.itself = held, self


def kept_iterators(when: str) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    loader = accelerator.prepare(DataLoader(Stream([10 * rank + item for item in range(4)])), already_sharded=True)
    gc.disable()
    kept, results = [], []
    for epoch in range(3):
        iterator = iter(loader)
        results.append([next(iterator).item(), next(iterator).item()])
        if when == "kept":
            kept.append(iterator)
        elif when == "dropped at once":
            kept = iterator
        elif when == "dropped together":
            kept.append(iterator)
            if epoch == 1:
                kept.clear()
        else:
            Holder(iterator)
        del iterator
        if when == "collected at different times" and epoch == rank:
            gc.collect()
        results.append(lists(loader))
        if when == "collected at different times" and epoch != rank:
            gc.collect()
    return results


@parameterized.expand(
    itertools.product(
        (2, 3),
        (
            "kept",
            "dropped at once",
            "dropped together",
            "collected",
            "collected at different times",
        ),
    )
)
def test_iterators_that_live_on(world_size, when):
    for rank, results in enumerate(run(world_size, kept_iterators, when, timeout=15.0)):
        items = [10 * rank + item for item in range(4)]
        assert results == [items[:2], [[item] for item in items]] * 3


# workers


def worker_dies(kind: str, at: int, trains: bool) -> tuple:
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, kind, at, dies_in_worker, num_workers=1)
    outcome = timed_pass(loader, training(accelerator)[1] if trains else lambda batch: None)
    if trains and last_rank():
        os._exit(1)
    return outcome


# More than once, since it matters what the rank is doing at that moment.
@parameterized.expand([(2, 0), *[(2, 4), (3, 4)] * 4])
def test_a_worker_of_a_stream_that_dies(world_size, at):
    outcomes = run(world_size, worker_dies, "stream", at, False, timeout=PROMPT, outcomes=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    *others, failed = outcomes
    assert failed[0] is not None and "a rank has gone" not in failed[0][1], failed
    for outcome in others:
        # torch raises the error from a signal handler, in the middle of whatever the rank is doing.
        assert_heard(outcome, f"rank {world_size - 1}")


@parameterized.expand([("map-style", 2), ("stream", 2), ("map-style", 3)])
def test_a_worker_that_dies_in_training(kind, world_size):
    others, end = run_to_the_end(world_size, worker_dies, kind, 4, True)
    assert end.type_name == "Died" and "code 1" in end.message
    for outcome in others:
        assert_heard(outcome)


def interrupted_while_waiting(at: int) -> tuple:
    """What the death of a worker does to a rank that waits for the others: a signal handler raises an error."""
    accelerator = Accelerator(cpu=True)
    loader = make_loader(accelerator, "stream", 0, lambda: None)

    def raise_error(*_):
        raise RuntimeError("a worker was killed")

    signal.signal(signal.SIGALRM, raise_error)

    def step(batch):
        if batch.item() != at:
            return
        if last_rank():
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            time.sleep(1.5)

    return timed_pass(loader, step)


@parameterized.expand([(2,), (3,)])
def test_an_error_that_comes_while_a_rank_waits(world_size):
    outcomes = run(world_size, interrupted_while_waiting, 3, timeout=PROMPT, outcomes=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    *others, failed = outcomes
    for outcome in others:
        assert_heard(outcome, f"rank {world_size - 1}")
    assert failed[0] == ("RuntimeError", "a worker was killed")


# nothing to read


def empty_in_training(kind: str) -> tuple:
    accelerator = Accelerator(cpu=True)
    items = [] if last_rank() else [torch.tensor([1.0]), torch.tensor([2.0])]
    start = time.monotonic()
    prepared = []
    error = raised(
        lambda: prepared.append(
            accelerator.prepare(DataLoader(items if kind == "map-style" else Stream(items)), already_sharded=True)
        )
    )
    if error is None:
        return timed_pass(prepared[0], training(accelerator)[1])
    return error, 0, time.monotonic() - start


@parameterized.expand(itertools.product((2, 3), ("map-style", "stream")))
def test_an_empty_rank_in_training(world_size, kind):
    outcomes = run(world_size, empty_in_training, kind, timeout=30.0)
    for error, steps, seconds in outcomes:
        assert error == outcomes[0][0]
        assert error[0] == "ValueError" and f"rank {world_size - 1} has no batch" in error[1]
        assert steps == 0
        assert seconds < PROMPT
