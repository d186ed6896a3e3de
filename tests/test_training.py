# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Training on already sharded data: what a single process would do with the batches of all ranks together."""

import itertools

import accelerate
import pytest
import torch
from parameterized import parameterized
from ranks import run
from shared import Logged, Stream
from torch.utils.data import DataLoader, DistributedSampler

from accelerate_presharded import Accelerator


RATE = 0.05


def model_and_optimizer() -> tuple:
    """The same on every rank and in every process."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def samples(number: int, seed: int) -> torch.Tensor:
    """Three inputs and a target in each row."""
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[:, :3]), batch[:, 3:])


def gradients(model) -> list[float]:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()


def weights(model) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def make_dataset(kind: str, rows: torch.Tensor):
    return rows if kind == "map-style" else Stream(list(rows))


def train(kind: str, counts: list[int], size: int, epochs: int, accumulation: int) -> dict:
    """DDP on a shard of `counts[rank]` batches of this rank's own."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    rank = accelerator.process_index
    dataset = make_dataset(kind, samples(size * counts[rank], seed=rank))
    model, optimizer = model_and_optimizer()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=size), already_sharded=True
    )
    steps = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                found = gradients(model) if accelerator.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad()
            steps.append((loss.item(), accelerator.sync_gradients, found))
    return {
        "losses": [loss for loss, _, _ in steps],
        "sync": [sync for _, sync, _ in steps],
        "gradients": [found for _, _, found in steps],
        "weights": weights(model),
    }


def alone(counts: list[int], size: int, epochs: int, accumulation: int = 1) -> dict:
    """One process that takes the batches of all ranks at once, where those that have ended repeat theirs."""
    batches = [samples(size * count, seed=rank).split(size) for rank, count in enumerate(counts)]
    model, optimizer = model_and_optimizer()
    result = {"losses": [], "sync": [], "gradients": []}
    longest = max(counts)
    for _, step in itertools.product(range(epochs), range(longest)):
        losses = [loss_of(model, of_rank[step % len(of_rank)]) for of_rank in batches]
        (sum(losses) / len(losses) / accumulation).backward()
        sync = (step + 1) % accumulation == 0 or step + 1 == longest
        result["losses"].append([loss.item() for loss in losses])
        result["sync"].append(sync)
        result["gradients"].append(gradients(model) if sync else None)
        if sync:
            optimizer.step()
            optimizer.zero_grad()
    result["weights"] = weights(model)
    return result


def assert_as_alone(per_rank: list[dict], expected: dict) -> None:
    for rank, result in enumerate(per_rank):
        assert result["sync"] == expected["sync"]
        assert result["losses"] == pytest.approx([losses[rank] for losses in expected["losses"]])
        assert result["weights"] == pytest.approx(expected["weights"])
        for found, own in zip(expected["gradients"], result["gradients"]):
            assert own == (None if found is None else pytest.approx(found))
        # Bit for bit the same on every rank.
        assert result["gradients"] == per_rank[0]["gradients"]
        assert result["weights"] == per_rank[0]["weights"]


@parameterized.expand(itertools.product(([4, 4], [3, 3, 3], [2, 2, 2, 2]), ("map-style", "stream")))
def test_even_shards_are_the_global_batch(counts, kind):
    per_rank = run(len(counts), train, kind, counts, 2, 3, 1)
    assert_as_alone(per_rank, alone(counts, 2, 3))
    # The mean over ranks is the loss of the batch that they have together.
    model, optimizer = model_and_optimizer()
    batches = [samples(2 * count, seed=rank).split(2) for rank, count in enumerate(counts)]
    for epoch, step in itertools.product(range(3), range(counts[0])):
        loss = loss_of(model, torch.cat([of_rank[step] for of_rank in batches]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        of_ranks = [result["losses"][epoch * counts[0] + step] for result in per_rank]
        assert sum(of_ranks) / len(of_ranks) == pytest.approx(loss.item())


@parameterized.expand(itertools.product(([2, 3], [5, 1], [1, 4, 2], [3, 2, 2, 5]), ("map-style", "stream")))
def test_gradients_agree_on_uneven_shards(counts, kind):
    expected = alone(counts, 2, 2)
    assert_as_alone(run(len(counts), train, kind, counts, 2, 2, 1, timeout=30.0), expected)
    assert len(expected["losses"]) == 2 * max(counts)


@parameterized.expand(itertools.product(([3, 5], [5, 3], [4, 1], [3, 5, 2], [3, 3, 3, 6]), ("map-style", "stream")))
def test_case_17_gradient_accumulation(counts, kind):
    per_rank = run(len(counts), train, kind, counts, 2, 2, 2, timeout=30.0)
    steps = max(counts)
    # Every second step, and the last of an epoch whether it is one or not.
    sync = [step % 2 == 1 or step == steps - 1 for step in range(steps)]
    assert [result["sync"] for result in per_rank] == [2 * sync] * len(counts)
    assert_as_alone(per_rank, alone(counts, 2, 2, accumulation=2))


def distributed_sampler(length: int) -> list:
    accelerator = Accelerator(cpu=True)
    rows = samples(length, seed=0)
    sampler = DistributedSampler(rows, accelerator.num_processes, accelerator.process_index, shuffle=False)
    model, optimizer = model_and_optimizer()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, sampler=sampler))
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@parameterized.expand([(2,), (3,), (4,)])
def test_detected_shards_are_the_global_batch(world_size):
    length = 8 * world_size
    model, optimizer = model_and_optimizer()
    for batch in samples(length, seed=0).split(2 * world_size):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    for found in run(world_size, distributed_sampler, length):
        assert found == pytest.approx(weights(model))


# 28


STEPS = 8


def linear(optimizer, steps: int):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)


def rates(order: str, step_with_optimizer: bool) -> dict:
    """The learning rate behind each step of a loader that is per rank, with this package and with Accelerate."""
    results = {}
    for name, cls in (("ours", Accelerator), ("plain", accelerate.Accelerator)):
        accelerator = cls(cpu=True, step_scheduler_with_optimizer=step_with_optimizer)
        rank, world_size = accelerator.process_index, accelerator.num_processes
        rows = samples(STEPS * world_size, seed=0)
        loader = DataLoader(rows, sampler=DistributedSampler(rows, world_size, rank, shuffle=False))
        own = len(loader)
        model, optimizer = model_and_optimizer()
        scheduler = linear(optimizer, own)
        with Logged() as lines:
            if name == "plain":
                # It cannot have the loader: it would cut it again.
                model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            elif order == "together":
                model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            elif order == "scheduler first":
                scheduler, loader, optimizer, model = accelerator.prepare(scheduler, loader, optimizer, model)
            elif order == "loader before":
                loader = accelerator.prepare(loader)
                model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            elif order == "loader after":
                model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
                loader = accelerator.prepare(loader)
            else:
                assert order == "two schedulers"
                other = linear(optimizer, own)
                model, optimizer, loader, scheduler, _ = accelerator.prepare(
                    model, optimizer, loader, scheduler, other
                )
        found = []
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(optimizer.param_groups[0]["lr"])
        results[name] = found
        results[f"{name} length"] = own
        results[f"{name} said"] = [text for level, text in lines if level == "WARNING" and "schedul" in text]
    return results


@parameterized.expand(itertools.product((2, 3, 4), ("together", "scheduler first", "loader before", "loader after")))
def test_case_28_a_scheduler_over_a_loader_per_rank(world_size, order):
    per_rank = run(world_size, rates, order, True)
    # Accelerate steps it once for each rank in every step, so it ends after a part of the epoch.
    expected = [RATE * max(0.0, 1 - (step + 1) * world_size / STEPS) for step in range(STEPS)]
    for result in per_rank:
        assert result["ours length"] == STEPS
        assert result["ours"] == pytest.approx(expected, abs=1e-12)
        assert result["plain"] == pytest.approx(expected, abs=1e-12)
        assert result["plain said"] == []
    said = sum((result["ours said"] for result in per_rank), [])
    assert len(said) == 1, said
    assert "step_scheduler_with_optimizer=False" in said[0]
    assert f"{world_size} steps" in said[0]


def test_case_28_one_warning_for_two_schedulers():
    said = sum((result["ours said"] for result in run(2, rates, "two schedulers", True)), [])
    assert len(said) == 1, said


@parameterized.expand([(2, "together"), (3, "together"), (2, "two schedulers"), (2, "loader after")])
def test_case_28_as_advised(world_size, order):
    for result in run(world_size, rates, order, False):
        assert result["ours said"] == []
        if order == "together":
            assert result["ours"] == pytest.approx([RATE * (1 - (step + 1) / STEPS) for step in range(STEPS)])


def ordinary_and_scheduler() -> list:
    accelerator = Accelerator(cpu=True)
    model, optimizer = model_and_optimizer()
    with Logged() as lines:
        accelerator.prepare(model, optimizer, DataLoader(samples(8, seed=0)), linear(optimizer, 8))
    return [text for level, text in lines if level == "WARNING"]


def test_case_28_nothing_is_said_of_an_ordinary_loader():
    assert run(2, ordinary_and_scheduler) == [[], []]


def test_case_28_nothing_is_said_on_one_process():
    (result,) = run(1, rates, "together", True)
    assert result["ours said"] == []
    assert result["ours"] == pytest.approx([RATE * (1 - (step + 1) / STEPS) for step in range(STEPS)])
