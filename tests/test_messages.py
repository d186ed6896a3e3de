# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Calls of `gather_for_metrics` one after the other: the data goes along with the header where it fits, and is the same."""

import inspect
import math
import random

import torch
import torch.distributed as dist
from parameterized import parameterized
from ranks import run
from shared import raised

from accelerate_presharded import Accelerator
from accelerate_presharded.messages import exchange
from accelerate_presharded.metrics import Count, gather_real


DTYPES = [torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.complex64, torch.float64]


def values_of(rank: int, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """Values that differ between ranks and entries."""
    numbers = torch.arange(math.prod(shape)).reshape(shape) + 50 * rank
    return (numbers % 2 if dtype is torch.bool else numbers % 200).to(dtype)


def collectives() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


# Calls are lists of `(dtype, [the shape on rank 0, on rank 1, ...])`, one for each tensor.


def gathered(calls: list, settings: dict | None = None) -> list[tuple]:
    """What each call gathers, and how many collectives it takes. No leaf has the length of the batch."""
    rank = Accelerator(cpu=True).process_index
    vars(inspect.getmodule(exchange)).update(settings or {})
    results = []
    for call in calls:
        tensors = [values_of(rank, shapes[rank], dtype) for dtype, shapes in call]
        before = collectives()
        found = gather_real(tensors, Count(999, 999))
        results.append(([(each.dtype, each.tolist()) for each in found], collectives() - before))
    return results


def expected(calls: list) -> list[list[tuple]]:
    """The same, from one process: all ranks' tensors behind each other."""
    return [
        [
            (dtype, torch.cat([torch.atleast_1d(values_of(*each, dtype)) for each in enumerate(shapes)]).tolist())
            for dtype, shapes in call
        ]
        for call in calls
    ]


def random_calls(seed: int, world_size: int) -> list:
    """Calls that come again and again, as in a loop, with lengths that change from time to time."""
    choose = random.Random(seed)

    def call() -> list:
        tensors = []
        for _ in range(choose.randint(1, 7)):
            behind = [choose.randint(0, 3) for _ in range(choose.randint(0, 3))]
            is_single = choose.random() < 0.1
            shapes = [() if is_single else (choose.randint(0, 40), *behind) for _ in range(world_size)]
            tensors.append((choose.choice(DTYPES), shapes))
        return tensors

    body = [call() for _ in range(choose.randint(1, 3))]
    return [each if choose.random() < 0.8 else call() for _ in range(4) for each in body]


@parameterized.expand([(2, 0), (2, 1), (3, 2), (3, 3), (4, 4)])
def test_every_call_gathers_what_the_ranks_have(world_size, seed):
    calls = [call for part in range(8) for call in random_calls(10 * part + seed, world_size)]
    for results in run(world_size, gathered, calls):
        assert [found for found, _ in results] == expected(calls)
        # Both ways were gone.
        numbers = [number for _, number in results]
        assert numbers.count(1) > len(calls) / 4 and max(numbers) > 1


LOSS = [(torch.float32, [(), ()])]
PREDICTIONS = [(torch.float32, [(8, 10), (8, 10)]), (torch.int64, [(8,), (8,)]), (torch.bool, [(8,), (8,)])]
SHORT = [(torch.float32, [(8, 10), (3, 10)]), (torch.int64, [(8,), (3,)]), (torch.bool, [(8,), (3,)])]
# More dimensions than a header holds.
MANY = [(torch.uint8, [(2, 1, 2), (3, 1, 2)])] * 7


@parameterized.expand(
    [
        # One message for the header and one for each tensor, as long as nothing is known.
        ("the same again", [PREDICTIONS] * 3, [4, 1, 1]),
        ("a short end", [PREDICTIONS, PREDICTIONS, SHORT], [4, 1, 1]),
        ("two calls a step", [PREDICTIONS, LOSS] * 4, [4, 1, 4, 1, 1, 1, 1, 1]),
        ("a small one first", [LOSS, PREDICTIONS] * 3, [2, 4, 1, 1, 1, 1]),
        ("many dimensions", [MANY] * 2, [9, 1]),
    ]
)
def test_one_collective_a_call_where_calls_repeat_themselves(_, calls, numbers):
    for results in run(2, gathered, calls):
        assert [found for found, _ in results] == expected(calls)
        assert [number for _, number in results] == numbers


def test_much_data_goes_by_itself():
    # 400 bytes a rank are more than the 700 that both may send along. The loss is not.
    for results in run(2, gathered, [PREDICTIONS, PREDICTIONS, LOSS, LOSS], {"_MOST_BYTES": 700}):
        assert [found for found, _ in results] == expected([PREDICTIONS, PREDICTIONS, LOSS, LOSS])
        assert [number for _, number in results] == [4, 4, 2, 1]


class Named(torch.Tensor):
    """A tensor class of the user's."""


def gathered_as(kinds: list[type]) -> list:
    rank = Accelerator(cpu=True).process_index
    calls = [values_of(rank, (4,), torch.float32).as_subclass(kinds[rank]) for _ in range(3)]
    return [gather_real(each, Count(4, 4)).tolist() for each in calls]


@parameterized.expand([("on all ranks", [Named, Named]), ("on one rank", [Named, torch.Tensor])])
def test_classes_of_tensors_are_left_to_accelerate(_, kinds):
    assert run(2, gathered_as, kinds) == [[[0.0, 1.0, 2.0, 3.0, 50.0, 51.0, 52.0, 53.0]] * 3] * 2


def goes_on_behind_an_error() -> list:
    rank = Accelerator(cpu=True).process_index
    fine = values_of(rank, (3,), torch.int64)
    structures = [fine, fine, fine if rank else [fine], fine, fine[:, None].expand(3, 2 + rank), fine, fine]
    outcomes: list = []
    for each in structures:
        error = raised(lambda each=each: outcomes.append(gather_real(each, Count(3, 3)).tolist()))
        if error is not None:
            outcomes.append(error)
    return outcomes


def test_an_error_is_the_same_on_all_ranks_and_the_next_call_goes_on():
    fine = [0, 1, 2, 50, 51, 52]
    first, second = run(2, goes_on_behind_an_error)
    assert first[:2] == [fine, fine] and first[3] == fine and first[5:] == [fine, fine]
    assert second[:2] == [fine, fine] and second[3] == fine and second[5:] == [fine, fine]
    for of_rank in (first, second):
        kind, text = of_rank[2]
        assert kind == "ValueError" and text.startswith("Rank 1 gathers another structure than rank 0.")
    assert first[4] == second[4] and "a tensor of shape (3, 3) and rank 0 one of shape (3, 2)" in first[4][1]
