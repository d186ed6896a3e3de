# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Who sees which sample: one pass over a loader on every rank, and a report that all ranks agree on."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import accelerate
import numpy
import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset

from .contents import Cutter, hash_of
from .counting import count_real, length_of
from .data_loader import PreshardedDataLoader, data_parallel_position, describe, is_prepared
from .rewinding import untouched
from .sharding import find_sharding, read, sharded_by_sampler


NOT_PREPARED = "not prepared"
BY_ACCELERATE = "prepared by accelerate"
BY_US = "prepared by accelerate_presharded"

# How many hashes of each rank are compared at a time.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class RankReport:
    """
    What one rank has seen in one pass.

    Args:
        rank (`int`): The data-parallel index.
        batches (`int`): The batches, which are the steps of a training loop.
        samples (`int`): The samples in them that are real.
        distinct (`int`): How many different ones these are.
        repeats (`int`):
            The samples beside them that are known to be repeats: padding, and batches replayed so that all ranks make
            the same number of steps.
    """

    rank: int
    batches: int
    samples: int
    distinct: int
    repeats: int


@dataclass(frozen=True)
class ShardingReport:
    """
    What all ranks have seen in one pass over a loader. It is the same on every rank; see [`audit`].

    Args:
        loader (`str`): The loader, by class.
        stage (`str`): `"not prepared"`, `"prepared by accelerate"` or `"prepared by accelerate_presharded"`.
        told_apart_by (`str`): `"content"`, or the key.
        ranks (`list[RankReport]`): One entry for each data-parallel rank.
        distinct (`int`): The different samples that all ranks together have seen.
        seen_by_several_ranks (`int`): How many of them more than one rank has seen.
        seen_twice_by_one_rank (`int`): How many of them one rank has seen more than once.
        seen_more_than_once (`int`): How many of them either holds for.
        total (`int`, *optional*): The samples that the data has, where that is known.
        missed (`int`, *optional*): How many of those no rank has seen.
        max_batches (`int`, *optional*): How many batches of each rank were judged, if there were more.
        complete (`bool`):
            Whether every sample was seen once, as far as was judged, and all ranks make the same number of steps, or
            are allowed not to.
        verdict (`str`): All this in one sentence.
        advice (`str`): What to change. Empty where nothing has to be.
        notes (`list[str]`): What to bear in mind when reading the numbers.
    """

    loader: str
    stage: str
    told_apart_by: str
    ranks: list[RankReport]
    distinct: int
    seen_by_several_ranks: int
    seen_twice_by_one_rank: int
    seen_more_than_once: int
    total: int | None
    missed: int | None
    max_batches: int | None
    complete: bool
    verdict: str
    advice: str
    notes: list[str]
    # This rank's own, for a later report and for a picture. No part of what is printed or written.
    seen: Seen = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """
        Return the report as plain data, ready for `json.dumps`.

        Returns:
            `dict[str, Any]`: The fields by name; `ranks` as a list of dictionaries.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> Accelerator().audit(DataLoader(range(8))).to_dict()["distinct"]
        8
        ```
        """
        own = {name: value for name, value in vars(self).items() if name != "seen"}
        return {**own, "ranks": [asdict(rank) for rank in self.ranks], "notes": list(self.notes)}

    def assert_complete(self) -> None:
        """
        Raise unless every sample was seen once.

        Raises:
            `AssertionError`: With the verdict, the advice and the numbers.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> Accelerator().audit(DataLoader(range(8))).assert_complete()
        ```
        """
        if not self.complete:
            raise AssertionError(" ".join(part for part in (self.verdict, self.advice) if part) + f"\n\n{self}")

    def __str__(self) -> str:
        heading = ("", "batches", "samples", "distinct", "repeats")
        rows = [heading, *((f"rank {each.rank}", *_numbers(each)) for each in self.ranks)]
        sums = [sum(getattr(each, name) for each in self.ranks) for name in ("batches", "samples", "repeats")]
        rows.append(("all ranks", *(f"{number:,}" for number in (*sums[:2], self.distinct, sums[2]))))
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in rows
        ]
        whole = "not known" if self.missed is None else f"{self.missed:,}"
        return "\n".join(
            [
                f"{self.loader}, {self.stage}, on {len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}; samples told "
                f"apart by {self.told_apart_by}",
                "",
                *table,
                "",
                f"seen by several ranks: {self.seen_by_several_ranks:,}; seen twice by one rank: "
                f"{self.seen_twice_by_one_rank:,}; missed: {whole}",
                "",
                self.verdict,
                *([self.advice] if self.advice else []),
                *(f"Note: {note}" for note in self.notes),
            ]
        )


def _numbers(rank: RankReport) -> list[str]:
    return [f"{number:,}" for number in (rank.batches, rank.samples, rank.distinct, rank.repeats)]


class OtherRankFailed(RuntimeError):
    """The audit cannot be finished, because another rank has failed in reading."""


class Seen:
    """
    The samples that this rank has seen, by their hashes: 8 bytes for each reading, whatever the size of a sample.

    Args:
        real (`array`): The hashes of the real samples, in the order in which they were read.
        repeats (`array`): Those of the repeats.
    """

    def __init__(self, real: array, repeats: array):
        self.real = numpy.frombuffer(real, dtype=numpy.uint64)
        self.repeats = numpy.frombuffer(repeats, dtype=numpy.uint64)
        self.distinct, self.times = numpy.unique(self.real, return_counts=True)

    def reads(self) -> _Reads:
        return _Reads(len(self.real), int(self.real.sum(dtype=numpy.uint64)))


def audit(
    loader: Any,
    accelerator: accelerate.Accelerator,
    key: str | int | Callable[[Any], Any] | None = None,
    max_batches: int | None = None,
    before: ShardingReport | None = None,
    on_batch: Callable[[int], Any] | None = None,
) -> ShardingReport:
    """
    Read a loader once on every rank, as it is, and report who has seen which sample.

    Every rank has to call it with its own loader. A prepared loader is judged as prepared, any other as it is: what
    each rank would see without `prepare`. The ranks compare hashes and no samples, once they are through, so ranks
    with different numbers of batches do not wait for each other in between.

    Training is not changed by it. The pass is the one that would come next, and is taken back afterwards: epochs,
    random number generators and the states of loaders and streams that can give theirs are as they were. What a
    dataset changes in itself beyond that, such as its position in an open file, cannot be put back; audit a loader of
    its own then. Do not call it inside the loop over the same loader.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches):
            The loader, prepared or not.
        accelerator ([`~accelerate.Accelerator`]):
            Which says what rank this is.
        key (`str`, `int` or `Callable`, *optional*):
            What to tell samples apart by: the name or index of a field, or a function of a sample. By default it is all
            of their content, so that samples with the same content count as the same one.
        max_batches (`int`, *optional*):
            How many batches of each rank to read at most. For streams that never end.
        before ([`ShardingReport`], *optional*):
            The report of the same data before `prepare`, on all ranks or on none. What was seen then and is not seen
            now counts as missed.
        on_batch (`Callable`, *optional*):
            Called after each batch with the number of samples in it, to show progress.

    Returns:
        [`ShardingReport`]: The same on all ranks.

    Raises:
        `ValueError`: The samples cannot be told apart that way, or the arguments make no sense.
        `RuntimeError`: Reading has failed on another rank, which is named.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader
    >>> from accelerate_presharded import Accelerator, audit

    >>> accelerator = Accelerator()
    >>> loader = accelerator.prepare(DataLoader(range(16), batch_size=4))
    >>> audit(loader, accelerator).verdict
    'Every sample once: 16 samples on 1 rank.'
    ```
    """
    if max_batches is not None and (not isinstance(max_batches, int) or max_batches < 1):
        raise ValueError(f"`max_batches` is the number of batches to read at most, but it is {max_batches!r}.")
    if key is not None and not isinstance(key, (str, int)) and not callable(key):
        raise ValueError(f"`key` is the name or index of a field or a function of a sample, but it is {key!r}.")
    size, index = data_parallel_position(
        accelerator.num_processes,
        accelerator.process_index,
        accelerator._prepare_device_mesh(),
        accelerator.distributed_type,
    )
    # Ranks that share a batch are neighbours, and the first of them stands for all.
    is_first = accelerator.process_index % max(1, accelerator.num_processes // size) == 0
    facts = _Facts(index, is_first, describe(_user_loader(loader)), before is not None)
    if before is not None:
        facts.before_is_complete, facts.before_reads = before.complete, before.seen.reads()
    error, seen = None, Seen(array("Q"), array("Q"))
    try:
        seen = _read_once(loader, accelerator.device, key, max_batches, on_batch or (lambda samples: None), facts)
    except Exception as raised:
        error, facts.failure = raised, f"{type(raised).__name__}: {raised}"
    everyone = _exchange(facts)
    if error is not None:
        raise error
    for rank, other in enumerate(everyone):
        if other.failure:
            raise OtherRankFailed(f"The audit cannot be finished: reading has failed on rank {rank}. {other.failure}")
        if other.has_before != facts.has_before:
            raise ValueError(
                f"`before` was passed on some ranks only, and not the same on rank {rank}. Pass it on all."
            )
    ranks = sorted((each for each in everyone if each.is_first), key=lambda each: each.index)
    tally = _tally(seen, before and before.seen, is_first)
    cut_short = any(each.was_cut_short for each in ranks)
    total = None if cut_short else tally.in_before if facts.has_before else _size_of_data(ranks)
    is_settled = False
    # By the word of a `key`, what has the same one is the same.
    if key is None and tally.more_than_once and not cut_short:
        if facts.has_before:
            is_settled = _as_often_as_before(ranks)
        elif _is_one_dataset(ranks) and total == sum(each.samples for each in ranks):
            is_settled = _as_often_as_in_dataset(loader, ranks, facts)
    return _report(ranks, tally, total, is_settled, key, max_batches if cut_short else None, seen)


class _Reads(NamedTuple):
    """
    How many samples were read, and the sum of their hashes.

    The sum tells whether the same ones were read, each as often, in whatever order and by whichever ranks.
    """

    number: int = 0
    checksum: int = 0

    def __add__(self, other: tuple) -> _Reads:
        return _Reads(self.number + other[0], (self.checksum + other[1]) % (1 << 64))


def _as_often_as_before(ranks: list[_Facts]) -> bool:
    """Tell whether samples that were seen more than once are as many in the data itself, by the pass before."""
    before = [each.before_reads for each in ranks]
    if ranks[0].before_is_complete:
        expected = sum(before, start=_Reads())
    elif len(set(before)) == 1:
        expected = before[0]  # all ranks have read all of it
    else:
        return False
    return sum((each.reads for each in ranks), start=_Reads()) == expected


def _as_often_as_in_dataset(loader: Any, ranks: list[_Facts], own: _Facts) -> bool:
    """Tell the same by a pass over the dataset, by index. All ranks have to come here; they share the work."""
    reads = None
    if own.is_first:
        with untouched(loader), contextlib.suppress(Exception):  # whatever is raised, nothing is settled by it
            reads = _read_dataset(loader, range(own.index, own.dataset_length, len(ranks)))
    everyone = [each for each, is_first in zip(_exchange(reads), _exchange(own.is_first)) if is_first]
    return None not in everyone and sum(everyone, start=_Reads()) == sum(
        (each.reads for each in ranks), start=_Reads()
    )


def _read_dataset(loader: Any, indices: range) -> _Reads:
    cutter, reads = Cutter(_user_loader(loader)), _Reads()
    for index in indices:
        item = loader.dataset[index]
        batch = loader.collate_fn(item if cutter.single else [item])
        for sample in [batch] if cutter.single else cutter.cut(batch):
            reads += (1, hash_of(sample))
    return reads


@dataclass
class _Facts:
    """What a rank tells the others of its pass. Plain data."""

    index: int
    is_first: bool
    loader: str
    has_before: bool
    stage: str = NOT_PREPARED
    batches: int = 0
    samples: int = 0
    repeats: int = 0
    distinct: int = 0
    was_cut_short: bool = False
    failure: str | None = None
    dataset_length: int | None = None
    dataset_probe: tuple[int, ...] | None = None
    cut_by_sampler: bool = False
    cut_twice: str | None = None
    dispatched: bool = False
    uneven_allowed: bool = False
    drop_last: bool = False
    uncut: str | None = None
    varied: bool = False
    reads: _Reads = _Reads()
    before_is_complete: bool = False
    before_reads: _Reads = _Reads()


def _user_loader(loader: Any) -> Any:
    base = read(loader, "base_dataloader")
    return base if is_prepared(loader) and base is not None else loader


def _read_once(
    loader: Any,
    device: torch.device,
    key: Any,
    max_batches: int | None,
    on_batch: Callable[[int], Any],
    facts: _Facts,
) -> Seen:
    cutter = Cutter(_user_loader(loader))
    real, repeats = array("Q"), array("Q")
    shapes = set()
    with untouched(loader):
        facts.dataset_length, facts.dataset_probe = _look_at_dataset(loader)
    with untouched(loader) as trial:
        _look_at_loader(loader, facts)
        reality = _reality(trial)
        batches = iter(trial)
        try:
            for number, batch in enumerate(batches):
                if number == max_batches:
                    facts.was_cut_short = True
                    break
                if device.type != "cpu":
                    batch = send_to_device(batch, torch.device("cpu"))
                samples = cutter.cut(batch)
                num_real = reality(number, len(samples))
                for position, sample in enumerate(samples):
                    (real if position < num_real else repeats).append(hash_of(sample, key))
                shapes.add(_shape_of(samples))
                facts.batches += 1
                on_batch(len(samples))
        finally:
            close = read(batches, "close")
            if close is not None:
                close()
    seen = Seen(real, repeats)
    facts.samples, facts.repeats, facts.distinct = len(real), len(repeats), len(seen.distinct)
    facts.uncut, facts.reads = cutter.uncut, seen.reads()
    facts.varied = len(shapes) > 1
    return seen


def _shape_of(samples: list[Any]) -> tuple | None:
    sample = samples[0] if samples else None
    while isinstance(sample, (dict, list)) and sample:
        sample = next(iter(sample.values() if isinstance(sample, dict) else sample))
    return tuple(sample.shape) if isinstance(sample, torch.Tensor) else None


def _look_at_dataset(loader: Any) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the length of a map-style dataset, and hashes of some items of a dataset unless these are random."""
    dataset = read(loader, "dataset")
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    is_stream = isinstance(dataset, IterableDataset)
    length = None if is_stream else length_of(dataset)
    if not is_stream and not length:
        return length, None

    def probe() -> tuple[int, ...]:
        _seed_alike()
        if is_stream:
            return tuple(hash_of(item) for item in itertools.islice(dataset, 2))
        return tuple(hash_of(dataset[position]) for position in (0, length // 2, length - 1))

    try:
        probes = [probe() for _ in range(2)]
    except Exception:  # a dataset with other keys, for instance
        return length, None
    return length, probes[0] if probes[0] == probes[1] else None


def _seed_alike() -> None:
    """Have a random dataset draw the same on all ranks. Not with `torch.manual_seed`, which reaches out to the GPUs."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)


def _look_at_loader(loader: Any, facts: _Facts) -> None:
    is_ours = isinstance(loader, PreshardedDataLoader)
    facts.stage = BY_US if is_ours else BY_ACCELERATE if is_prepared(loader) else NOT_PREPARED
    facts.dispatched = issubclass(type(loader), DataLoaderDispatcher)
    batch_sampler, dataset = read(loader, "batch_sampler"), read(loader, "dataset")
    facts.drop_last = bool(read(loader, "drop_last") or read(batch_sampler, "drop_last") or read(loader, "_drop_last"))
    even = loader.even_batches if is_ours else read(batch_sampler, "even_batches", True)
    facts.uneven_allowed = even is False
    # What lies below the cut that Accelerate has made.
    below = SimpleNamespace(
        sampler=None,
        batch_sampler=batch_sampler.batch_sampler if isinstance(batch_sampler, BatchSamplerShard) else batch_sampler,
        dataset=dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset,
    )
    cut = is_prepared(loader) and not is_ours and (below.batch_sampler, below.dataset) != (batch_sampler, dataset)
    if not is_prepared(loader) or is_ours:
        facts.cut_by_sampler = sharded_by_sampler(loader)
        return
    facts.cut_by_sampler = True
    sharding = find_sharding(below) if cut or facts.dispatched else None
    if sharding is not None and sharding.num_shards != 1:
        facts.cut_twice = sharding.source


def _reality(loader: Any) -> Callable[[int, int], int]:
    """Return a function that tells of a batch, by its number and size, how many of its samples are no repeats."""
    if isinstance(loader, PreshardedDataLoader):
        return lambda number, size: _of_count(loader.samples_in_step, size)
    if issubclass(type(loader), DataLoaderDispatcher):
        return lambda number, size: _of_dispatched(loader, size)
    if not is_prepared(loader):
        known = count_real(loader)
        return _counting_down(known) if known is not None else (lambda number, size: size)
    shard, num_samples, batch_size = _shard_of(loader)
    if num_samples is None or not batch_size:
        return lambda number, size: size

    def of_shard(number: int, size: int) -> int:
        # Accelerate deals out the samples batch by batch, and begins anew behind the last.
        position = (number * shard.num_processes + shard.process_index) * batch_size
        return min(max(num_samples - position, 0), size)

    return of_shard


def _counting_down(left: int) -> Callable[[int, int], int]:
    def count(number: int, size: int) -> int:
        nonlocal left
        real = min(max(left, 0), size)
        left -= size
        return real

    return count


def _of_count(count: Any, size: int) -> int:
    if count.size == size or (count.size is None and size == 1):
        return count.real
    return size if count.real else 0


def _of_dispatched(loader: DataLoaderDispatcher, size: int) -> int:
    if not loader.end_of_dataloader:
        return size
    return min(max(loader.remainder - loader.state.process_index * size, 0), size)


def _shard_of(loader: Any) -> tuple[Any, int | None, int | None]:
    """Find what cuts a loader of Accelerate's, how many samples it cuts, and how many a rank gets of them at a time."""
    shard = read(loader, "batch_sampler")
    if isinstance(shard, BatchSamplerShard):
        if not shard.even_batches:
            return shard, None, None
        num_samples = length_of(read(shard.batch_sampler, "sampler"))
    else:
        shard = read(loader, "dataset")
        if not isinstance(shard, IterableDatasetShard):
            return shard, None, None
        num_samples = length_of(shard.dataset)
    batch_size = shard.batch_size
    return shard, num_samples, batch_size // shard.num_processes if shard.split_batches and batch_size else batch_size


class _Tally(NamedTuple):
    """What all ranks' hashes together say."""

    distinct: int
    by_several: int
    by_all: int
    twice_by_one: int
    more_than_once: int
    in_before: int  # how many were seen before `prepare`
    lost: int  # how many of them are not seen now
    before_alike: bool  # whether all ranks had seen the same then


def _tally(seen: Seen, before: Seen | None, is_first: bool) -> _Tally:
    """
    Compare the hashes of all ranks, a part of all possible values at a time.

    What a rank holds of others at any time is some 3 MB for each of them.
    """
    empty = (numpy.empty(0, numpy.uint64), numpy.empty(0, numpy.int64))
    distinct, times = (seen.distinct, seen.times) if is_first else empty
    earlier = before.distinct if before is not None and is_first else empty[0]
    largest = max(_exchange(max(len(distinct), len(earlier))))
    num_parts = max(1, math.ceil(largest / _CHUNK))
    counts = [0] * 7
    before_alike = True
    bounds = [numpy.uint64((part << 64) // num_parts) for part in range(num_parts)]
    for own, own_earlier in zip(_parts(distinct, bounds), _parts(earlier, bounds)):
        gathered = [each for each in _exchange((is_first, distinct[own], times[own], earlier[own_earlier])) if each[0]]
        all_hashes = numpy.concatenate([each[1] for each in gathered])
        union, ranks = numpy.unique(all_hashes, return_counts=True)
        repeated = numpy.concatenate([each[1][each[2] > 1] for each in gathered])
        twice, several = numpy.unique(repeated), union[ranks > 1]
        all_earlier, ranks_earlier = numpy.unique(
            numpy.concatenate([each[3] for each in gathered]), return_counts=True
        )
        before_alike = before_alike and bool((ranks_earlier == len(gathered)).all())
        for number, count in enumerate(
            (
                len(union),
                len(several),
                int((ranks == len(gathered)).sum()),
                len(twice),
                len(numpy.union1d(twice, several)),
                len(all_earlier),
                len(numpy.setdiff1d(all_earlier, union, assume_unique=True)),
            )
        ):
            counts[number] += count
    return _Tally(*counts, before_alike)


def _parts(hashes: numpy.ndarray, bounds: list[numpy.uint64]) -> Iterator[slice]:
    cuts = [*numpy.searchsorted(hashes, numpy.array(bounds, numpy.uint64)), len(hashes)]
    return (slice(start, end) for start, end in itertools.pairwise(cuts))


def _exchange(own: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _report(
    ranks: list[_Facts],
    tally: _Tally,
    total: int | None,
    is_settled: bool,
    key: Any,
    max_batches: int | None,
    seen: Seen,
) -> ShardingReport:
    num_samples = sum(each.samples for each in ranks)
    if total is None:
        missed = None
    elif ranks[0].has_before:
        missed = tally.lost
    else:
        missed = 0 if is_settled else max(0, total - tally.distinct)
    # As many readings as samples: those with the same content may be different ones, and then none is missed.
    is_ambiguous = bool(missed) and not ranks[0].has_before and num_samples == total
    complete, verdict, advice = _judge(ranks, tally, total, missed, is_ambiguous, is_settled)
    if max_batches is not None:
        verdict = f"{verdict} Only the first {max_batches} batches of each rank were judged."
    return ShardingReport(
        loader=ranks[0].loader,
        stage=ranks[0].stage,
        told_apart_by="content" if key is None else f"the key {key if callable(key) else repr(key)}",
        ranks=[RankReport(each.index, each.batches, each.samples, each.distinct, each.repeats) for each in ranks],
        distinct=tally.distinct,
        seen_by_several_ranks=tally.by_several,
        seen_twice_by_one_rank=tally.twice_by_one,
        seen_more_than_once=tally.more_than_once,
        total=total,
        missed=None if is_ambiguous else missed,
        max_batches=max_batches,
        complete=complete,
        verdict=verdict,
        advice=advice,
        notes=list(_notes(ranks, tally, total, is_settled, key)),
        seen=seen,
    )


def _size_of_data(ranks: list[_Facts]) -> int | None:
    lengths = [each.dataset_length for each in ranks]
    if None in lengths:
        return None
    if _is_one_dataset(ranks):
        return lengths[0]
    return sum(lengths) if _hold_different_data(ranks) or len(set(lengths)) > 1 else None


def _is_one_dataset(ranks: list[_Facts]) -> bool:
    probes = {each.dataset_probe for each in ranks}
    return len({each.dataset_length for each in ranks}) == 1 and (
        len(probes) == 1 if None not in probes else all(each.cut_by_sampler for each in ranks)
    )


def _judge(
    ranks: list[_Facts], tally: _Tally, total: int | None, missed: int | None, is_ambiguous: bool, is_settled: bool
) -> tuple[bool, str, str]:
    """Return whether every sample was seen once, a sentence about it, and what to change."""
    first, size = ranks[0], len(ranks)
    if not tally.distinct:
        return False, "No rank has seen any sample.", "See whether the dataset is empty on every rank."
    steps = _steps(ranks) if first.stage != NOT_PREPARED else None
    twice = next((each.cut_twice for each in ranks if each.cut_twice), None)
    if size > 1 and tally.by_all == tally.distinct and not is_settled:
        return False, f"All ranks read the same data: {_count(tally.distinct, 'sample')} each.", _advice_same(first)
    if first.has_before and tally.lost == tally.in_before:
        return (
            False,
            "No sample from before `prepare` is seen again.",
            "The content of the samples seems to be random, or made anew with each batch. Pass `key`, the name of a "
            "field that stays the same.",
        )
    if is_ambiguous:
        return (
            False,
            f"{_number(total)} samples are read, as many as there are, but only {_number(tally.distinct)} of them differ.",
            "Either the data holds identical samples, or some are read twice and others never. Pass `key`, the name of "
            "a field that is different for each sample, to know which.",
        )
    # Nobody has counted what there is, but what is different on each rank cannot all be read.
    unread = missed is None and first.stage == BY_ACCELERATE and size > 1 and (twice or _hold_different_data(ranks))
    if missed or unread:
        covers = (
            ""
            if not missed
            else f"each epoch covers {_percent(total - missed, total)} of the data "
            + (f"({_number(total - missed)} of {_count(total, 'sample')})")
        )
        return False, *_missed(ranks, tally, covers, twice)
    if tally.more_than_once and not is_settled:
        who = "by more than one rank" if tally.by_several else "twice by the same rank"
        return (
            False,
            f"{_count(tally.more_than_once, 'sample')} of {_number(tally.distinct)} {_are(tally.more_than_once)} seen {who}.",
            _advice_overlap(first),
        )
    once = f"Every sample once: {_count(sum(each.samples for each in ranks), 'sample')} on {_count(size, 'rank')}"
    if is_settled:
        once += f", {_number(tally.distinct)} of them different"
    if steps is None:
        return True, f"{once}.", ""
    if all(each.uneven_allowed for each in ranks):
        return True, f"{once}. {steps}: DDP would hang without `join_uneven_inputs`.", ""
    return (
        False,
        f"{steps}: DDP would hang. Otherwise every sample is seen once.",
        "Prepare the loader with the `Accelerator` of accelerate_presharded and `even_batches=True`, or train inside "
        "`accelerator.join_uneven_inputs`.",
    )


def _missed(ranks: list[_Facts], tally: _Tally, covers: str, twice: str | None) -> tuple[str, str]:
    first, size = ranks[0], len(ranks)
    own_data = _hold_different_data(ranks) or (first.has_before and not tally.before_alike)
    if first.stage == BY_ACCELERATE and size > 1 and (twice or own_data):
        flag = "finds this out by itself" if twice else "needs `already_sharded=True` in `prepare` to know this"
        advice = (
            f"The loader was already sharded{f' ({twice})' if twice else ''}. Use the `Accelerator` of "
            f"accelerate_presharded, which leaves such loaders alone; it {flag}."
        )
        if first.dispatched:
            return f"Only rank 0's data is read: {covers or 'that of the others is different'}.", advice
        return f"Sharded twice: {covers or f'each rank sees 1/{size} of its part'}.", advice
    seen_again = tally.more_than_once
    verdict = covers[0].upper() + covers[1:]
    if seen_again:
        verdict += f", and {_count(seen_again, 'sample')} {_are(seen_again)} seen more than once"
        return f"{verdict}.", _advice_overlap(first)
    if any(each.drop_last for each in ranks):
        return f"{verdict}.", "`drop_last=True` leaves samples out at the end. Without it none are."
    return f"{verdict}.", (
        "See which samples the sampler or the split leaves out: the parts of all ranks should add up to the whole."
    )


def _hold_different_data(ranks: list[_Facts]) -> bool:
    probes = {each.dataset_probe for each in ranks}
    return None not in probes and len(probes) > 1


def _steps(ranks: list[_Facts]) -> str | None:
    longest = max(ranks, key=lambda each: each.batches)
    shortest = min(ranks, key=lambda each: each.batches)
    more = longest.batches - shortest.batches
    if not more:
        return None
    return f"Rank {longest.index} makes {_count(more, 'more step')} than rank {shortest.index}"


def _advice_same(first: _Facts) -> str:
    if first.stage == NOT_PREPARED:
        return "That is right for an ordinary loader: `prepare` gives each rank its part."
    if first.stage == BY_US:
        return (
            "The loader counts as already sharded, but it is not. Leave out `already_sharded=True`, or have each rank "
            "build it with a part of its own."
        )
    return "Nothing gives each rank a part of its own. Prepare the loader on every rank."


def _advice_overlap(first: _Facts) -> str:
    advice = "Give every rank a part of its own: with the same length, seed and epoch on all ranks, and its own index."
    if first.stage == BY_ACCELERATE:
        advice = "See whether the loader draws the same samples in the same order on every rank."
    return f"{advice} If the data holds identical samples, pass `key` to tell them apart."


def _notes(ranks: list[_Facts], tally: _Tally, total: int | None, is_settled: bool, key: Any) -> Iterator[str]:
    if total is None and not any(each.was_cut_short for each in ranks):
        yield "how many samples there are is not known, so what no rank has read does not show here."
    without = [str(each.index) for each in ranks if not each.samples]
    if without and len(without) < len(ranks):
        yield f"no real sample on rank{'s' * (len(without) > 1)} {', '.join(without)}."
    uncut = next((each.uncut for each in ranks if each.uncut), None)
    if uncut:
        yield f"a batch of class {uncut} cannot be cut into samples, so each batch counts as one."
    if key is None and any(each.varied for each in ranks):
        yield (
            "samples have different shapes in different batches. Where they are padded to the longest of their batch, "
            "the same sample looks different elsewhere: pass `key` then."
        )
    if is_settled:
        yield "the data holds samples that look alike, each as often as it was read."
    elif key is None and tally.more_than_once:
        yield "samples with the same content count as one and the same. `key` tells them apart."


def _number(number: int | None) -> str:
    return f"{number:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _percent(part: int, whole: int) -> str:
    text = f"{100 * part / whole:.3g}"
    return f"{'more than 99.9' if text == '100' else text} %"
