# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`gather_for_metrics` over already sharded loaders: every real sample once, whatever it is gathered as."""

import functools
import itertools
from collections import OrderedDict, namedtuple
from urllib.parse import DefragResult

import accelerate
import torch
import torch.distributed as dist
from parameterized import parameterized
from ranks import Failure, run
from shared import RankBatches, Stream, lists, needs_parallelism_config, raised, stand_in_gpus
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from accelerate_presharded import Accelerator, Sharding, register_sharding


WORLD_SIZES = [(2,), (3,), (4,)]


def items_of(rank: int, number: int) -> list[int]:
    """Items that no other rank has."""
    return list(range(1000 * rank, 1000 * rank + number))


def own_batches(lengths: list[int], size: int = 2) -> list[list[list[int]]]:
    return [
        [items_of(rank, length)[start : start + size] for start in range(0, length, size)]
        for rank, length in enumerate(lengths)
    ]


def real_steps(lengths: list[int], size: int = 2) -> list[list[int]]:
    """The real samples of each step, in the order of the ranks."""
    own = own_batches(lengths, size)
    return [sum((batches[step] for batches in own if step < len(batches)), []) for step in range(max(map(len, own)))]


def own_loader(accelerator, lengths: list[int], kind: str = "map-style", size: int = 2):
    items = items_of(accelerator.process_index, lengths[accelerator.process_index])
    dataset = Stream(items) if kind == "stream" else items
    return accelerator.prepare(DataLoader(dataset, batch_size=size), already_sharded=True)


def everything(lengths: list[int], kind: str, epochs: int) -> list:
    accelerator = Accelerator(cpu=True)
    loader = own_loader(accelerator, lengths, kind)
    return [[accelerator.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(epochs)]


# 11 and 15


@parameterized.expand(itertools.product((2, 3, 4), ("map-style", "stream")))
def test_case_11_an_odd_number_on_each_rank(world_size, kind):
    expected = real_steps([9] * world_size)
    assert len(sum(expected, [])) == 9 * world_size
    assert run(world_size, everything, [9] * world_size, kind, 2) == [[expected] * 2] * world_size


@parameterized.expand(
    itertools.product(([6, 5], [5, 6], [9, 2], [1, 8], [5, 3, 4], [2, 7, 1], [1, 1, 1, 9]), ("map-style", "stream"))
)
def test_case_15_last_batches_of_different_length(lengths, kind):
    assert run(len(lengths), everything, lengths, kind, 2) == [[real_steps(lengths)] * 2] * len(lengths)


# 12, 13 and 14


def distributed(length: int, batch_size: int | None, drop_last: bool, **settings) -> tuple:
    """Steps of shuffled data, cut by torch's sampler, as batches and as the samples gathered from all ranks."""
    accelerator = Accelerator(cpu=True)
    sampler = DistributedSampler(
        range(length), accelerator.num_processes, accelerator.process_index, **{"shuffle": True, **settings}
    )
    if batch_size is None:
        loader = DataLoader(range(length), batch_size=None, sampler=sampler)
    elif drop_last:
        loader = DataLoader(range(length), batch_size=batch_size, sampler=sampler, drop_last=True)
    else:
        loader = DataLoader(range(length), batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
    loader = accelerator.prepare(loader)
    epochs = []
    for _ in range(2):
        steps = [(batch, accelerator.gather_for_metrics(batch)) for batch in loader]
        epochs.append([tuple(x.tolist() if isinstance(x, torch.Tensor) else x for x in step) for step in steps])
    return epochs, loader.total_dataset_length, len(loader)


def assert_distinct(world_size: int, length: int, batch_size: int | None, expected: int | None = None, **settings):
    """All ranks gather the same, and of the samples that were yielded each once."""
    drop_last = settings.pop("drop_last", False)
    per_rank = run(world_size, distributed, length, batch_size, drop_last, **settings)
    for epoch in range(2):
        steps = [epochs[epoch] for epochs, _, _ in per_rank]
        gathered = [[of_step for _, of_step in of_rank] for of_rank in steps]
        assert gathered == [gathered[0]] * world_size
        flat = sum(gathered[0], [])
        yielded = [batch if isinstance(batch, list) else [batch] for of_rank in steps for batch, _ in of_rank]
        assert sorted(flat) == sorted(set(sum(yielded, [])))
        if expected is not None:
            assert len(flat) == expected
        for number, of_step in enumerate(gathered[0]):
            # In the order of the ranks: what was yielded, with gaps where there was padding.
            in_order = sum((yielded[number + rank * len(steps[0])] for rank in range(world_size)), [])
            rest = iter(in_order)
            assert all(item in rest for item in of_step)
    return per_rank


def test_case_12_padding_of_a_shuffled_sampler():
    assert_distinct(4, 13, 4, expected=13)


def test_case_13_padding_of_a_shuffled_sampler():
    assert_distinct(3, 10, 4, expected=10)


def test_case_14_drop_last_of_the_loader():
    # Each rank has 3 samples, one batch; the last of ranks 2 and 3 are repeats.
    per_rank = assert_distinct(4, 10, 3, drop_last=True, expected=10)
    assert [steps for _, _, steps in per_rank] == [1] * 4
    # 13 samples for 4 ranks are 4 for each; a batch of 3 leaves one behind, where the padding is.
    assert_distinct(4, 13, 3, drop_last=True, expected=12)


@parameterized.expand(
    [
        (2, 7, 2),
        (2, 8, 3),
        (3, 7, 2),
        (3, 11, 5),
        (4, 5, 2),
        # Fewer samples than ranks.
        (4, 2, 2),
        (3, 1, 1),
        # One sample a step.
        (2, 5, None),
        (3, 10, None),
    ]
)
def test_padding_is_left_out(world_size, length, batch_size):
    for shuffle in (True, False):
        per_rank = assert_distinct(world_size, length, batch_size, expected=length, shuffle=shuffle)
        assert [total for _, total, _ in per_rank] == [length] * world_size


def test_a_sampler_that_drops_its_tail_has_no_padding():
    def dropping():
        accelerator = Accelerator(cpu=True)
        rank, world_size = accelerator.process_index, accelerator.num_processes
        sampler = DistributedSampler(range(11), world_size, rank, shuffle=False, drop_last=True)
        loader = accelerator.prepare(DataLoader(range(11), batch_size=2, sampler=sampler))
        return [accelerator.gather_for_metrics(batch).tolist() for batch in loader], loader.total_dataset_length

    assert run(4, dropping) == [([[0, 4, 1, 5, 2, 6, 3, 7]], 8)] * 4


# registered


class Padded(Sampler):
    """Its own indices, the last few of which repeat others."""

    def __init__(self, indices, padding):
        self.indices, self.padding = indices, padding

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class PaddedBatches(Sampler):
    """A batch sampler that is none of torch's, with its padding in the last batches."""

    def __init__(self, batches, padding):
        self.batches, self.padding = batches, padding

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class PaddedList(list):
    padding = 0


class PaddedStream(Stream):
    padding = 0

    def __len__(self):
        return len(self.items)


def registered(kind: str) -> list:
    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    for cls in (Padded, PaddedBatches, PaddedList, PaddedStream):
        register_sharding(cls, lambda obj: Sharding(world_size, rank, "its own word", num_padding=obj.padding))
    # 7 samples: 0 to 3 and 4 to 6 and 4 again; on 3 ranks 0 to 2, 3, 4 and 3 again, 5, 6 and 5 again.
    own = {2: [[0, 1, 2, 3], [4, 5, 6, 4]], 3: [[0, 1, 2], [3, 4, 3], [5, 6, 5]]}[world_size][rank]
    padding = {2: [0, 1], 3: [0, 1, 1]}[world_size][rank]
    if kind == "sampler":
        loader = DataLoader(range(7), batch_size=2, sampler=Padded(own, padding))
    elif kind == "batched sampler":
        loader = DataLoader(range(7), batch_sampler=BatchSampler(Padded(own, padding), 2, drop_last=False))
    elif kind == "batch sampler":
        batches = [own[start : start + 2] for start in range(0, len(own), 2)]
        loader = DataLoader(range(7), batch_sampler=PaddedBatches(batches, padding))
    else:
        dataset = PaddedList(own) if kind == "dataset" else PaddedStream(own)
        dataset.padding = padding
        loader = DataLoader(dataset, batch_size=2)
    loader = accelerator.prepare(loader)
    return [[accelerator.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(2)]


@parameterized.expand(itertools.product((2, 3), ("sampler", "batched sampler", "batch sampler", "dataset", "stream")))
def test_padding_that_was_stated(world_size, kind):
    steps = {2: [[0, 1, 4, 5], [2, 3, 6]], 3: [[0, 1, 3, 4, 5, 6], [2]]}[world_size]
    assert run(world_size, registered, kind) == [[steps] * 2] * world_size


# every type


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)

SHAPES = {
    "1-d": lambda batch: batch,
    "2-d": lambda batch: torch.stack([batch, -batch], dim=1),
    "3-d": lambda batch: batch[:, None, None] * torch.arange(6).view(2, 3),
    "4-d": lambda batch: batch[:, None, None, None] * torch.arange(24).view(2, 3, 4),
    "one column": lambda batch: batch[:, None],
    "not contiguous": lambda batch: torch.stack([batch, -batch]).T,
    "reversed": lambda batch: batch[:, None].expand(-1, 3).flip(1)[:, ::2],
    "expanded": lambda batch: batch[:, None].expand(-1, 3),
    "no columns": lambda batch: batch.new_empty((len(batch), 0)),
}


def described(tensor: torch.Tensor) -> tuple:
    return str(tensor.dtype), tuple(tensor.shape), tensor.tolist()


def dtypes_and_shapes(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    results = []
    for batch in own_loader(accelerator, lengths):
        step = {dtype: accelerator.gather_for_metrics((batch % 251).to(dtype)) for dtype in DTYPES}
        step.update((name, accelerator.gather_for_metrics(make(batch))) for name, make in SHAPES.items())
        with_graph = torch.nn.Parameter(torch.ones(1)) * batch
        step["with a graph"] = accelerator.gather_for_metrics(with_graph)
        results.append({str(name): described(tensor) for name, tensor in step.items()})
    return results


SHORT = ([4, 4], [5, 3], [1, 6], [2, 5, 4], [3, 3, 3, 1])


@functools.cache
def dtypes_and_shapes_of(number: int) -> list:
    return run(len(SHORT[number]), dtypes_and_shapes, SHORT[number])


@parameterized.expand(range(len(SHORT)))
def test_dtypes(number):
    real = [torch.tensor(step) for step in real_steps(SHORT[number])]
    for results in dtypes_and_shapes_of(number):
        for dtype in DTYPES:
            assert [step[str(dtype)] for step in results] == [described((items % 251).to(dtype)) for items in real]


@parameterized.expand(itertools.product(range(len(SHORT)), SHAPES))
def test_shapes(number, name):
    real = [torch.tensor(step) for step in real_steps(SHORT[number])]
    for results in dtypes_and_shapes_of(number):
        assert [step[name] for step in results] == [described(SHAPES[name](items)) for items in real]


@parameterized.expand(range(len(SHORT)))
def test_tensors_with_a_graph(number):
    real = [torch.tensor(step) for step in real_steps(SHORT[number])]
    for results in dtypes_and_shapes_of(number):
        assert [step["with a graph"] for step in results] == [described(items.float()) for items in real]


def whole_leaves(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    results = []
    for batch in own_loader(accelerator, lengths):
        step = {
            "0-d": batch.float().mean(),
            "other length": torch.arange(5) + 100 * rank,
            "other length of a list": [f"{rank}.{i}" for i in range(5)],
            "length of its own": torch.full((3 + rank, 2), rank),
            "nothing": torch.zeros(0, 3),
            "nothing on one": torch.full((3 if rank else 0, 2), rank),
        }
        gathered = {name: accelerator.gather_for_metrics(value) for name, value in step.items()}
        # In the middle of other leaves it is the same.
        together = accelerator.gather_for_metrics({"batch": batch, **step})
        for found in (gathered, together):
            results.append(
                {name: described(value) if isinstance(value, torch.Tensor) else value for name, value in found.items()}
            )
    return results


@parameterized.expand([([4, 4],), ([5, 3],), ([2, 5, 4],)])
def test_leaves_that_have_no_entry_for_each_sample_are_gathered_whole(lengths):
    world_size = len(lengths)
    own = own_batches(lengths)
    for results in run(world_size, whole_leaves, lengths):
        assert len(results) == 2 * len(real_steps(lengths))
        for number, step in enumerate(results):
            # Also from ranks that repeat a batch, as losses are averaged over all ranks.
            batches = [torch.tensor(of_rank[number // 2 % len(of_rank)]) for of_rank in own]
            means = torch.stack([batch.float().mean() for batch in batches])
            assert step["0-d"] == described(means)
            assert step["other length"] == described(torch.cat([torch.arange(5) + 100 * r for r in range(world_size)]))
            assert step["other length of a list"] == [f"{r}.{i}" for r in range(world_size) for i in range(5)]
            blocks = [torch.full((3 + r, 2), r) for r in range(world_size)]
            assert step["length of its own"] == described(torch.cat(blocks))
            assert step["nothing"] == described(torch.zeros(0, 3))
            blocks = [torch.full((3, 2), r) for r in range(1, world_size)]
            assert step["nothing on one"] == described(torch.cat(blocks))


def repeated_losses(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    return [
        [accelerator.gather_for_metrics((batch[0] + 0.5).repeat(repeats)).tolist() for repeats in (3, 4)]
        for batch in own_loader(accelerator, lengths, size=3)
    ]


@parameterized.expand([([4, 4],), ([5, 3],), ([2, 7, 4],), ([6, 1],)])
def test_losses_repeated_as_for_a_full_batch_have_one_entry_for_each_sample(lengths):
    own = own_batches(lengths, size=3)
    expected = []
    for step in range(max(map(len, own))):
        exact = [batches[step][0] + 0.5 for batches in own if step < len(batches) for _ in batches[step]]
        # Of any other length it is something else, also from a rank that repeats a batch.
        whole = [batches[step % len(batches)][0] + 0.5 for batches in own for _ in range(4)]
        expected.append([exact, whole])
    for found in run(len(lengths), repeated_losses, lengths):
        assert found == expected


def as_upstream_gives(lengths: list[int]) -> list:
    ours, plain = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    loss = torch.tensor(1.5 + ours.process_index)
    outside = plain.gather_for_metrics(loss)
    return [(described(ours.gather_for_metrics(loss)), described(outside)) for _ in own_loader(ours, lengths)]


def test_0_d_is_what_upstream_gives():
    for results in run(3, as_upstream_gives, [2, 2, 3]):
        for inside, outside in results:
            assert inside == outside == ("torch.float32", (3,), [1.5, 2.5, 3.5])


# every structure


Pair = namedtuple("Pair", "logits labels")


def answer(text: str) -> Sharding:
    """A dataclass. What travels as an object has to be of a class that all ranks can import."""
    return Sharding(None, None, text)


# How a batch is gathered, and what that should give for the real samples of all ranks.
STRUCTURES = {
    "strings": (lambda b: [f"s{i}" for i in b], lambda r: [f"s{i}" for i in r]),
    "tuple of strings": (lambda b: tuple(f"s{i}" for i in b), lambda r: [f"s{i}" for i in r]),
    "objects": (lambda b: [answer(f"s{i}") for i in b], lambda r: [answer(f"s{i}") for i in r]),
    "dicts": (lambda b: [{"id": i, "text": f"s{i}"} for i in b], lambda r: [{"id": i, "text": f"s{i}"} for i in r]),
    "nones": (lambda b: [None for _ in b], lambda r: [None for _ in r]),
    "dict of strings": (
        lambda b: {"a": [f"a{i}" for i in b], "b": {"c": [i for i in b]}},
        lambda r: {"a": [f"a{i}" for i in r], "b": {"c": list(r)}},
    ),
    "named tuple of strings": (
        lambda b: DefragResult([f"a{i}" for i in b], [f"b{i}" for i in b]),
        lambda r: DefragResult([f"a{i}" for i in r], [f"b{i}" for i in r]),
    ),
    "tuple": (lambda b: (torch.tensor(b), torch.tensor(b) * 0.5), lambda r: (torch.tensor(r), torch.tensor(r) * 0.5)),
    "list": (lambda b: [torch.tensor(b), -torch.tensor(b)], lambda r: [torch.tensor(r), -torch.tensor(r)]),
    "dict": (lambda b: {"x": torch.tensor(b), "y": -torch.tensor(b)}, lambda r: {"x": torch.tensor(r), "y": -torch.tensor(r)}),
    "ordered dict": (lambda b: OrderedDict(x=torch.tensor(b)), lambda r: OrderedDict(x=torch.tensor(r))),
    "named tuple": (
        lambda b: Pair(torch.tensor(b)[:, None] * 0.1, torch.tensor(b)),
        lambda r: Pair(torch.tensor(r)[:, None] * 0.1, torch.tensor(r)),
    ),
    "nested": (
        lambda b: {"a": [torch.tensor(b), (Pair(torch.tensor(b), [torch.tensor(b)]), {})], "b": []},
        lambda r: {"a": [torch.tensor(r), (Pair(torch.tensor(r), [torch.tensor(r)]), {})], "b": []},
    ),
    "mixed": (
        lambda b: {"x": torch.tensor(b), "text": [f"s{i}" for i in b], "more": (torch.tensor(b), [answer(f"{i}") for i in b])},
        lambda r: {"x": torch.tensor(r), "text": [f"s{i}" for i in r], "more": (torch.tensor(r), [answer(f"{i}") for i in r])},
    ),
    "empty tuple": (lambda b: {"x": torch.tensor(b), "y": ()}, lambda r: {"x": torch.tensor(r), "y": ()}),
    "many": (
        lambda b: [torch.tensor(b).view(-1, 1, 1, 1).expand(-1, 1, n, 2) for n in range(1, 9)],
        lambda r: [torch.tensor(r).view(-1, 1, 1, 1).expand(-1, 1, n, 2) for n in range(1, 9)],
    ),
}  # fmt: skip


def plain(data):
    """Without tensors, and with the types that the parts have."""
    if isinstance(data, torch.Tensor):
        return described(data)
    if isinstance(data, dict):
        return type(data).__name__, {key: plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data).__name__, [plain(value) for value in data]
    return repr(data)


def structures(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    return [
        {name: plain(accelerator.gather_for_metrics(make(batch.tolist()))) for name, (make, _) in STRUCTURES.items()}
        for batch in own_loader(accelerator, lengths)
    ]


LENGTHS = ([9, 9], [9, 9, 9], [9] * 4, [5, 3], [4, 4], [1, 6], [2, 5, 4], [3, 3, 8, 1])


@functools.cache
def structures_of(number: int) -> list:
    return run(len(LENGTHS[number]), structures, LENGTHS[number])


# 31


@parameterized.expand(itertools.product(range(len(LENGTHS)), STRUCTURES))
def test_case_31_every_structure(number, name):
    lengths = LENGTHS[number]
    expected = [plain(STRUCTURES[name][1](real)) for real in real_steps(lengths)]
    for results in structures_of(number):
        assert [step[name] for step in results] == expected


def single_objects(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    results = []
    for step, batch in enumerate(own_loader(accelerator, lengths)):
        results.append(
            [
                accelerator.gather_for_metrics(f"rank {rank}"),
                accelerator.gather_for_metrics(step + rank),
                accelerator.gather_for_metrics(answer(str(rank))),
                plain(accelerator.gather_for_metrics({"x": batch, "note": {"rank": rank}, "none": None})),
            ]
        )
    return results


@parameterized.expand([([4, 4],), ([5, 2],), ([2, 5, 4],)])
def test_single_objects_come_in_a_list(lengths):
    ranks = range(len(lengths))
    for results in run(len(lengths), single_objects, lengths):
        for step, (result, real) in enumerate(zip(results, real_steps(lengths))):
            assert result == [
                [f"rank {rank}" for rank in ranks],
                [step + rank for rank in ranks],
                [answer(str(rank)) for rank in ranks],
                plain({"x": torch.tensor(real), "note": {"rank": list(ranks)}, "none": [None] * len(ranks)}),
            ]


def ragged(lengths: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    results = []
    for batch in own_loader(accelerator, lengths):
        wide = batch[:, None] * torch.ones(1, rank + 1, dtype=torch.int64)
        alone = accelerator.gather_for_metrics(wide, use_gather_object=True)
        inside = accelerator.gather_for_metrics({"x": wide, "y": [f"s{i}" for i in batch]}, use_gather_object=True)
        results.append(([row.tolist() for row in alone], [row.tolist() for row in inside["x"]], inside["y"]))
    return results


@parameterized.expand([([4, 4],), ([5, 2],), ([2, 5, 4],), ([3, 1, 1, 6],)])
def test_ragged_tensors_as_objects(lengths):
    own = own_batches(lengths)
    for results in run(len(lengths), ragged, lengths):
        assert len(results) == len(real_steps(lengths))
        for step, (alone, inside, texts) in enumerate(results):
            real = [(rank, item) for rank, of_rank in enumerate(own) if step < len(of_rank) for item in of_rank[step]]
            assert alone == inside == [[item] * (rank + 1) for rank, item in real]
            assert len(texts) == len(real)


# 30


def predict(lengths: list[int], kind: str) -> dict:
    """The evaluation loop of a trainer: losses, logits and labels, put together at the end."""
    accelerator = Accelerator(cpu=True)
    loader = own_loader(accelerator, lengths, kind)
    losses, logits, labels = [], [], []
    for batch in loader:
        output = {"loss": batch.float().mean(), "logits": torch.stack([batch, -batch], 1).float(), "labels": batch}
        losses.append(accelerator.gather_for_metrics(output["loss"].repeat(len(batch))))
        gathered = accelerator.gather_for_metrics((output["logits"], output["labels"]))
        logits.append(gathered[0])
        labels.append(gathered[1])
    return {name: torch.cat(parts).tolist() for name, parts in (("loss", losses), ("x", logits), ("y", labels))}


@parameterized.expand(itertools.product(([9, 9], [9, 9, 9], [9, 4]), ("map-style", "stream")))
def test_case_30_predictions(lengths, kind):
    real = sum(real_steps(lengths), [])
    assert len(real) == sum(lengths)
    own = own_batches(lengths)
    mean_of = {item: sum(batch) / len(batch) for of_rank in own for batch in of_rank for item in batch}
    for result in run(len(lengths), predict, lengths, kind):
        assert result == {
            "loss": [mean_of[item] for item in real],
            "x": [[item, -item] for item in real],
            "y": real,
        }


# errors


def trailing_dimensions(columns: list[int]) -> list:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    results = []
    # The second step is a replay on rank 0, the third on all but the last.
    for batch in own_loader(accelerator, [2 * (rank + 1) for rank in range(accelerator.num_processes)]):
        wide = batch[:, None].expand(-1, columns[rank])
        results.append(
            (
                raised(accelerator.gather_for_metrics, wide),
                raised(accelerator.gather_for_metrics, {"a": batch, "b": wide}),
                # What was advised.
                accelerator.gather_for_metrics(accelerator.pad_across_processes(wide, dim=1)).shape[1],
                accelerator.gather_for_metrics(batch).tolist(),
            )
        )
    return results


@parameterized.expand([([3, 4],), ([2, 2, 5],), ([7, 1, 1, 1],)])
def test_trailing_dimensions_that_differ(columns):
    world_size = len(columns)
    per_rank = run(world_size, trailing_dimensions, columns)
    assert per_rank == [per_rank[0]] * world_size  # the same message on every rank
    other = next(rank for rank in range(world_size) if columns[rank] != columns[0])
    steps = real_steps([2 * (rank + 1) for rank in range(world_size)])
    assert len(per_rank[0]) == len(steps)
    for (*errors, padded, gathered), real in zip(per_rank[0], steps):
        for kind, text in errors:
            assert kind == "ValueError"
            assert f"Rank {other}" in text
            assert f"(2, {columns[0]})" in text and f"(2, {columns[other]})" in text
            assert "pad_across_processes" in text and "use_gather_object=True" in text
        assert padded == max(columns)
        assert gathered == real


# What rank 0 gathers, and what the last rank does.
MISMATCHES = {
    "dtype": lambda batch: (batch, batch.float()),
    "dimensions": lambda batch: (batch, batch[:, None]),
    "tensor and dict": lambda batch: (batch, {"x": batch}),
    "keys": lambda batch: ({"x": batch}, {"y": batch}),
    "more keys": lambda batch: ({"x": batch}, {"x": batch, "y": batch}),
    "longer": lambda batch: ([batch], [batch, batch]),
    "deeper": lambda batch: ([batch, [batch]], [[batch], batch]),
    "tensor and list": lambda batch: (batch, batch.tolist()),
    "list and tensor": lambda batch: (batch.tolist(), batch),
    "tensor and string": lambda batch: (batch, "none"),
    "tensor and none": lambda batch: (batch, None),
    "mixed": lambda batch: ({"x": batch, "y": ["a"]}, {"x": ["a"], "y": batch}),
    "missing tensor": lambda batch: ({"x": batch, "y": batch}, {"x": batch, "y": None}),
    "only objects": lambda batch: ({"x": batch, "y": 1}, {"x": 1, "y": 1}),
}


def mismatch(name: str) -> tuple:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    for batch in own_loader(accelerator, [2] * accelerator.num_processes):
        last = rank == accelerator.num_processes - 1
        error = raised(accelerator.gather_for_metrics, MISMATCHES[name](batch)[last])
        return error, accelerator.gather_for_metrics(batch).tolist()


@parameterized.expand(
    [(2, name) for name in MISMATCHES] + [(3, "dtype"), (3, "tensor and list"), (4, "keys"), (4, "mixed")]
)
def test_structures_that_differ(world_size, name):
    outcomes = run(world_size, mismatch, name, timeout=15.0, outcomes=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for error, after in outcomes:
        assert error is not None and error[0] == "ValueError"
        assert f"Rank {world_size - 1}" in error[1]
        assert after == real_steps([2] * world_size)[0]  # and the ranks are still in step


# where Accelerate's own way is taken


def beside_upstream(length: int) -> list:
    """The same calls on this package's accelerator and on plain Accelerate's."""
    results = []
    for accelerator in (Accelerator(cpu=True), accelerate.Accelerator(cpu=True)):
        rank = accelerator.process_index
        outside = [torch.tensor([1.0 + rank, 2.0]), torch.tensor(3.0), {"x": torch.ones(2, 2) * rank}]
        found = []
        if isinstance(accelerator, Accelerator):
            presharded = own_loader(accelerator, [3] * accelerator.num_processes)
            list(presharded)
        found += [plain(accelerator.gather_for_metrics(data)) for data in outside]
        found.append(plain(accelerator.gather_for_metrics([f"rank {rank}", "x"])))
        found.append(plain(accelerator.gather_for_metrics(outside[0], use_gather_object=True)))
        loader = accelerator.prepare(DataLoader(range(length), batch_size=2))
        for batch in loader:
            found.append(plain(accelerator.gather_for_metrics(batch)))
            found.append(plain(accelerator.gather_for_metrics({"a": batch, "b": (batch[:, None] * 0.5,)})))
            found.append(plain(accelerator.gather_for_metrics([f"s{i}" for i in batch.tolist()])))
            found.append(plain(accelerator.gather_for_metrics(batch.float().mean())))
            found.append(plain(accelerator.gather_for_metrics(batch, use_gather_object=True)))
        found += [plain(accelerator.gather_for_metrics(data)) for data in outside]
        results.append(found)
    return results


@parameterized.expand([(2, 9), (2, 8), (3, 11), (4, 5)])
def test_ordinary_loaders_and_outside_of_loops(world_size, length):
    for ours, upstream in run(world_size, beside_upstream, length):
        assert len(ours) == len(upstream) > 10
        assert ours == upstream


def nested_loops(lengths: list[int], ordinary_outside: bool, length: int) -> list:
    accelerator = Accelerator(cpu=True)
    presharded = own_loader(accelerator, lengths)
    ordinary = accelerator.prepare(DataLoader(range(length), batch_size=2))
    outer, inner = (ordinary, presharded) if ordinary_outside else (presharded, ordinary)
    results = []
    for batch in outer:
        before = accelerator.gather_for_metrics(batch).tolist()
        within = [accelerator.gather_for_metrics(other).tolist() for other in inner]
        after = accelerator.gather_for_metrics(batch).tolist()
        results.append((before, within, after))
    return results


@parameterized.expand(itertools.product(([5, 3], [2, 5, 3]), (True, False)))
def test_nested_loops(lengths, ordinary_outside):
    world_size = len(lengths)
    length = 2 * world_size + 1
    # Accelerate deals batches in turn, and cuts the tail that it has filled up.
    of_ordinary = [list(range(2 * world_size)), [2 * world_size]]
    of_presharded = real_steps(lengths)
    outer, inner = (of_ordinary, of_presharded) if ordinary_outside else (of_presharded, of_ordinary)
    for results in run(world_size, nested_loops, lengths, ordinary_outside, length):
        assert results == [(step, inner, step) for step in outer]


def nested_presharded(lengths: list[int], others: list[int], kind: str) -> list:
    accelerator = Accelerator(cpu=True)
    outer, inner = own_loader(accelerator, lengths, kind), own_loader(accelerator, others, kind)
    return [
        (
            accelerator.gather_for_metrics(batch).tolist(),
            [accelerator.gather_for_metrics(other).tolist() for other in inner],
            accelerator.gather_for_metrics(batch).tolist(),
        )
        for batch in outer
    ]


@parameterized.expand(itertools.product((([5, 3], [1, 4]), ([2, 5, 3], [4, 4, 1])), ("map-style", "stream")))
def test_nested_presharded_loops(lengths, kind):
    outer, inner = map(real_steps, lengths)
    for results in run(len(lengths[0]), nested_presharded, *lengths, kind):
        assert results == [(step, inner, step) for step in outer]


def interrupted(lengths: list[int], kind: str) -> list:
    accelerator = Accelerator(cpu=True)
    loader = own_loader(accelerator, lengths, kind)
    ordinary = accelerator.prepare(DataLoader(range(2 * accelerator.num_processes), batch_size=2))
    results = []
    for stop_at in (0, 1, 2, None):
        steps = []
        for step, batch in enumerate(loader):
            steps.append(accelerator.gather_for_metrics(batch).tolist())
            if step == stop_at:
                break
        results.append(steps)
        results.append([accelerator.gather_for_metrics(batch).tolist() for batch in ordinary])
    for number in (1, 2):
        skipping = accelerator.skip_first_batches(loader, number)
        results += [[accelerator.gather_for_metrics(batch).tolist() for batch in skipping] for _ in range(2)]
    return results


@parameterized.expand(itertools.product(([5, 3], [2, 7], [2, 5, 3]), ("map-style", "stream")))
def test_after_a_break_and_after_skipping(lengths, kind):
    steps = real_steps(lengths)
    ordinary = [list(range(2 * len(lengths)))]
    expected = [steps[:1], ordinary, steps[:2], ordinary, steps[:3], ordinary, steps, ordinary]
    expected += [steps[1:], steps, steps[2:], steps]
    for results in run(len(lengths), interrupted, lengths, kind):
        assert results == expected


# totals


def totals(lengths: list[int]) -> dict:
    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    items = items_of(rank, lengths[rank])
    indices = list(range(len(items)))
    loaders = {
        "map-style": DataLoader(items, batch_size=2),
        "drop_last": DataLoader(items, batch_size=2, drop_last=True),
        "stream": DataLoader(Stream(items), batch_size=3),
        "batch sampler": DataLoader(items, batch_sampler=BatchSampler(SequentialSampler(items), 4, drop_last=False)),
        "dynamic": DataLoader(items, batch_sampler=RankBatches([indices], world_size, rank)),
    }
    results = {}
    for name, loader in loaders.items():
        loader = accelerator.prepare(loader, already_sharded=True)
        found = {}
        for attribute in ("total_batch_size", "total_dataset_length"):
            # A list, to be told apart from an error.
            found[attribute] = raised(getattr, loader, attribute) or [getattr(loader, attribute)]
        found["len"] = raised(len, loader) or [len(loader)]
        results[name] = found
    return results


@parameterized.expand([([9, 7],), ([3, 8, 4],), ([2, 2, 2, 5],)])
def test_totals(lengths):
    world_size, total = len(lengths), sum(lengths)
    for results in run(world_size, totals, lengths):
        assert results["map-style"] == {
            "total_batch_size": [2 * world_size],
            "total_dataset_length": [total],
            "len": [(max(lengths) + 1) // 2],
        }
        assert results["drop_last"] == {
            "total_batch_size": [2 * world_size],
            "total_dataset_length": [total],
            "len": [min(lengths) // 2],
        }
        assert results["batch sampler"] == {
            "total_batch_size": [4 * world_size],
            "total_dataset_length": [total],
            "len": [(max(lengths) + 3) // 4],
        }
        assert results["stream"]["total_batch_size"] == [3 * world_size]
        assert results["stream"]["total_dataset_length"][0] == "TypeError"
        assert results["stream"]["len"][0] == "TypeError"
        assert results["dynamic"]["total_dataset_length"][0] == "TypeError"


def on_a_mesh() -> tuple:
    accelerate.PartialState(cpu=True)
    index = dist.get_rank() // 2
    with stand_in_gpus({"dp_shard": 2, "tp": 2}) as settings:
        accelerator = Accelerator(**settings)
        items = items_of(index, 5 - 2 * index)
        loader = accelerator.prepare(DataLoader(items, batch_size=2), already_sharded=True)
        steps = [
            (
                accelerator.gather_for_metrics(batch).tolist(),
                accelerator.gather_for_metrics({"a": [f"s{i}" for i in batch.tolist()], "b": batch[:, None]}),
            )
            for batch in loader
        ]
        return [(a, b["a"], b["b"].tolist()) for a, b in steps], loader.total_batch_size, loader.total_dataset_length


def test_ranks_that_share_a_batch_count_once():
    needs_parallelism_config()
    expected = [
        (real, [f"s{item}" for item in real], [[item] for item in real])
        for real in ([0, 1, 1000, 1001], [2, 3, 1002], [4])
    ]
    assert run(4, on_a_mesh) == [(expected, 4, 8)] * 4


def test_one_process():
    def alone():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(5), batch_size=2), already_sharded=True)
        steps = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
        words = [accelerator.gather_for_metrics([f"s{i}" for i in batch.tolist()]) for batch in loader]
        return steps, words, loader.total_batch_size, loader.total_dataset_length, lists(loader)

    steps = [[0, 1], [2, 3], [4]]
    words = [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert run(1, alone) == [(steps, words, 2, 5, steps)]
