# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The loader around one that is already sharded, and what iterating it leaves behind."""

import copy
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import re

import accelerate
import accelerate.data_loader
import numpy.random  # noqa: F401  (or else every worker process imports it)
import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, compare_versions
from parameterized import parameterized
from ranks import run
from shared import (
    DealtBatches,
    Listening,
    ListeningList,
    NoLoader,
    SizedStream,
    Stream,
    collectives,
    flat,
    lists,
    seeded,
)
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, get_worker_info

import accelerate_presharded
from accelerate_presharded import PreshardedDataLoader, prepare_data_loader, skip_first_batches


pytestmark = pytest.mark.usefixtures("fresh_state")


class Multiplying(DataLoader):
    """Changes its batches, and yields them in two parts."""

    def __init__(self, *args, factor=1000, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def __iter__(self):
        for batch in super().__iter__():
            yield self.factor * batch[:1]
            yield self.factor * batch[1:]

    def __len__(self):
        return 2 * super().__len__()

    def scaled(self, number):
        return self.factor * number


class Noting(Dataset):
    """Notes, in memory that workers share, how often each of its samples is loaded."""

    def __init__(self, length: int):
        self.loads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.loads)

    def __getitem__(self, index):
        self.loads[index] += 1
        return index

    def take_loads(self) -> list[int]:
        loads = self.loads.tolist()
        self.loads.zero_()
        return loads


class WorkerIds(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


class SharedAmongWorkers(Stream):
    def __iter__(self):
        worker = get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


def joined(samples):
    return "-".join(map(str, samples))


# Everything is compared with what a loader made in the same way yields by itself.
LOADERS = {
    "batches": lambda: DataLoader(range(7), batch_size=2),
    "drop_last": lambda: DataLoader(range(7), batch_size=2, drop_last=True),
    "shuffled": lambda: DataLoader(range(7), batch_size=2, shuffle=True, generator=seeded(1)),
    "subclass": lambda: Multiplying(range(8), batch_size=2, factor=10),
    "no batches": lambda: DataLoader(torch.arange(5), batch_size=None),
    "no batches, sampler": lambda: DataLoader(torch.arange(6), batch_size=None, sampler=[5, 0, 3]),
    "whole batches": lambda: DataLoader(torch.arange(6), batch_size=None, sampler=BatchSampler([5, 0, 3], 2, False)),
    "list of batches": lambda: DataLoader(range(6), batch_sampler=[[0], [3, 4, 5], [1, 2]]),
    "collate_fn": lambda: DataLoader(range(7), batch_size=3, collate_fn=joined),
    "workers": lambda: DataLoader(range(9), batch_size=2, num_workers=2),
    "persistent workers": lambda: DataLoader(range(9), batch_size=2, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(range(7)), batch_size=2),
    "sized stream": lambda: DataLoader(SizedStream(range(7)), batch_size=2),
    "stream, no batches": lambda: DataLoader(Stream(torch.arange(5)), batch_size=None),
    "stream, workers": lambda: DataLoader(SharedAmongWorkers(range(11)), batch_size=2, num_workers=2),
    "no loader": lambda: NoLoader([torch.tensor([0, 1]), torch.tensor([2])]),
}


def values(batches) -> list:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class TestWrapping:
    @parameterized.expand(list(LOADERS))
    def test_batches_are_the_loader_s_own(self, kind):
        reference = LOADERS[kind]()
        first, second = values(reference), values(reference)
        loader = LOADERS[kind]()
        prepared = prepare_data_loader(loader, already_sharded=True)
        assert prepared.base_dataloader is loader
        assert values(prepared) == first
        assert values(prepared) == second
        assert len(first) > 1

    @parameterized.expand(list(LOADERS))
    def test_attributes_are_the_loader_s_own(self, kind):
        loader = LOADERS[kind]()
        before = dict(vars(loader))
        prepared = prepare_data_loader(loader, already_sharded=True)
        for name in before:
            assert getattr(prepared, name) is before[name], name
        assert vars(loader) == before

    @parameterized.expand(list(LOADERS))
    def test_class_is_the_loader_s_own(self, kind):
        loader = LOADERS[kind]()
        prepared = prepare_data_loader(loader, already_sharded=True)
        assert isinstance(prepared, PreshardedDataLoader)
        assert isinstance(prepared, DataLoader)
        assert isinstance(prepared, Multiplying) == (kind == "subclass")

    @parameterized.expand(list(LOADERS))
    def test_len_is_the_loader_s_own(self, kind):
        prepared = prepare_data_loader(LOADERS[kind](), already_sharded=True)
        reference = LOADERS[kind]()
        try:
            length = len(reference)
        except TypeError as error:
            with pytest.raises(TypeError, match=re.escape(str(error))):
                len(prepared)
            assert "stream" in kind or kind == "no loader"
        else:
            assert len(prepared) == length

    def test_methods_and_missing_attributes(self):
        loader = Multiplying(range(4), batch_size=2, factor=10)
        prepared = PreshardedDataLoader(loader)
        assert prepared.scaled(4) == 40
        loader.factor = 100
        assert prepared.factor == 100
        with pytest.raises(AttributeError, match="no_such_attribute"):
            prepared.no_such_attribute
        assert not hasattr(prepared, "no_such_attribute")
        assert getattr(prepared, "no_such_attribute", 5) == 5

    def test_an_endless_stream_is_read_as_it_goes(self):
        read = []

        def endless():
            for number in itertools.count():
                read.append(number)
                yield number

        prepared = PreshardedDataLoader(DataLoader(Stream(endless()), batch_size=2))
        assert lists(itertools.islice(prepared, 5)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        # One batch ahead of the fifth, and no further.
        assert read == list(range(12))

    def test_persistent_workers_stay(self):
        loader = DataLoader(WorkerIds(), num_workers=2, persistent_workers=True)
        prepared = PreshardedDataLoader(loader)
        first, second = set(flat(lists(prepared))), set(flat(lists(prepared)))
        assert len(first) == 2
        assert os.getpid() not in first
        assert second == first

    def test_total_batch_size(self):
        loader = DataLoader(range(8), batch_size=3)
        assert PreshardedDataLoader(loader, num_processes=4, process_index=1).total_batch_size == 12
        loader = DataLoader(range(8), batch_sampler=BatchSampler(range(8), 2, False))
        assert PreshardedDataLoader(loader, num_processes=4, process_index=1).total_batch_size == 8


class Recorder:
    """What has a method `to`, as tokenizers' batches have."""

    def __init__(self, samples):
        self.samples, self.moves = samples, []

    def to(self, device, non_blocking=False):
        self.moves.append((str(device), non_blocking))
        return self


class TestDevice:
    @parameterized.expand([(1,), (3,)])
    def test_every_batch_is_sent_to_the_device(self, num_batches):
        def nested(samples):
            return {"tensor": torch.tensor(samples), "rest": [(torch.tensor(samples), "text")]}

        loader = DataLoader(range(2 * num_batches), batch_size=2, collate_fn=nested)
        prepared = PreshardedDataLoader(loader, device=torch.device("meta"))
        batches = list(prepared)
        assert len(batches) == num_batches
        for batch in batches:
            (tensor, text), *_ = batch["rest"]
            assert (batch["tensor"].device.type, tensor.device.type, text) == ("meta", "meta", "text")
        assert all(batch["tensor"].device.type == "cpu" for batch in PreshardedDataLoader(loader))

    @parameterized.expand(list(itertools.product((True, False), (True, False), ("function", "method", "prepare"))))
    def test_settings_reach_the_device(self, placement, non_blocking, through):
        loader = DataLoader(range(4), batch_size=2, collate_fn=Recorder)
        if through == "function":
            prepared = prepare_data_loader(
                loader, torch.device("cpu"), put_on_device=placement, non_blocking=non_blocking, already_sharded=True
            )
        else:
            config = accelerate_presharded.DataLoaderConfiguration(non_blocking=non_blocking)
            accelerator = accelerate_presharded.Accelerator(cpu=True, dataloader_config=config)
            if through == "method":
                prepared = accelerator.prepare_data_loader(loader, placement, already_sharded=True)
            else:
                prepared = accelerator.prepare(loader, device_placement=[placement], already_sharded=True)
        assert [batch.moves for batch in prepared] == [[("cpu", non_blocking)] if placement else []] * 2

    @parameterized.expand([(True,), (False,)])
    def test_the_accelerator_s_own_placement(self, placement):
        accelerator = accelerate_presharded.Accelerator(cpu=True, device_placement=placement)
        loader = DataLoader(range(4), batch_size=2, collate_fn=Recorder)
        prepared = accelerator.prepare(loader, already_sharded=True)
        assert [len(batch.moves) for batch in prepared] == [int(placement)] * 2

    # Their device has a number, which the devices of tensors have not.
    @parameterized.expand([("alone",), ("nested",)])
    def test_nothing_is_copied_on_ranks_without_gpu(self, kind):
        assert run(2, addresses, kind) == [(True, True)] * 2


def addresses(kind):
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    tensor = torch.arange(4)
    batches = [tensor if kind == "alone" else {"of": [tensor]}]
    loader = accelerator.prepare(
        DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch), already_sharded=True
    )
    [batch] = loader
    found = batch if kind == "alone" else batch["of"][0]
    return loader.device.index is not None, found.data_ptr() == tensor.data_ptr()


class TestEnd:
    @parameterized.expand(list(itertools.product((0, 1, 2, 5), ("batches", "stream", "workers", "no loader"))))
    def test_the_last_batch_is_known_as_such(self, num_batches, kind):
        if kind == "no loader":
            loader = NoLoader([torch.tensor([number]) for number in range(num_batches)])
        else:
            data = range(num_batches) if kind != "stream" else Stream(range(num_batches))
            loader = DataLoader(data, num_workers=2 if kind == "workers" else 0)
        prepared = PreshardedDataLoader(loader)
        state = GradientState()
        for _ in range(2):
            ends = [(prepared.end_of_dataloader, state.end_of_dataloader) for _ in prepared]
            assert ends == [(step == num_batches - 1,) * 2 for step in range(num_batches)]
            assert not state.in_dataloader

    def test_an_end_is_forgotten_when_the_next_pass_begins(self):
        prepared = PreshardedDataLoader(NoLoader(iter([torch.tensor([0])])))
        assert lists(prepared) == [[0]]
        assert prepared.end_of_dataloader
        assert lists(prepared) == []
        assert not prepared.end_of_dataloader

    def test_no_remainder_is_claimed(self):
        # Accelerate would cut what is gathered in the last step at the remainder of this rank's own samples.
        prepared = PreshardedDataLoader(DataLoader(range(5), batch_size=2), num_processes=2)
        assert [prepared.remainder for _ in prepared] == [-1] * 3


def pickled(prepared):
    return pickle.loads(pickle.dumps(prepared))


COPIES = {"pickle": pickled, "copy": copy.copy, "deepcopy": copy.deepcopy}


def order(epoch: int, index: int = 1) -> list[list[int]]:
    """A shard of 12 samples out of 36 in an epoch, in batches of 3, from a bare DataLoader."""
    sampler = DistributedSampler(range(36), 3, index, seed=4)
    sampler.set_epoch(epoch)
    return lists(DataLoader(range(36), batch_size=3, sampler=sampler))


def shuffled(index: int = 1, **settings) -> PreshardedDataLoader:
    loader = DataLoader(range(36), batch_size=3, sampler=DistributedSampler(range(36), 3, index, seed=4))
    return PreshardedDataLoader(loader, num_processes=3, process_index=index, **settings)


class TestCopying:
    @parameterized.expand(list(itertools.product(COPIES, ("batches", "subclass", "workers", "stream", "no loader"))))
    def test_a_copy_is_as_good(self, how, kind):
        prepared = PreshardedDataLoader(
            LOADERS[kind](), device=torch.device("cpu"), num_processes=3, process_index=1, non_blocking=True
        )
        copied = COPIES[how](prepared)
        assert type(copied) is PreshardedDataLoader
        assert isinstance(copied, DataLoader)
        assert isinstance(copied, Multiplying) == (kind == "subclass")
        assert (copied.base_dataloader is prepared.base_dataloader) == (how == "copy")
        assert copied.gradient_state._shared_state is GradientState._shared_state
        for name in ("device", "num_processes", "process_index", "_non_blocking", "skip_batches"):
            assert getattr(copied, name) == getattr(prepared, name)
        assert values(copied) == values(prepared) == values(LOADERS[kind]())

    @parameterized.expand(list(COPIES))
    def test_a_copy_continues_with_the_next_epoch(self, how):
        prepared = shuffled()
        assert [lists(prepared), lists(prepared)] == [order(0), order(1)]
        copied = COPIES[how](prepared)
        assert copied.iteration == 2
        assert lists(copied) == order(2)
        assert lists(copied) == order(3)

    @parameterized.expand([("pickle",), ("deepcopy",)])
    def test_a_copy_shares_no_epochs(self, how):
        prepared = shuffled()
        copied = COPIES[how](prepared)
        copied.set_epoch(5)
        assert [lists(copied), lists(prepared), lists(copied), lists(prepared)] == [
            order(5),
            order(0),
            order(6),
            order(1),
        ]

    @parameterized.expand(list(COPIES))
    def test_a_copy_in_the_middle_of_a_pass(self, how):
        prepared = shuffled()
        lists(prepared)
        batches = iter(prepared)
        seen = lists(itertools.islice(batches, 2))
        copied = COPIES[how](prepared)
        assert seen + lists(batches) == order(1)
        if how != "copy":  # which shares the epoch counter, and so goes on to the next
            assert lists(copied) == order(1)
            assert lists(copied) == order(2)
        assert lists(prepared) == order(2)

    @parameterized.expand([("pickle",), ("deepcopy",)])
    def test_a_copy_hears_the_user(self, how):
        prepared = shuffled()
        lists(prepared)
        copied = COPIES[how](prepared)
        copied.base_dataloader.sampler.set_epoch(7)
        assert [lists(copied), lists(copied)] == [order(7), order(8)]


class TestEpochs:
    def test_set_epoch_tells_everyone_at_once(self):
        dataset = ListeningList(range(36))
        sampler = Listening(range(36), 3, 1)
        prepared = PreshardedDataLoader(DataLoader(dataset, batch_size=3, sampler=sampler))
        prepared.set_epoch(3)
        assert (sampler.epoch, sampler.heard, dataset.heard, prepared.iteration) == (3, [3], [3], 3)
        lists(prepared)
        assert (sampler.heard, dataset.heard) == ([3], [3])

    def test_the_last_word_counts(self):
        prepared = shuffled()
        sampler = prepared.base_dataloader.sampler
        sampler.set_epoch(7)
        prepared.set_epoch(4)
        assert lists(prepared) == order(4)
        prepared.set_epoch(9)
        sampler.set_epoch(2)
        assert lists(prepared) == order(2)
        assert lists(prepared) == order(3)

    def test_a_pass_cut_short_is_no_epoch(self):
        # As in Accelerate, which counts an epoch at its end.
        prepared = shuffled()
        assert next(iter(prepared)).tolist() == order(0)[0]
        assert lists(prepared) == order(0)
        assert lists(prepared) == order(1)


# What is left in the gradient state


class Interrupted(Exception):
    pass


def full(note, a, b):
    for _ in range(2):
        for batch in a:
            note(batch)
        note("between")


def first_only(note, a, b):
    note(next(iter(a), None))
    note("between")
    for batch in a:
        note(batch)


def early_break(note, a, b):
    for stop in (0, 1, 99):
        for step, batch in enumerate(a):
            note(batch)
            if step == stop:
                break
        note("between")
    for batch in b:
        note(batch)


def break_at_the_end(note, a, b):
    for batch in a:
        note(batch)
        if a.end_of_dataloader:
            break
    note("between")
    for batch in a:
        note(batch)


def exception(note, a, b):
    try:
        for step, batch in enumerate(a):
            note(batch)
            if step == 1:
                raise Interrupted
    except Interrupted:
        note("between")
    for batch in b:
        note(batch)


def zipped(note, a, b):
    for batches in zip(a, b):
        note(batches)
    note("between")
    for batches in zip(b, a):
        note(batches)


def alternately(note, a, b):
    first, second = iter(a), iter(b)
    note(next(first, None))
    note(next(second, None))
    for batch in first:
        note(batch)
    for batch in second:
        note(batch)


def nested(note, a, b):
    for batch in a:
        note(batch)
        for inner in b:
            note(inner)
        note("between")


def nested_with_break(note, a, b):
    for batch in a:
        note(batch)
        for inner in b:
            note(inner)
            break
        note("between")


def nested_in_itself(note, a, b):
    for batch in a:
        note(batch)
        for inner in a:
            note(inner)
        note("between")


def two_passes_at_once(note, a, b):
    first, second = iter(a), iter(a)
    for batches in zip(first, second):
        note(batches)


def later_closed(note, a, b):
    batches = iter(a)
    note(next(batches, None))
    batches.close()
    note("between")
    for batch in a:
        note(batch)


SCRIPTS = (
    full,
    first_only,
    early_break,
    break_at_the_end,
    exception,
    zipped,
    alternately,
    nested,
    nested_with_break,
    nested_in_itself,
    two_passes_at_once,
    later_closed,
)
# A loader without batches yields a `None` in Accelerate 1.8, and then fails.
LENGTHS = [(0, 2), (1, 2), (2, 3), (5, 3)][compare_versions("accelerate", "<", "1.9") :]


def trace(script, loaders: list) -> list:
    """What the gradient state says at each step of a script."""
    state = GradientState()
    state.dataloader_references = [None]
    rows = []

    def note(what):
        values = what.tolist() if isinstance(what, torch.Tensor) else what
        if isinstance(what, tuple):
            values = lists(what)
        active = [number for number, loader in enumerate(loaders) if loader is state.active_dataloader]
        epochs = [loader.iteration for loader in loaders]
        ends = [loader.end_of_dataloader for loader in loaders]
        references = len(state.dataloader_references)
        rows.append((values, active, state.in_dataloader, state.end_of_dataloader, references, epochs, ends))

    script(note, *loaders)
    note("after")
    return rows


def traces_of_both() -> dict:
    ours = accelerate_presharded.Accelerator(cpu=True)
    plain = accelerate.Accelerator(cpu=True)
    size, rank = plain.num_processes, plain.process_index

    def presharded(length):
        return ours.prepare(DataLoader(range(size * length)[rank::size], batch_size=1), already_sharded=True)

    def ordinary(length):
        return plain.prepare(DataLoader(range(size * length), batch_size=1))

    return {
        (script.__name__, lengths): tuple(
            trace(script, [make(length) for length in lengths]) for make in (presharded, ordinary)
        )
        for script in SCRIPTS
        for lengths in LENGTHS
    }


@functools.cache
def traces_by_rank() -> list[dict]:
    return run(2, traces_of_both)


class TestGradientState:
    @parameterized.expand([(script.__name__,) for script in SCRIPTS])
    def test_as_accelerate_leaves_it(self, name):
        for rank, traces in enumerate(traces_by_rank()):
            for lengths in LENGTHS:
                ours, plain = traces[name, lengths]
                if name == "nested_in_itself":
                    # A loader's own flag is not compared: Accelerate's is left standing by the inner pass.
                    ours, plain = ([row[:-1] for row in rows] for rows in (ours, plain))
                assert ours == plain, (rank, lengths)

    def test_the_traces_tell_something(self):
        rows, _ = traces_by_rank()[0]["nested", (2, 3)]
        # The values, which loader is active, whether one is, whether it ends, how many references with the first None.
        assert [row[:5] for row in rows[:3]] == [
            ([0], [0], True, False, 2),
            ([0], [1], True, False, 3),
            ([2], [1], True, False, 3),
        ]
        assert rows[-1][:5] == ("after", [], False, False, 1)


def sync_traces(num_steps: int, sync_with_dataloader: bool, num_batches: int, stop_at: int | None) -> dict:
    plugin = GradientAccumulationPlugin(num_steps=num_steps, sync_with_dataloader=sync_with_dataloader)
    results = {}
    for name, kind in (("ours", accelerate_presharded.Accelerator), ("plain", accelerate.Accelerator)):
        accelerator = kind(cpu=True, gradient_accumulation_plugin=plugin)
        size, rank = accelerator.num_processes, accelerator.process_index
        items = range(size * num_batches)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if name == "ours":
            loader = DataLoader(items[rank::size], batch_size=1)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader, already_sharded=True)
        else:
            model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(items, batch_size=1))
        results[name] = []
        for _ in range(3):
            for step, _ in enumerate(loader):
                with accelerator.accumulate(model):
                    results[name].append((accelerator.sync_gradients, accelerator.step))
                if step == stop_at:
                    break
    return results


@parameterized.expand(
    [
        (2, True, 5, None),
        (2, False, 5, None),
        (3, True, 5, None),
        (2, True, 1, None),
        (4, True, 5, 2),
        (1, True, 3, None),
    ]
)
def test_gradient_accumulation_as_in_accelerate(num_steps, sync_with_dataloader, num_batches, stop_at):
    per_rank = run(2, sync_traces, num_steps, sync_with_dataloader, num_batches, stop_at)
    if sync_with_dataloader and stop_at is None:
        expected = [
            (step + 1) % num_steps == 0 or step + 1 == num_batches for _ in range(3) for step in range(num_batches)
        ]
        assert [synced for synced, _ in per_rank[0]["ours"]] == expected
    for results in per_rank:
        assert results["ours"] == results["plain"]


# Random numbers


class HiddenCut(BatchSampler):
    """Deals batches to the ranks as `DealtBatches`, and keeps what it knows of them to itself."""

    def __init__(self, sampler, batch_size, share):
        super().__init__(sampler, batch_size, drop_last=False)
        self.share = share

    def __iter__(self):
        size, rank = self.share
        return itertools.islice(super().__iter__(), rank, None, size)

    def __len__(self):
        size, rank = self.share
        return len(range(rank, super().__len__(), size))


def cut_by_sampler(kind: str, generator: bool, flag: bool | None) -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    size, rank = accelerator.num_processes, accelerator.process_index

    def make_loader():
        sampler = RandomSampler(range(24 * size), generator=seeded(rank) if generator else None)
        if kind == "dealt":
            return DataLoader(range(24 * size), batch_sampler=DealtBatches(sampler, 4, size, rank))
        return DataLoader(range(24 * size), batch_sampler=HiddenCut(sampler, 4, (size, rank)))

    bare = PreshardedDataLoader(make_loader())
    prepared = accelerator.prepare(make_loader(), already_sharded=flag)
    return {"epochs": [lists(prepared), lists(prepared)], "bare": lists(bare)}


@parameterized.expand(
    [
        (world_size, *rest)
        for world_size in (2, 3)
        for rest in (
            ("dealt", False, None),
            ("dealt", True, None),
            ("dealt", False, True),
            ("hidden", False, True),
            ("hidden", True, True),
        )
    ]
)
def test_ranks_draw_one_order_where_a_sampler_cuts_it(world_size, kind, generator, flag):
    per_rank = run(world_size, cut_by_sampler, kind, generator, flag)
    everything = list(range(24 * world_size))
    orders = []
    for epoch in range(2):
        batches = [result["epochs"][epoch] for result in per_rank]
        assert [len(of_rank) for of_rank in batches] == [6] * world_size
        assert sorted(flat(batches)) == everything
        orders.append(flat([list(step) for step in zip(*batches)]))
    assert orders[0] != orders[1]
    assert everything not in orders
    # Without a generator in step every rank cuts another order.
    assert sorted(flat([result["bare"] for result in per_rank])) != everything


def own_orders() -> dict:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    rank = accelerator.process_index
    data = list(range(100 * rank, 100 * rank + 24))
    result = {"rank": rank}
    for name, generator in (("without generator", None), ("with generator", seeded(40 + rank))):
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        state = None if generator is None else generator.get_state()
        torch.manual_seed(rank)
        bare = [lists(loader), lists(loader)]
        if generator is not None:
            generator.set_state(state)
        torch.manual_seed(rank)
        with collectives() as calls:
            prepared = accelerator.prepare(loader, already_sharded=True)
            calls.clear()
            passes = [lists(prepared), lists(prepared)]
        result[name] = {
            "passes": passes,
            "bare": bare,
            "collectives": list(calls),
            "unchanged": loader.sampler.generator is generator,
        }
    return result


@parameterized.expand([(2,), (3,)])
def test_generators_stay_their_own_where_each_rank_has_its_own_data(world_size):
    per_rank = run(world_size, own_orders)
    for name in ("without generator", "with generator"):
        positions = []
        for result in per_rank:
            assert result[name]["unchanged"]
            assert result[name]["passes"] == result[name]["bare"]
            assert result[name]["collectives"] == []
            positions.append(tuple(item % 100 for item in flat(result[name]["passes"])))
        assert len(set(positions)) == world_size


def random_numbers(rng_types: list[str] | None, through: str) -> dict:
    settings = {} if through == "function" else {"rng_types": rng_types}
    accelerator = accelerate_presharded.Accelerator(cpu=True, **settings)
    loader = DataLoader(list(range(4)), batch_size=2)
    if through == "function":
        prepared = prepare_data_loader(loader, rng_types=rng_types, already_sharded=True)
    else:
        prepared = accelerator.prepare(loader, already_sharded=True)
    numbers = []
    for _ in range(2):
        torch.rand(accelerator.process_index)  # another number of draws on each rank
        numbers.append([torch.rand(1).item() for _ in prepared])
    return {"numbers": numbers, "rng_types": rng_types}


@parameterized.expand(
    [
        (through, rng_types, in_step)
        for through in ("function", "accelerator")
        for rng_types, in_step in (
            (["torch"], True),
            (["torch", "generator"], True),
            (["generator"], False),
            ([], False),
        )
    ]
)
def test_rng_types(through, rng_types, in_step):
    per_rank = run(2, random_numbers, rng_types, through)
    for epoch in range(2):
        first, second = (result["numbers"][epoch] for result in per_rank)
        assert (first == second) == in_step
    # It is the caller's list.
    assert [result["rng_types"] for result in per_rank] == [rng_types, rng_types]


def silent_pass() -> list[str]:
    accelerator = accelerate_presharded.Accelerator(cpu=True)
    sampler = DistributedSampler(range(16), accelerator.num_processes, accelerator.process_index)
    prepared = accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=sampler))
    with collectives() as calls:
        lists(prepared)
        lists(prepared)
    return calls


def test_a_distributed_sampler_needs_no_communication():
    assert run(2, silent_pass) == [[], []]


# Skipping


SKIPPED = {
    "map-style": lambda data: DataLoader(data, batch_size=2),
    "shuffled": lambda data: DataLoader(data, batch_size=2, shuffle=True, generator=seeded(3)),
    "batch sampler": lambda data: DataLoader(data, batch_sampler=[[8, 1, 2], [0], [5, 4], [3], [6, 7]]),
    "no batches": lambda data: DataLoader(data, batch_size=None, sampler=[8, 1, 5, 3, 2]),
    "workers": lambda data: DataLoader(data, batch_size=2, num_workers=2),
    "persistent workers": lambda data: DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True),
    "subclass": lambda data: Multiplying(data, batch_size=2),
    "stream": lambda data: DataLoader(Stream(range(9)), batch_size=2),
    "stream, workers": lambda data: DataLoader(SharedAmongWorkers(range(9)), batch_size=2, num_workers=2),
    "no loader": lambda data: NoLoader([torch.tensor([number]) for number in range(5)]),
}
UNREAD = ("map-style", "shuffled", "batch sampler", "no batches", "workers", "persistent workers")


def workers_left(num_batches: int | None) -> list[int]:
    """How many worker processes there are at some moments, without help of the garbage collector."""
    gc.disable()
    numbers = []
    for persistent in (False, True):
        for leave_early in (False, True):
            loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=persistent)
            wrapped = loader if num_batches is None else PreshardedDataLoader(loader)
            for batches in (loader if num_batches is None else skip_first_batches(wrapped, num_batches), wrapped):
                for _ in batches:
                    if leave_early:
                        break
                numbers.append(len(multiprocessing.active_children()))
            del loader, wrapped, batches
            numbers.append(len(multiprocessing.active_children()))
    return numbers


class TestSkipping:
    @parameterized.expand(list(itertools.product(SKIPPED, ("function", "method"))))
    def test_skips_in_the_first_pass_only(self, kind, through):
        accelerator = accelerate_presharded.Accelerator(cpu=True)
        data = Noting(9)
        skip = skip_first_batches if through == "function" else accelerator.skip_first_batches
        for num_batches in (0, 1, 3, 4) if "workers" not in kind else (3,):
            bare = SKIPPED[kind](Noting(9))
            passes = [values(bare) for _ in range(4)]
            loader = SKIPPED[kind](data)
            before = {name: value for name, value in vars(loader).items() if name != "_iterator"}
            prepared = accelerator.prepare(loader, already_sharded=True)
            skipped = skip(prepared, num_batches)
            assert isinstance(skipped, PreshardedDataLoader)
            assert isinstance(skipped, DataLoader)
            assert skipped.base_dataloader is loader
            data.take_loads()
            assert values(skipped) == passes[0][num_batches:]
            loads = data.take_loads()
            if kind in UNREAD:
                wanted = flat(passes[0][num_batches:])
                assert loads == [wanted.count(sample) for sample in range(9)]
            assert values(skipped) == passes[1]
            # The loader that it comes from has skipped nothing, and has not been changed.
            assert values(prepared) == passes[2]
            assert values(skipped) == passes[3]
            assert {name: value for name, value in vars(loader).items() if name != "_iterator"} == before

    def test_as_many_as_there_are_and_more(self):
        for kind in ("map-style", "stream", "no loader"):
            for num_batches in (5, 6, 100):
                prepared = PreshardedDataLoader(SKIPPED[kind](range(9)))
                skipped = skip_first_batches(prepared, num_batches)
                assert lists(skipped) == []
                assert not GradientState().in_dataloader
                assert lists(skipped) == lists(SKIPPED[kind](range(9)))

    def test_the_end_is_known_and_the_device_kept(self):
        loader = DataLoader(range(8), batch_size=2)
        prepared = PreshardedDataLoader(loader, device=torch.device("meta"), num_processes=2, process_index=1)
        skipped = skip_first_batches(prepared, 1)
        assert [(batch.device.type, skipped.end_of_dataloader) for batch in skipped] == [
            ("meta", False),
            ("meta", False),
            ("meta", True),
        ]
        assert (skipped.num_processes, skipped.process_index, skipped.total_batch_size) == (2, 1, 4)

    def test_skipping_adds_up(self):
        prepared = PreshardedDataLoader(DataLoader(range(10), batch_size=2))
        once = skip_first_batches(prepared, 1)
        twice = skip_first_batches(once, 2)
        # In another order than they were made: each keeps its own number of batches to skip.
        assert lists(prepared) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert lists(twice) == [[6, 7], [8, 9]]
        assert lists(once) == [[2, 3], [4, 5], [6, 7], [8, 9]]

    def test_a_pass_cut_short_is_begun_from_the_start(self):
        skipped = skip_first_batches(PreshardedDataLoader(DataLoader(range(6), batch_size=2)), 1)
        assert next(iter(skipped)).tolist() == [2, 3]
        assert lists(skipped) == [[0, 1], [2, 3], [4, 5]]

    def test_negative_numbers(self):
        with pytest.raises(ValueError, match="-1"):
            skip_first_batches(PreshardedDataLoader(DataLoader(range(6))), -1)

    @parameterized.expand([("function",), ("method",)])
    def test_epochs_are_counted_together(self, through):
        accelerator = accelerate_presharded.Accelerator(cpu=True)
        prepared = shuffled()
        skip = skip_first_batches if through == "function" else accelerator.skip_first_batches
        assert lists(skip(prepared, 2)) == order(0)[2:]
        assert prepared.iteration == 1
        assert lists(prepared) == order(1)
        skipped = skip(prepared, 1)
        assert skipped.iteration == 2
        prepared.set_epoch(6)
        assert lists(skipped) == order(6)[1:]
        assert lists(skipped) == order(7)
        assert lists(prepared) == order(8)
        # Nothing left of an epoch is an epoch all the same.
        assert lists(skip(prepared, 4)) == []
        assert lists(prepared) == order(10)

    def test_persistent_workers_are_there_again_afterwards(self):
        loader = DataLoader(WorkerIds(), num_workers=2, persistent_workers=True)
        prepared = PreshardedDataLoader(loader)
        lists(prepared)
        batches = lists(skip_first_batches(prepared, 1))
        assert len(batches) == 3  # also of workers that were there before
        during = set(flat(batches))
        after = [set(flat(lists(prepared))), set(flat(lists(prepared)))]
        assert os.getpid() not in during
        assert len(after[0]) == 2
        assert after[0] == after[1]

    @parameterized.expand([(0,), (1,)])
    def test_workers_end_when_they_would_by_themselves(self, num_batches):
        assert run(1, workers_left, num_batches) == run(1, workers_left, None)

    @parameterized.expand([("function",), ("method",)])
    def test_ordinary_loaders_are_skipped_by_accelerate(self, through):
        ours = accelerate_presharded.Accelerator(cpu=True)
        plain = accelerate.Accelerator(cpu=True)
        for data in (range(9), Stream(range(9))):
            expected = accelerate.skip_first_batches(plain.prepare(DataLoader(data, batch_size=2)), 2)
            prepared = ours.prepare(DataLoader(data, batch_size=2))
            skip = skip_first_batches if through == "function" else ours.skip_first_batches
            skipped = skip(prepared, 2)
            assert type(skipped) is type(expected)
            assert lists(skipped) == lists(expected) == [[4, 5], [6, 7], [8]]
        bare = skip_first_batches(DataLoader(range(9), batch_size=2), 3)
        assert lists(bare) == [[6, 7], [8]]


# The loader's own state


class Counting(DataLoader):
    """Stands in for torchdata's `StatefulDataLoader`: its state is how many batches it has read in this pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.read = 0

    def __iter__(self):
        batches = super().__iter__()
        for _ in range(self.read):
            next(batches)
        for batch in batches:
            self.read += 1
            yield batch
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class TestState:
    @parameterized.expand([(1,), (2,), (3,)])
    def test_it_belongs_to_the_batch_that_was_yielded(self, num_batches):
        prepared = prepare_data_loader(Counting(range(8), batch_size=2), already_sharded=True)
        seen = lists(itertools.islice(prepared, num_batches))
        state = prepared.state_dict()
        later = prepare_data_loader(Counting(range(8), batch_size=2), already_sharded=True)
        later.load_state_dict(state)
        # Not one more, although the loader has been read further to know the end.
        assert later.base_dataloader.read == num_batches
        assert seen + lists(later) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert lists(later) == [[0, 1], [2, 3], [4, 5], [6, 7]]
