# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Streams on several ranks: how many samples are read for each one trained on, and what that means for an epoch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import accelerate
from torch.utils.data import DataLoader, IterableDataset

from accelerate_presharded import Accelerator

from .harness import Figure, Row, Times, alternate, medians, ratio, slowest
from .ranks import launch


WAYS = ("presharded", "dispatch off", "dispatch on")


class Records(IterableDataset):
    """Every step-th record from the first on, each of which is decoded when it is read, and counted."""

    def __init__(self, length: int, first: int, step: int, decode: Callable[[int], int]):
        self.length, self.first, self.step, self.decode = length, first, step, decode
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.first, self.length, self.step):
            self.num_read += 1
            yield self.decode(index)


def same(index: int) -> int:
    """Decode nothing."""
    return index


class Decoder:
    """Decompresses a block of about so many bytes for each sample: real work on this rank's own core."""

    def __init__(self, size: int):
        letters = Random(0)
        self.block = zlib.compress(bytes(letters.choice(b"abcdefgh") for _ in range(size)))

    def __call__(self, index: int) -> int:
        return index if zlib.decompress(self.block) else -1


def prepared(way: str, length: int, batch_size: int, decode: Callable[[int], int]) -> tuple[Records, Any]:
    """Make a stream, and a loader over it that was prepared in one of three ways."""
    if way == "presharded":
        accelerator = Accelerator(cpu=True)
        stream = Records(length, accelerator.process_index, accelerator.num_processes, decode)
        return stream, accelerator.prepare_data_loader(DataLoader(stream, batch_size=batch_size), already_sharded=True)
    config = accelerate.DataLoaderConfiguration(dispatch_batches=way == "dispatch on")
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    stream = Records(length, 0, 1, decode)
    return stream, accelerator.prepare_data_loader(DataLoader(stream, batch_size=batch_size))


def count(length: int) -> dict[str, tuple[int, int]]:
    """Count the samples that this rank reads and trains on in an epoch."""
    counts = {}
    for way in WAYS:
        stream, loader = prepared(way, length, 4, same)
        trained = sum(len(batch) for batch in loader)
        counts[way] = stream.num_read, trained
    return counts


def time_epochs(length: int, size: int, rounds: int) -> Times:
    """Time epochs on this rank."""
    decode = Decoder(size)
    made = {way: prepared(way, length, 8, decode)[1] for way in WAYS}

    def epoch(loader: Any) -> None:
        for _ in loader:
            pass

    return alternate({way: lambda loader=loader: epoch(loader) for way, loader in made.items()}, rounds, warmup=1)


def rows(quick: bool) -> list[Row]:
    """Count on 2, 4 and 8 ranks, and time on two."""
    found = []
    for world_size in (2, 4, 8):
        per_rank = 8 if quick else 64
        counts = launch(world_size, count, per_rank * world_size)

        def each(way: str, counts: list = counts) -> float:
            return sum(rank[way][0] for rank in counts) / sum(rank[way][1] for rank in counts)

        def busiest(way: str, counts: list = counts) -> float:
            return max(rank[way][0] / rank[way][1] for rank in counts)

        note = "; ".join(f"{way} {each(way):g}, on the busiest rank {busiest(way):g}" for way in WAYS)
        figure = Figure.of([max(each("presharded"), busiest("presharded"))])
        what = f"stream, samples read for each one trained on, {world_size} ranks"
        found.append(Row(what, "counted", figure, 1, "exactly", "", note))

    length, size, rounds = (16, 2_000, 2) if quick else (256, 200_000, 15)
    times = slowest(launch(2, time_epochs, length, size, rounds))
    note = f"an epoch: {medians(times)}"
    for way in WAYS[1:]:
        what = "stream, decode-bound epoch, 2 ranks, how many times faster"
        found.append(Row(what, f"Accelerate, {way}", ratio(times, way, "presharded"), 1.8, "at least", note=note))
    return found
