# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Who sees which sample: the numbers, the verdicts, and that training does not notice."""

import json
import random
from collections import Counter, namedtuple
from dataclasses import dataclass

import accelerate
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from ranks import RankError, run
from shared import NoLoader, RankBatches, Stream, raised
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from accelerate_presharded import Accelerator, audit
from accelerate_presharded.auditing import _CHUNK
from accelerate_presharded.contents import Cutter, hash_of


# ------------------------------------------------------------------------------------------------- the content


Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    name: str
    values: list


class Plain:
    def __init__(self, value):
        self.value = value


ALIKE = {
    "numbers": (5, torch.tensor(5), np.int64(5), np.array(5)),
    "floats": (0.5, torch.tensor(0.5), np.float64(0.5)),
    "tensors": (torch.arange(6).view(2, 3), torch.arange(12).view(2, 6)[:, ::2] // 2 * 1 + 0 * torch.arange(3)),
    "strided": (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]])),
    "arrays": (np.arange(3), torch.arange(3)),
    "lists and tuples": ([1, "a", None], (1, "a", None)),
    "mappings": ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
    "sets": ({"a", "b", "c"}, {"c", "b", "a"}),
    "records": (Record("a", [1]), Record("a", [1])),
    "objects": (Plain([1, 2]), Plain([1, 2])),
    "half precision": (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    "objects in arrays": (np.array(["a", None], dtype=object), ["a", None]),
}
ALIKE["tensors"] = (torch.arange(6).view(2, 3), torch.arange(6).view(2, 3).clone())


@parameterized.expand(ALIKE.items())
def test_the_same_content_has_the_same_hash(_, samples):
    assert len({hash_of(sample) for sample in samples}) == 1


DIFFERENT = [
    *(1, 2, True, 1.0, -1, "1", b"1", None, "", b"", (), {}, 1j),
    *([1, 2], [2, 1], [[1], 2], [[1, 2]], [[]], "12", ["1", "2"], ["12"], ["1", "2", ""]),
    *({"a": 1}, {"a": 2}, {"b": 1}, {"a": {"b": 1}}, {"a": 1, "b": 1}, [("a", 1)], {1}, {1, 2}),
    *(torch.tensor([1, 2]), torch.tensor([[1, 2]]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1.0, 2.0])),
    *(torch.empty(0), torch.empty(0, 2), torch.tensor([2, 1]), torch.ones(2, dtype=torch.bfloat16), torch.ones(2)),
    *(Record("a", [1]), Record("a", [2]), Plain(1), Plain(2), range(2), range(3), Pair(1, 3)),
]


def test_different_contents_have_different_hashes():
    assert len({hash_of(sample) for sample in DIFFERENT}) == len(DIFFERENT)


def test_a_hash_is_the_same_in_every_process():
    # With a hash seed of its own, strings and sets have another order in each process.
    samples = [{"name": {"b", "a", "c"}, "x": torch.arange(3)}, "text", Record("a", [1])]
    with_seed = [run(1, lambda: list(map(hash_of, samples)), env={"PYTHONHASHSEED": seed})[0] for seed in ("1", "2")]
    assert with_seed == [list(map(hash_of, samples))] * 2


@parameterized.expand(
    [
        ("field", {"id": 3, "x": torch.rand(2)}, "id", 3),
        ("index", [torch.rand(2), 3], 1, 3),
        ("last", [torch.rand(2), 3], -1, 3),
        ("attribute", Record("a", [1]), "name", "a"),
        ("function", {"id": 3}, lambda sample: sample["id"] + 1, 4),
    ]
)
def test_a_key_tells_samples_apart(_, sample, key, value):
    assert hash_of(sample, key) == hash_of(value)


@parameterized.expand([("field", {"x": 1, "y": 2}, "id"), ("index", [1], 4), ("attribute", 5, "id"), ("of", 5, 1)])
def test_a_key_that_is_not_there_is_named(_, sample, key):
    with pytest.raises(ValueError, match=f"`key` is {key!r}"):
        hash_of(sample, key)


def test_what_has_no_content_says_so():
    with pytest.raises(ValueError, match="Pass `key`"):
        hash_of(lambda: None)


CUTS = {
    "tensor": (None, torch.arange(3), [0, 1, 2]),
    "array": (None, np.arange(3), [0, 1, 2]),
    "mapping": (None, {"x": torch.arange(2), "name": ["a", "b"]}, [{"x": 0, "name": "a"}, {"x": 1, "name": "b"}]),
    "mapping with a constant": (None, {"x": torch.arange(2), "n": 7}, [{"x": 0, "n": 7}, {"x": 1, "n": 7}]),
    "nested": (None, {"in": {"x": torch.arange(2)}, "y": torch.ones(2)}, [{"in": {"x": i}, "y": 1.0} for i in (0, 1)]),
    "columns": (3, [torch.arange(3), torch.ones(3)], [[0, 1.0], [1, 1.0], [2, 1.0]]),
    "columns, square": (2, [torch.arange(2), torch.ones(2)], [[0, 1.0], [1, 1.0]]),
    "columns, not full": (3, [torch.arange(2), ["a", "b"]], [[0, "a"], [1, "b"]]),
    "columns of text": (3, [("a", "b", "c"), ("x", "y", "z")], [["a", "x"], ["b", "y"], ["c", "z"]]),
    "columns of tuples": (None, (torch.arange(2), torch.arange(2)), [[0, 0], [1, 1]]),
    "list of texts": (2, ["ab", "cd"], ["ab", "cd"]),
    "list of tensors": (4, [torch.ones(3)] * 4, [torch.ones(3)] * 4),
    "list of dicts": (2, [{"x": torch.ones(3)}] * 2, [{"x": torch.ones(3)}] * 2),
    "list of unequal tensors": (None, [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]),
    "list of numbers": (None, [1, 2], [1, 2]),
    "list of token lists": (2, [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
    "no list": (None, 5, [5]),
    "empty": (None, [], []),
}


@parameterized.expand(CUTS.items())
def test_batches_are_cut_into_samples(_, case):
    batch_size, batch, samples = case
    loader = NoLoader([])
    loader.batch_size = batch_size
    assert list(map(hash_of, Cutter(loader).cut(batch))) == list(map(hash_of, samples))


def test_the_first_batch_decides_what_a_list_is():
    loader = NoLoader([])
    loader.batch_size = 4
    of_samples = Cutter(loader)
    assert len(of_samples.cut([torch.ones(2)] * 4)) == 4
    assert len(of_samples.cut([torch.ones(2)] * 2)) == 2
    of_columns = Cutter(loader)
    assert len(of_columns.cut([torch.ones(4)] * 2)) == 4
    assert len(of_columns.cut([torch.ones(3)] * 2)) == 3


def test_an_item_without_a_batch_is_one_sample():
    loader = DataLoader([torch.ones(3), torch.zeros(3)], batch_size=None)
    assert [len(Cutter(loader).cut(item)) for item in loader] == [1, 1]


# ------------------------------------------------------------------------------------------------- the numbers


def reports_of(streams, batch_size=2, earlier=None, **kwargs):
    """The report about loaders that yield the given samples, one list for each rank, as a dictionary."""

    def on_rank():
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        before = None
        if earlier is not None:
            before = accelerator.audit(DataLoader(Stream(earlier[rank]), batch_size))
        return accelerator.audit(DataLoader(Stream(streams[rank]), batch_size), before=before, **kwargs).to_dict()

    return same_on_all(run(len(streams), on_rank))


def same_on_all(reports):
    assert all(report == reports[0] for report in reports)
    return reports[0]


sample_lists = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 12), max_size=9), min_size=size, max_size=size)
)
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(streams=sample_lists, batch_size=st.integers(1, 4))
def test_the_numbers_are_those_of_a_count(streams, batch_size):
    report = reports_of(streams, batch_size)
    counts = [Counter(stream) for stream in streams]
    union = sum(counts, start=Counter())
    for rank, stream in enumerate(streams):
        assert report["ranks"][rank] == {
            "rank": rank,
            "batches": -(-len(stream) // batch_size),
            "samples": len(stream),
            "distinct": len(set(stream)),
            "repeats": 0,
        }
    assert report["distinct"] == len(union)
    assert report["seen_by_several_ranks"] == sum(1 for x in union if sum(x in count for count in counts) > 1)
    assert report["seen_twice_by_one_rank"] == sum(1 for x in union if any(count[x] > 1 for count in counts))
    assert report["seen_more_than_once"] == sum(1 for x in union if union[x] > 1)
    assert report["complete"] == (bool(union) and max(union.values()) == 1)
    assert report["missed"] is None and report["total"] is None


@few
@given(data=st.data(), size=st.integers(1, 3))
def test_what_was_seen_before_and_is_not_seen_now_is_missed(data, size):
    lists = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=size, max_size=size)
    before, after = data.draw(lists), data.draw(lists)
    report = reports_of(after, earlier=before)
    known, seen = set().union(*before), set().union(*after)
    assert report["total"] == len(known)
    assert report["missed"] == len(known - seen)
    if report["complete"]:
        assert known <= seen


def test_hashes_are_compared_part_by_part(monkeypatch):
    def on_rank(chunk):
        module = __import__("sys").modules["accelerate_presharded.auditing"]
        module._CHUNK = chunk
        accelerator = Accelerator(cpu=True)
        start = 60 * accelerator.process_index
        before = accelerator.audit(DataLoader(Stream(range(start, start + 120)), 16))
        return accelerator.audit(DataLoader(Stream([*range(start, start + 100), 0]), 16), before=before).to_dict()

    small, large = (same_on_all(run(3, on_rank, chunk)) for chunk in (7, _CHUNK))
    assert small == large
    # 0 to 99, 60 to 159 and 120 to 219, and 0 on all of them; before, up to 239.
    assert (small["distinct"], small["seen_by_several_ranks"], small["missed"]) == (220, 81, 20)
    assert small["seen_twice_by_one_rank"] == 1


# ------------------------------------------------------------------------------------------------- the verdicts


def prepared(accelerator, kind, loader, **kwargs):
    if kind == "accelerate":
        return accelerate.Accelerator(cpu=True).prepare(loader)
    return accelerator.prepare(loader, **kwargs) if kind == "ours" else loader


def verdict_of(world_size, make, kind=None, key=None, max_batches=None, with_before=False, **kwargs):
    def on_rank():
        accelerator = Accelerator(cpu=True)
        size, rank = accelerator.num_processes, accelerator.process_index
        before = accelerator.audit(make(size, rank), key=key, max_batches=max_batches) if with_before else None
        loader = prepared(accelerator, kind, make(size, rank), **kwargs)
        report = accelerator.audit(loader, key=key, max_batches=max_batches, before=before)
        assert report.to_dict()["verdict"] in str(report)
        return report.to_dict()

    return same_on_all(run(world_size, on_rank))


def distributed(length, batch_size=2, shuffle=True, **kwargs):
    return lambda size, rank: DataLoader(
        range(length), batch_size, sampler=DistributedSampler(range(length), size, rank, shuffle=shuffle, **kwargs)
    )


def own(length, batch_size=2):
    return lambda size, rank: DataLoader(list(range(length * rank, length * (rank + 1))), batch_size)


def own_stream(*lengths, batch_size=2):
    return lambda size, rank: DataLoader(Stream(range(100 * rank, 100 * rank + lengths[rank])), batch_size)


@parameterized.expand([(size, kind) for size in (1, 2, 3, 4) for kind in (None, "ours")])
def test_every_sample_once_with_a_padding_sampler(size, kind):
    report = verdict_of(size, distributed(13), kind)
    padding = -13 % size
    assert report["verdict"] == f"Every sample once: 13 samples on {size} rank{'s' * (size > 1)}."
    assert report["complete"] and not report["advice"]
    assert (report["total"], report["missed"], report["seen_more_than_once"]) == (13, 0, 0)
    assert sum(rank["samples"] for rank in report["ranks"]) == 13
    assert sum(rank["repeats"] for rank in report["ranks"]) == padding


@parameterized.expand([(2, "50"), (3, "33.3"), (4, "25")])
def test_sharded_twice(size, percent):
    covered = 48 // size
    for with_before in (False, True):
        report = verdict_of(size, distributed(48), "accelerate", with_before=with_before)
        assert report["verdict"] == (
            f"Sharded twice: each epoch covers {percent} % of the data ({covered} of 48 samples)."
        )
        assert not report["complete"] and report["missed"] == 48 - covered
        assert "DistributedSampler" in report["advice"] and "by itself" in report["advice"]


@parameterized.expand([(2,), (3,)])
def test_own_data_sharded_again_needs_the_flag(size):
    for with_before in (False, True):
        report = verdict_of(size, own(4 * size), "accelerate", with_before=with_before)
        assert report["verdict"].startswith("Sharded twice:")
        assert (report["total"], report["distinct"]) == (4 * size * size, 4 * size)
        assert "`already_sharded=True`" in report["advice"]
    fixed = verdict_of(size, own(4 * size), "ours", already_sharded=True)
    assert fixed["complete"] and fixed["distinct"] == fixed["total"] == 4 * size * size


@parameterized.expand([(1,), (2,), (3,), (4,)])
def test_an_ordinary_loader_before_and_after(size):
    def make(size, rank):
        return DataLoader(range(13), 2, shuffle=True)

    before = verdict_of(size, make)
    assert before["complete"] == (size == 1)
    if size > 1:
        assert before["verdict"] == "All ranks read the same data: 13 samples each."
        assert "right for an ordinary loader" in before["advice"]
    for kind in ("accelerate", "ours"):
        after = verdict_of(size, make, kind)
        assert after["complete"], after
        # Accelerate fills up to whole batches for all ranks, from the beginning.
        filled = 0 if size == 1 else -13 % (2 * size)
        assert sum(rank["repeats"] for rank in after["ranks"]) == filled
        assert [after[name] for name in ("distinct", "missed", "seen_more_than_once")] == [13, 0, 0]


@parameterized.expand(
    [
        ("split", {"split_batches": True}, 12),
        ("dispatched", {"dispatch_batches": True}, 4),
        ("uneven", {"even_batches": False}, 4),
        ("plain", {}, 4),
    ]
)
def test_what_accelerate_fills_up_is_no_sample(_, settings, batch_size):
    def on_rank(stream):
        config = accelerate.DataLoaderConfiguration(**settings)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
        data = Stream(range(29)) if stream else range(29)
        return audit(accelerator.prepare(DataLoader(data, batch_size)), accelerator).to_dict()

    for stream in (False, True) if "dispatch_batches" in settings else (False,):
        for size in (2, 3):
            report = same_on_all(run(size, on_rank, stream))
            numbers = [report[name] for name in ("distinct", "seen_more_than_once")]
            assert numbers == [29, 0], report
            assert sum(rank["samples"] for rank in report["ranks"]) == 29


def test_only_the_stream_of_rank_0_is_read():
    report = verdict_of(2, own_stream(8, 8), "accelerate", with_before=True)
    assert report["verdict"] == "Only rank 0's data is read: each epoch covers 50 % of the data (8 of 16 samples)."
    unknown = verdict_of(2, own_stream(8, 8), "accelerate")
    assert unknown["verdict"] == "Only rank 0's data is read: that of the others is different."
    assert not unknown["complete"] and unknown["missed"] is None
    same = verdict_of(2, lambda size, rank: DataLoader(Stream(range(8)), 2), "accelerate")
    assert same["complete"] and same["distinct"] == 8


def test_replays_are_not_seen_twice():
    report = verdict_of(3, own_stream(8, 4, 3), "ours", already_sharded=True, with_before=True)
    assert report["verdict"] == "Every sample once: 15 samples on 3 ranks."
    assert [rank["batches"] for rank in report["ranks"]] == [4, 4, 4]
    assert [rank["samples"] for rank in report["ranks"]] == [8, 4, 3]
    assert [rank["repeats"] for rank in report["ranks"]] == [0, 4, 3]


def test_a_rank_that_makes_more_steps():
    def on_rank(even_batches):
        # Accelerate leaves a loader of its own class alone, whatever the other ranks have.
        accelerator = Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(even_batches=False))
        rank = accelerator.process_index
        data = range(10 * rank, 10 * rank + (5 if rank == 1 else 3))
        if even_batches:
            loader = accelerate.data_loader.DataLoaderShard(data)
        else:
            loader = accelerator.prepare(DataLoader(data), already_sharded=True)
        return accelerator.audit(loader).to_dict()

    hanging = same_on_all(run(3, on_rank, True))
    assert not hanging["complete"] and hanging["missed"] == 0
    assert hanging["verdict"].startswith("Rank 1 makes 2 more steps than rank 0: DDP would hang.")
    assert "even_batches=True" in hanging["advice"]
    allowed = same_on_all(run(3, on_rank, False))
    assert allowed["complete"] and "Rank 1 makes 2 more steps" in allowed["verdict"]


def test_ranks_that_draw_differently_overlap():
    def make(size, rank):
        sampler = DistributedSampler(range(64), size, rank, seed=rank)
        return DataLoader(range(64), 4, sampler=sampler)

    report = verdict_of(2, make, "ours")
    drawn = [set(DistributedSampler(range(64), 2, rank, seed=rank)) for rank in (0, 1)]
    assert report["distinct"] == len(drawn[0] | drawn[1]) < 64
    assert report["seen_by_several_ranks"] == len(drawn[0] & drawn[1]) > 0
    # As many readings as samples, but not the same ones: that is no excuse.
    assert not report["complete"] and report["missed"] is None
    with_key = verdict_of(2, make, "ours", key=lambda sample: int(sample))
    assert not with_key["complete"]
    streams = reports_of([[1, 2, 3], [3, 4, 5]])
    assert streams["verdict"] == "1 sample of 5 is seen by more than one rank."
    assert "seed" in streams["advice"]


def test_one_rank_that_reads_twice():
    report = reports_of([[1, 2, 2], [3, 4, 5]])
    assert report["verdict"] == "1 sample of 5 is seen twice by the same rank."
    assert not report["complete"]


def test_what_a_loader_leaves_out():
    dropped = verdict_of(2, lambda size, rank: DataLoader(range(19), 4, drop_last=True), "accelerate")
    assert dropped["verdict"] == "Each epoch covers 84.2 % of the data (16 of 19 samples)."
    assert "`drop_last=True`" in dropped["advice"]
    subset = verdict_of(1, lambda size, rank: DataLoader(range(20), 4, sampler=SubsetRandomSampler(range(10))))
    assert subset["missed"] == 10 and not subset["complete"]
    nearly = verdict_of(1, lambda size, rank: DataLoader(range(4000), 64, sampler=SubsetRandomSampler(range(3999))))
    assert "more than 99.9 %" in nearly["verdict"]


def test_nothing_at_all():
    report = reports_of([[], []])
    assert report["verdict"] == "No rank has seen any sample." and not report["complete"]
    half = reports_of([[1, 2], []])
    assert half["complete"] and any("on rank 1" in note for note in half["notes"])


# Three samples that look alike, and two that do.
TWINS = ["a", "b", "c", "a", "d", "e", "a", "b", "f", "g", "h", "i"]


@parameterized.expand([(2,), (3,)])
def test_samples_that_are_alike_in_the_data_itself(size):
    def make(size, rank):
        return DataLoader(TWINS, 2, sampler=DistributedSampler(TWINS, size, rank, shuffle=False))

    def of_twins(size, rank):
        return DataLoader(["same"] * 12, 2, sampler=DistributedSampler(TWINS, size, rank))

    for kind, with_before in ((None, False), ("ours", False), ("ours", True)):
        report = verdict_of(size, make, kind, with_before=with_before)
        assert report["complete"], report
        assert report["verdict"] == f"Every sample once: 12 samples on {size} ranks, 9 of them different."
        assert report["missed"] == 0
        assert verdict_of(size, of_twins, kind, with_before=with_before)["complete"]
    # Where each rank holds a part, the parts may overlap.
    parts = verdict_of(size, lambda size, rank: DataLoader(TWINS[rank::size], 2), "ours", already_sharded=True)
    assert not parts["complete"] and parts["missed"] is None
    assert parts["verdict"] == "12 samples are read, as many as there are, but only 9 of them differ."
    assert "`key`" in parts["advice"]
    # And it is no excuse where samples are missed.
    assert verdict_of(size, make, "accelerate", with_before=True)["missed"] > 0


def test_a_key_for_samples_that_look_alike():
    rows = [{"id": i, "text": text} for i, text in enumerate(TWINS)]
    streams = {key: reports_of([rows[:6], rows[6:]], key=key) for key in ("id", "text")}
    assert streams["id"]["complete"] and streams["id"]["distinct"] == 12
    assert streams["text"]["distinct"] == 9 and not streams["text"]["complete"]
    assert streams["id"]["told_apart_by"] == "the key 'id'"


def test_the_same_local_index_is_not_the_same_sample():
    def make(size, rank):
        return DataLoader([{"index": i, "x": torch.tensor([rank, i])} for i in range(6)], 2)

    by_content = verdict_of(2, make)
    assert by_content["complete"] and by_content["distinct"] == by_content["total"] == 12
    by_index = verdict_of(2, make, key="index")
    assert by_index["verdict"] == "All ranks read the same data: 6 samples each."


def test_content_that_is_drawn_at_random():
    class Noisy(Stream):
        def __iter__(self):
            return ({"id": i, "x": torch.rand(4)} for i in super().__iter__())

    def make(size, rank):
        return DataLoader(Noisy(range(6 * rank, 6 * rank + 6)), 2)

    def reseeded(size, rank):
        torch.manual_seed(random.SystemRandom().getrandbits(40))
        return make(size, rank)

    report = verdict_of(2, reseeded, "ours", with_before=True, already_sharded=True)
    assert report["verdict"] == "No sample from before `prepare` is seen again."
    assert "`key`" in report["advice"]
    assert verdict_of(2, reseeded, "ours", with_before=True, already_sharded=True, key="id")["complete"]


def test_padding_to_the_longest_is_pointed_out():
    def on_rank():
        data = [torch.ones(length) * length for length in (1, 2, 3, 4)]
        pad = torch.nn.utils.rnn.pad_sequence
        loader = DataLoader(data, 2, collate_fn=lambda batch: pad(batch, batch_first=True))
        return Accelerator(cpu=True).audit(loader).notes

    assert any("padded" in note for note in run(1, on_rank)[0])


def test_a_stream_that_never_ends():
    def make(size, rank):
        return DataLoader(Stream(__import__("itertools").count(rank, size)), 2)

    report = verdict_of(2, make, "ours", max_batches=3, with_before=True, already_sharded=True)
    assert report["complete"] and report["max_batches"] == 3
    assert report["verdict"] == (
        "Every sample once: 12 samples on 2 ranks. Only the first 3 batches of each rank were judged."
    )
    assert report["missed"] is None
    # A limit that was not reached says nothing.
    short = verdict_of(2, own(4), "ours", max_batches=5, already_sharded=True)
    assert short["max_batches"] is None and "Only" not in short["verdict"]


def test_a_loader_sharded_twice_shows_in_its_first_batches():
    report = verdict_of(2, distributed(48), "accelerate", max_batches=2)
    assert report["verdict"].startswith("Sharded twice: each rank sees 1/2 of its part.")
    assert not report["complete"]


def test_batches_of_one_item_and_loaders_of_other_classes():
    def items(size, rank):
        sampler = DistributedSampler(range(8), size, rank)
        return DataLoader([torch.full((3,), i) for i in range(8)], batch_size=None, sampler=sampler)

    assert verdict_of(2, items, "ours")["distinct"] == 8
    assert verdict_of(2, items, "ours")["complete"]
    other = verdict_of(2, lambda size, rank: NoLoader([torch.arange(3) + 3 * rank]), "ours", already_sharded=True)
    assert other["complete"] and other["distinct"] == 6
    dealt = [[[0, 1, 2], [3]], [[4, 5], [6, 7]]]
    own_batches = verdict_of(
        2, lambda size, rank: DataLoader(range(8), batch_sampler=RankBatches(dealt[rank], size, rank)), "ours"
    )
    assert own_batches["complete"] and own_batches["total"] == 8


def test_a_batch_that_cannot_be_cut_is_pointed_out():
    report = verdict_of(1, lambda size, rank: NoLoader([Plain(1), Plain(2)]))
    assert report["distinct"] == 2 and any("Plain" in note for note in report["notes"])


# ------------------------------------------------------------------------------------------------- the report


def test_the_report_as_data_as_text_and_as_an_assertion(fresh_state):
    accelerator = Accelerator(cpu=True)
    report = accelerator.audit(DataLoader(range(5), 2))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report == audit(DataLoader(range(5), 2), accelerator)
    lines = str(report).splitlines()
    assert lines[2].split() == ["batches", "samples", "distinct", "repeats"]
    assert lines[3].split() == ["rank", "0", "3", "5", "5", "0"]
    report.assert_complete()
    twice = accelerator.audit(DataLoader([1, 3, 2], 2, sampler=[0, 0, 2]))
    with pytest.raises(AssertionError) as error:
        twice.assert_complete()
    assert twice.verdict in str(error.value) and twice.advice in str(error.value)


@parameterized.expand([("zero", {"max_batches": 0}), ("text", {"max_batches": "2"}), ("key", {"key": 1.5})])
def test_arguments_that_make_no_sense(name, kwargs):
    kind, message = run(1, lambda: raised(Accelerator(cpu=True).audit, DataLoader(range(3)), **kwargs))[0]
    assert kind == "ValueError" and f"`{next(iter(kwargs))}`" in message


def test_an_error_on_one_rank_is_told_to_all():
    def on_rank():
        accelerator = Accelerator(cpu=True)

        def items():
            yield from range(3)
            if accelerator.process_index == 1:
                raise OSError("disk gone")

        loader = DataLoader(NoLoader(range(3)), 1) if False else NoLoader(items())
        first = raised(accelerator.audit, loader)
        # And the group is usable afterwards.
        return first, accelerator.audit(DataLoader(Stream([accelerator.process_index]))).distinct

    (others, left), (own_error, _) = run(2, on_rank)
    assert own_error == ("OSError", "disk gone")
    assert others[0] == "OtherRankFailed" and "rank 1" in others[1] and "disk gone" in others[1]
    assert left == 2


def test_before_on_some_ranks_only_is_refused():
    def on_rank():
        accelerator = Accelerator(cpu=True)
        before = accelerator.audit(DataLoader(range(3)))
        accelerator.audit(DataLoader(range(3)), before=before if accelerator.process_index else None)

    with pytest.raises(RankError, match="`before` was passed on some ranks only"):
        run(2, on_rank)


# ------------------------------------------------------------------------------------------------- untouched


class Remembering(Stream):
    """A stream that goes on from where it was left, and can say where that is."""

    def __init__(self, items):
        super().__init__(items)
        self.position = 0

    def __iter__(self):
        while self.position < len(self.items):
            self.position += 1
            yield self.items[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Numbered(DistributedSampler):
    """Keeps its epoch behind a property."""

    @property
    def epoch(self):
        return self._hidden

    @epoch.setter
    def epoch(self, value):
        self._hidden = value


def many_loaders(size, rank):
    data = range(24)

    def sampler(cls=DistributedSampler):
        return cls(data, size, rank)

    def told(sampler):
        sampler.set_epoch(7)
        return sampler

    mine = list(range(24 * rank, 24 * rank + 24))
    noisy = [lambda i=i: i for i in range(3)]
    assert noisy
    return {
        "distributed": lambda: DataLoader(data, 4, sampler=sampler()),
        "told by the user": lambda: DataLoader(data, 4, sampler=told(sampler())),
        "behind a property": lambda: DataLoader(data, 4, sampler=sampler(Numbered)),
        "shuffled": lambda: DataLoader(mine, 4, shuffle=True),
        "shuffled by a generator": lambda: DataLoader(mine, 4, shuffle=True, generator=torch.Generator()),
        "workers": lambda: DataLoader(mine, 4, shuffle=True, num_workers=1),
        "persistent workers": lambda: DataLoader(mine, 4, shuffle=True, num_workers=1, persistent_workers=True),
        "stateful": lambda: StatefulDataLoader(mine, 4, shuffle=True),
        "stateful, distributed": lambda: StatefulDataLoader(data, 4, sampler=sampler()),
        "stateful stream": lambda: DataLoader(Remembering(mine), 4),
    }


def trained(name, kind, audited):
    """What three epochs see with and without an audit before each, and in the middle of the second."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loader = many_loaders(accelerator.num_processes, accelerator.process_index)[name]()
    loader = prepared(accelerator, kind, loader, already_sharded=True)
    # A second loop may stand around the audit, in evaluation for instance.
    around = accelerator.prepare(DataLoader(range(2 * accelerator.num_processes)))
    seen, numbers = [], []
    for epoch in range(3):
        for batch in around:
            state = accelerator.gradient_state
            active, end = state.active_dataloader, state.end_of_dataloader
            if audited:
                for max_batches in (None, 2):
                    report = accelerator.audit(loader, max_batches=max_batches)
                    assert report.distinct > 0
            assert state.active_dataloader is active and state.end_of_dataloader == end
            break
        accelerator.gradient_state.dataloader_references = [None]
        seen.append([batch.tolist() for batch in loader])
        numbers.append((torch.rand(1).item(), random.random(), np.random.rand(), getattr(loader, "iteration", None)))
    return seen, numbers


@parameterized.expand(
    [(name, kind) for name in many_loaders(1, 0) for kind in (None, "accelerate", "ours")],
)
def test_training_does_not_notice(name, kind):
    if (name, kind) == ("stateful stream", "accelerate"):
        return  # only rank 0's is read there, and its place is the other test's concern
    with_audit = run(2, trained, name, kind, True)
    without = run(2, trained, name, kind, False)
    assert with_audit == without


def test_a_resumed_loader_goes_on_where_it_would_have(tmp_path):
    def on_rank(audited):
        accelerator = Accelerator(cpu=True)
        data = list(range(20))
        make = {
            "stateful": lambda: StatefulDataLoader(data, 2, shuffle=True, generator=torch.Generator()),
            "stream": lambda: DataLoader(Remembering(data), 2),
        }
        found = {}
        for name, build in make.items():
            first = accelerator.prepare_data_loader(build(), already_sharded=True)
            for number, _ in enumerate(first):
                if number == 3:
                    break
            state = first.state_dict()
            second = accelerator.prepare_data_loader(build(), already_sharded=True)
            second.load_state_dict(state)
            if audited:
                # What is left, that is what would come next.
                assert accelerator.audit(second).ranks[0].batches == 6
            found[name] = [batch.tolist() for batch in second], second.iteration
        loader = accelerator.prepare_data_loader(DataLoader(data, 2), already_sharded=True)
        skipped = accelerator.skip_first_batches(loader, 4)
        if audited:
            assert accelerator.audit(skipped).ranks[0].batches == 6
        found["skipped"] = [batch.tolist() for batch in skipped], [batch.tolist() for batch in skipped]
        return found

    with_audit, without = run(1, on_rank, True), run(1, on_rank, False)
    assert with_audit == without
    assert len(without[0]["stream"][0]) == 6


def test_workers_of_the_pass_do_not_stay():
    def on_rank():
        import multiprocessing

        loader = DataLoader(range(8), 2, num_workers=2, persistent_workers=True)
        Accelerator(cpu=True).audit(loader)
        return len(multiprocessing.active_children())

    assert run(1, on_rank) == [0]
