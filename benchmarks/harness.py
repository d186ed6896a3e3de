# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Measure several things alternately in one process, and compare what was measured in the same round."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


Times = dict[str, list[float]]


@dataclass(frozen=True)
class Figure:
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        """Sum up values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


@dataclass(frozen=True)
class Row:
    """
    One line of the results.

    Args:
        what (`str`): What was measured.
        against (`str`): What it is compared with.
        figure ([`Figure`]): The result, of the pairs of each round.
        target (`float`, *optional*): What it should be; `None` for a line that is there for comparison.
        bound (`str`, *optional*, defaults to `"at most"`): How, `"at most"`, `"at least"` or `"exactly"`.
        unit (`str`, *optional*, defaults to `"x"`): Of the result and the target; `"x"` is a ratio, `""` a count.
        note (`str`, *optional*): What else was found in the same run.
    """

    what: str
    against: str
    figure: Figure
    target: float | None = None
    bound: str = "at most"
    unit: str = "x"
    note: str = ""

    @property
    def kept(self) -> bool | None:
        """Whether the target is kept, as the table shows the numbers; `None` without a target."""
        if self.target is None:
            return None
        value = round(self.figure.median, 2) if self.unit == "x" else self.figure.median
        return {"at most": value <= self.target, "at least": value >= self.target, "exactly": value == self.target}[
            self.bound
        ]


def alternate(variants: dict[str, Callable[[], object]], rounds: int, warmup: int = 2) -> Times:
    """
    Time each variant once in every round, in an order that changes from round to round. Where there are ranks, all of
    them begin each measurement together.

    Args:
        variants (`dict[str, Callable]`): What to call, by name.
        rounds (`int`): How many rounds to measure.
        warmup (`int`, *optional*, defaults to 2): How many rounds to leave out before.

    Returns:
        `dict[str, list[float]]`: The seconds of each variant, by round.
    """
    names = list(variants)
    order = random.Random(0)  # the same on all ranks
    times: Times = {name: [] for name in names}
    gc.collect()
    gc.freeze()
    for number in range(warmup + rounds):
        order.shuffle(names)
        for name in names:
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            variants[name]()
            end = time.perf_counter()
            if number >= warmup:
                times[name].append(end - begin)
    return times


def slowest(times_of_ranks: list[Times]) -> Times:
    """Take the slowest rank of each measurement: the others wait for it sooner or later."""
    return {
        name: [max(values) for values in zip(*(times[name] for times in times_of_ranks))] for name in times_of_ranks[0]
    }


def ratio(times: Times, of: str, to: str) -> Figure:
    """Divide the times of one variant by those of another, round by round."""
    return Figure.of([mine / other for mine, other in zip(times[of], times[to])])


def medians(times: Times, per: int = 1) -> str:
    """Name the median time of each variant, `per` of which one measurement holds, in one line."""
    return ", ".join(f"{name} {duration(statistics.median(values) / per)}" for name, values in times.items())


def duration(seconds: float) -> str:
    """Write a duration with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def work(seconds: float) -> Callable[[], None]:
    """
    Return a computation that takes about so long on an idle machine. The same number of operations on every rank.

    It is a fixed amount of real work, not a wait until a time: whatever else takes the processor makes it longer.
    """
    matrix = torch.eye(48)
    per_call = []
    for _ in range(200):
        begin = time.perf_counter()
        matrix @ matrix
        per_call.append(time.perf_counter() - begin)
    calls = torch.tensor(max(1, round(seconds / statistics.median(per_call))) if seconds else 0)
    if dist.is_initialized():
        dist.broadcast(calls, 0)
    number = int(calls)

    def compute() -> None:
        for _ in range(number):
            matrix @ matrix

    return compute
