# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Each rank goes on where it stopped: in new processes, against a run that nobody has interrupted."""

import gc
import json
import logging
import os
import pickle
import signal
import tempfile
import weakref
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import ProjectConfiguration
from parameterized import parameterized
from ranks import Failure, run
from shared import Remembering, Stream, lists
from torch.utils.data import DataLoader, DistributedSampler

from accelerate_presharded import Accelerator, PreshardedDataLoader


EPOCHS = 3


def make(kind: str, accelerator: Accelerator) -> DataLoader:
    rank, world_size = accelerator.process_index, accelerator.num_processes
    items = [100 * rank + item for item in range(5 + 4 * rank)]  # 3, 5, 7 batches
    if kind == "distributed":
        sampler = DistributedSampler(range(13), world_size, rank, shuffle=True)
        return DataLoader(range(13), batch_size=2, sampler=sampler)
    if kind == "shuffled":
        return DataLoader(items, batch_size=2, shuffle=True)
    if kind == "generator":
        return DataLoader(items, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(rank))
    if kind == "stream":
        return DataLoader(Stream(items), batch_size=2)
    if kind == "drop_last":
        return DataLoader(Remembering(items), batch_size=2, drop_last=True)
    if kind.startswith("stateful"):
        return make_stateful(kind, rank, world_size, items)
    assert kind == "remembering"
    return DataLoader(Remembering(items), batch_size=2)


def make_stateful(kind: str, rank: int, world_size: int, items: list) -> DataLoader:
    """torchdata's own, over a stream with a state, over a list, or with its own sampler."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    workers = 2 if kind.endswith("workers") else 0
    if kind.startswith("stateful list"):
        return StatefulDataLoader(items, batch_size=2, shuffle=True, num_workers=workers)
    if kind.startswith("stateful sampler"):
        sampler = StatefulDistributedSampler(range(13), world_size, rank, shuffle=True)
        return StatefulDataLoader(range(13), batch_size=2, sampler=sampler, num_workers=workers)
    return StatefulDataLoader(Remembering(items), batch_size=2, num_workers=workers)


def go_through(accelerator, loader, first=None, stop=None, folder=None) -> list:
    """The steps of all epochs that are left, up to the one at which the state is saved."""
    steps = []
    while loader.iteration < EPOCHS:
        for batch in loader if first is None else first:
            gathered = accelerator.gather_for_metrics(batch).tolist()
            steps.append((batch.tolist(), accelerator.gradient_state.end_of_dataloader, gathered))
            if len(steps) == stop:
                accelerator.save_state(folder)
                return steps
        first = None
    return steps


def uninterrupted(kind: str) -> list:
    accelerator = Accelerator(cpu=True)
    return go_through(accelerator, accelerator.prepare(make(kind, accelerator), already_sharded=True))


def interrupted(kind: str, stop: int, folder: str, kill: bool = False) -> list:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(kind, accelerator), already_sharded=True)
    steps = go_through(accelerator, loader, stop=stop, folder=folder)
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return steps


def resumed(kind: str, folder: str) -> list:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(kind, accelerator), already_sharded=True)
    accelerator.load_state(folder)
    # Harmless for a loader that goes on by itself: nothing is skipped twice.
    first = accelerator.skip_first_batches(loader, loader.batches_yielded)
    return go_through(accelerator, loader, first=first)


@parameterized.expand(
    [(2, kind) for kind in ("distributed", "shuffled", "generator", "stream", "remembering", "drop_last")]
    + [(2, kind) for kind in ("stateful", "stateful list", "stateful sampler")]
    + [(3, "distributed"), (3, "remembering"), (3, "stateful")]
)
def test_goes_on_as_if_nobody_had_interrupted_it(world_size, kind):
    expected = run(world_size, uninterrupted, kind)
    num_steps = len(expected[0])
    # In the middle of an epoch, at its end, in the replay of the shorter ranks, and in the last epoch.
    for stop in sorted({1, 2, num_steps // 3 - 1, num_steps // 3, num_steps // 3 + 1, num_steps - 1, num_steps}):
        with tempfile.TemporaryDirectory() as folder:
            before = run(world_size, interrupted, kind, stop, folder)
            after = run(world_size, resumed, kind, folder)
        for rank in range(world_size):
            assert before[rank] + after[rank] == expected[rank], (stop, rank)


def test_a_rank_that_is_killed_right_after_saving(tmp_path):
    expected = run(2, uninterrupted, "distributed")
    outcomes = run(2, interrupted, "distributed", 5, str(tmp_path), True, outcomes=True)
    assert all(isinstance(outcome, Failure) and "SIGKILL" in outcome.message for outcome in outcomes)
    after = run(2, resumed, "distributed", str(tmp_path))
    assert [steps[5:] for steps in expected] == after


def two_loaders(folder: str | None, stop: int | None) -> list:
    """Two loaders iterated in step under gradient accumulation; the state is saved at `stop`, or loaded without it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler, one, two = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        make("remembering", accelerator),
        make("distributed", accelerator),
        already_sharded=True,
    )
    if folder is not None and stop is None:
        accelerator.load_state(folder)
    first = accelerator.skip_first_batches(two, two.batches_yielded)
    steps = []
    while two.iteration < EPOCHS:
        for a, b in zip(one, first):
            with accelerator.accumulate(model):
                accelerator.backward(model(b[:, None].float()).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rate = optimizer.param_groups[0]["lr"]
            steps.append((a.tolist(), b.tolist(), accelerator.sync_gradients, rate))
            if len(steps) == stop:
                accelerator.save_state(folder)
                return steps
        list(first)  # the longer one, to its end
        first = two
    return steps


# Accelerate saves no gradients, so a model that is resumed between two syncs has lost some; its loaders have not.
@parameterized.expand([(1,), (2,), (5,), (6,)])
def test_two_loaders_with_accumulation_and_a_scheduler(stop):
    expected = run(2, two_loaders, None, None)
    with tempfile.TemporaryDirectory() as folder:
        before = run(2, two_loaders, folder, stop)
        after = run(2, two_loaders, folder, None)
    assert [first + rest for first, rest in zip(before, after)] == expected


def between_epochs(kind: str, folder: str, load: bool) -> list:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(kind, accelerator), already_sharded=True)
    if load:
        accelerator.load_state(folder)
    steps = []  # of all the epochs that this process has gone through
    while loader.iteration < (EPOCHS if load else 2):
        steps += [batch.tolist() for batch in loader]
    if not load:
        accelerator.save_state(folder)
    return steps


def test_case_23_the_epoch_comes_back(tmp_path):
    run(2, between_epochs, "distributed", str(tmp_path), False)
    after = run(2, between_epochs, "distributed", str(tmp_path), True)
    for rank, steps in enumerate(after):
        sampler = DistributedSampler(range(13), 2, rank, shuffle=True)
        sampler.set_epoch(2)
        order = list(sampler)
        assert steps == [order[start : start + 2] for start in range(0, 7, 2)]


def one_process_in_a_group(folder: str) -> tuple | None:
    """Without a GPU and without being told so, Accelerate takes each process that a launcher starts for the only one."""
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        return None
    loader = accelerator.prepare(DataLoader(range(6), batch_size=2), already_sharded=True)
    for _ in loader:
        break
    folder = f"{folder}/{dist.get_rank()}"
    accelerator.save_state(folder)
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(6), batch_size=2), already_sharded=True)
    # The other process has come to its end by then, or does something else.
    if dist.get_rank() == 0:
        accelerator.load_state(folder)
    return accelerator.num_processes, loader.batches_yielded


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the processes are ranks")
def test_nobody_waits_for_ranks_of_which_accelerate_does_not_know(tmp_path):
    env = {"ACCELERATE_USE_CPU": None, "ACCELERATE_PRESHARDED_TIMEOUT": "2"}
    found = run(2, one_process_in_a_group, str(tmp_path), env=env)
    if found == [None, None]:
        pytest.skip("this Accelerate asks the process group")
    assert found == [(1, 1), (1, 0)]


# Of a stream and of a sampler: with the recipes of torchdata.
def test_goes_on_with_workers():
    kind = "stateful list workers"
    expected = run(2, uninterrupted, kind)
    for stop in (2, len(expected[0]) // 3):
        with tempfile.TemporaryDirectory() as folder:
            before = run(2, interrupted, kind, stop, folder)
            after = run(2, resumed, kind, folder)
        assert [first + rest for first, rest in zip(before, after)] == expected, stop


@parameterized.expand([("remembering",), ("drop_last",), ("generator",), ("shuffled",), ("stateful",)])
def test_between_epochs(kind):
    expected = run(2, uninterrupted, kind)
    with tempfile.TemporaryDirectory() as folder:
        run(2, between_epochs, kind, folder, False)
        after = run(2, between_epochs, kind, folder, True)
    for rank, steps in enumerate(after):
        assert steps == [batch for batch, _, _ in expected[rank]][-len(steps) :]
        assert len(steps) == len(expected[rank]) // EPOCHS


def load_error(folder: str) -> str | None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make("distributed", accelerator), already_sharded=True)
    try:
        accelerator.load_state(folder)
    except ValueError as error:
        # Nothing is half restored.
        assert (loader.iteration, loader.batches_yielded) == (0, 0)
        return str(error)
    return None


def break_file(folder, rank: int, how: str) -> None:
    (path,) = folder.glob(f"presharded_loader_*_rank_{rank}.bin")
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "foreign":
        torch.save({"weight": torch.zeros(3)}, path)
    elif how == "other":
        path.write_bytes(b'[{"version": 1}]\n')
    elif how == "version":
        line, rest = path.read_bytes().split(b"\n", 1)
        path.write_bytes(json.dumps({**json.loads(line), "version": 99}).encode() + b"\n" + rest)
    else:
        assert how == "code"
        line, rest = path.read_bytes().split(b"\n", 1)
        own, _ = rest.split(b"\n", 1)
        path.write_bytes(b"\n".join([line, own, pickle.dumps(os.getcwd)]))


@parameterized.expand([("missing",), ("truncated",), ("short",), ("foreign",), ("other",), ("version",), ("code",)])
def test_a_broken_file_of_one_rank_is_refused_on_all(how):
    with tempfile.TemporaryDirectory() as folder:
        run(2, interrupted, "distributed", 5, folder)
        break_file(Path(folder), 1, how)
        first, second = run(2, load_error, folder)
    assert first == second and "nothing was" in first
    assert "ank 1" in first


def test_a_state_of_another_number_of_ranks_is_refused(tmp_path):
    run(2, interrupted, "distributed", 5, str(tmp_path))
    errors = run(3, load_error, str(tmp_path))
    assert errors == [errors[0]] * 3
    assert "2 data-parallel ranks" in errors[0] and "3 now" in errors[0] and "ank 2 has none" in errors[0]


def test_an_older_checkpoint_loads_with_one_warning(tmp_path):
    def save_and_forget(folder):
        interrupted("distributed", 5, folder)
        accelerator = Accelerator(cpu=True)
        accelerator.wait_for_everyone()
        for name in os.listdir(folder):
            if name.startswith("presharded") and name.endswith(f"rank_{accelerator.process_index}.bin"):
                os.unlink(os.path.join(folder, name))
        accelerator.wait_for_everyone()
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("accelerate_presharded.checkpointing").addHandler(handler)
        return load_error(folder), lines

    (first, lines), (second, others) = run(2, save_and_forget, str(tmp_path))
    assert first is None and second is None
    assert len(lines) == 1 and "no state of the already sharded loaders" in lines[0]
    assert others == []


def test_saving_and_loading_make_no_cycle(tmp_path):
    def left_in_the_middle(folder):
        gc.disable()
        accelerator = Accelerator(cpu=True)
        dataset = Stream([1, 2, 3])
        loader = accelerator.prepare(DataLoader(dataset), already_sharded=True)
        for _ in loader:
            accelerator.save_state(folder)
            break
        accelerator.load_state(folder)
        dataset = weakref.ref(dataset)
        del accelerator, loader
        return dataset() is None

    # Workers of an iterator that only the garbage collector finds take seconds to end.
    assert run(2, left_in_the_middle, str(tmp_path)) == [True, True]


def test_whoever_may_read_what_accelerate_saves_may_read_the_states(tmp_path):
    run(2, interrupted, "distributed", 2, str(tmp_path))
    names = ("presharded_loader_0_rank_{}.bin", "random_states_{}.pkl")
    for rank in range(2):
        ours, theirs = ((tmp_path / name.format(rank)).stat().st_mode for name in names)
        assert ours == theirs
    assert not list(tmp_path.glob("*.tmp"))


def test_automatic_checkpoint_naming(tmp_path):
    def named(folder):
        config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=config)
        loader = accelerator.prepare(make("distributed", accelerator), already_sharded=True)
        for number, _ in enumerate(loader):
            if number in (0, 2):
                accelerator.save_state()
        accelerator.load_state()
        return loader.batches_yielded, loader.iteration

    assert run(2, named, str(tmp_path)) == [(3, 0)] * 2


def test_the_state_of_a_loader_on_its_own():
    def own(_):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(make("remembering", accelerator), already_sharded=True)
        before = [next(iter(loader)).tolist()]
        state = loader.state_dict()
        other = accelerator.prepare(make("remembering", accelerator), already_sharded=True)
        other.load_state_dict(state)
        return before, [batch.tolist() for batch in other], sorted(state)

    short, long = run(2, own, None)
    assert short == ([[0, 1]], [[2, 3], [4], [0, 1], [2, 3]], ["num_processes", "rank_0", "version"])
    assert long[1] == [[102, 103], [104, 105], [106, 107], [108]]


class Keeping(Remembering):
    """A stream with more to remember than where it is."""

    def __init__(self, kept):
        super().__init__([1, 2, 3])
        self.kept = kept

    def state_dict(self):
        return {**super().state_dict(), "kept": self.kept}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kept = state["kept"]


@pytest.mark.parametrize(
    "array", [numpy.array(7), numpy.arange(6).reshape(2, 3).T, numpy.arange(4.0)[::-1], numpy.zeros((0, 2), "uint8")]
)
def test_arrays_in_a_loaders_own_state_come_back_as_they_were(array):
    loader, other = PreshardedDataLoader(DataLoader(Keeping(array))), PreshardedDataLoader(DataLoader(Keeping(None)))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    found = other.dataset.kept
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
    assert lists(other) == [[2], [3]]


def through_dcp(kind: str, folder: str, how: str, stop: int | None) -> list:
    """Saves or loads with `torch.distributed.checkpoint`: one folder for all ranks, and no `save_state`."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(kind, accelerator), already_sharded=True)
    first = loader
    if stop is None:
        if how == "object":
            dcp.load({"loader": loader}, checkpoint_id=folder)
        else:
            state = {"loader": loader.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            loader.load_state_dict(state["loader"])
        first = accelerator.skip_first_batches(loader, loader.batches_yielded)
    steps = []
    while loader.iteration < EPOCHS:
        for batch in first:
            steps.append(batch.tolist())
            if len(steps) == stop:
                dcp.save({"loader": loader if how == "object" else loader.state_dict()}, checkpoint_id=folder)
                return steps
        first = loader
    return steps


@parameterized.expand(
    [
        (2, "distributed", "object"),
        (2, "remembering", "dictionary"),
        (3, "stateful", "object"),
        (2, "generator", "object"),
    ]
)
def test_through_a_distributed_checkpoint(world_size, kind, how):
    expected = [[batch for batch, _, _ in steps] for steps in run(world_size, uninterrupted, kind)]
    for stop in (2, len(expected[0]) // EPOCHS, len(expected[0]) // EPOCHS + 1):
        with tempfile.TemporaryDirectory() as folder:
            before = run(world_size, through_dcp, kind, folder, how, stop)
            after = run(world_size, through_dcp, kind, folder, how, None)
        assert [first + rest for first, rest in zip(before, after)] == expected, stop
