# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Wherever a run is stopped, and however often, new processes go on with what an uninterrupted run would have seen."""

import dataclasses
import itertools
import json
import os
import signal
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from ranks import Failure, run
from shared import Remembering, RememberingLive, Stream, in_blocks
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from accelerate_presharded import Accelerator


EXAMPLES = int(os.environ.get("PRESHARDED_EXAMPLES", 500)) // 60
KINDS = (
    "distributed",
    "shuffled",
    "generator",
    "stream",
    "remembering",
    "remembering live",
    "stateful",
    "stateful live",
    "stateful list",
)
EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class Example:
    """A loader, and at which steps of the whole run its processes are stopped."""

    kind: str
    lengths: tuple[int, ...]  # of each rank's own items; for a sampler the first is that of all of them
    batch_size: int
    drop_last: bool
    stops: tuple[int, ...]
    killed: bool
    patience: int | None  # see `in_blocks`

    @property
    def steps(self) -> int:
        """How many steps all ranks make in an epoch."""
        lengths = self.lengths
        if self.kind == "distributed":
            lengths = [-(-lengths[0] // len(lengths))]  # the sampler pads
        if self.drop_last:
            return min(length // self.batch_size for length in lengths)
        return max(-(-length // self.batch_size) for length in lengths)

    def items(self, rank: int) -> list[int]:
        return [100 * rank + item for item in range(self.lengths[rank])]

    def everything(self) -> list[int]:
        if self.kind == "distributed":
            return list(range(self.lengths[0]))
        return sorted(item for rank in range(len(self.lengths)) for item in self.items(rank))


@st.composite
def examples(draw, world_size: int) -> Example:
    batch_size = draw(st.integers(1, 4))
    drop_last = draw(st.booleans())
    shortest = batch_size * (world_size if drop_last else 1)  # a batch on every rank, also of what a sampler cuts
    lengths = draw(st.tuples(*[st.integers(shortest, 12)] * world_size))
    patience = draw(st.none() | st.integers(0, 2))
    example = Example(draw(st.sampled_from(KINDS)), lengths, batch_size, drop_last, (), draw(st.booleans()), patience)
    stops = draw(st.sets(st.integers(1, EPOCHS * example.steps), min_size=1, max_size=3))
    return dataclasses.replace(example, stops=tuple(sorted(stops)))


def make(example: Example, rank: int, world_size: int) -> DataLoader:
    options = {"batch_size": example.batch_size, "drop_last": example.drop_last}
    items, kind = example.items(rank), example.kind
    if kind == "distributed":
        data = range(example.lengths[0])
        return DataLoader(data, sampler=DistributedSampler(data, world_size, rank, shuffle=True), **options)
    if kind == "generator":
        return DataLoader(items, shuffle=True, generator=torch.Generator().manual_seed(rank), **options)
    if kind == "stream":
        return DataLoader(Stream(items), **options)
    dataset = RememberingLive if "live" in kind else Remembering
    if kind.startswith("remembering"):
        return DataLoader(dataset(items), **options)
    if kind in ("stateful", "stateful live"):
        return StatefulDataLoader(dataset(items), **options)
    return (StatefulDataLoader if kind == "stateful list" else DataLoader)(items, shuffle=True, **options)


def life(example: Example, *args) -> list[list]:
    with in_blocks(example.patience):
        return steps_of_life(example, *args)


def steps_of_life(example: Example, load: str | None, save: str | None, stop: int | None) -> list[list]:
    """The steps that one process makes: from the state in the one folder to that in the other, or to the end."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(
        make(example, accelerator.process_index, accelerator.num_processes), already_sharded=True
    )
    first = loader
    if load is not None:
        accelerator.load_state(load)
        first = accelerator.skip_first_batches(loader, loader.batches_yielded)
    steps = []
    while loader.iteration < EPOCHS:
        for batch in first:
            gathered = accelerator.gather_for_metrics(batch).tolist()
            steps.append([loader.iteration, batch.tolist(), accelerator.gradient_state.end_of_dataloader, gathered])
            if len(steps) == stop:
                accelerator.save_state(save)
                if example.killed:
                    Path(save, f"steps_{accelerator.process_index}").write_text(json.dumps(steps))
                    os.kill(os.getpid(), signal.SIGKILL)
                return steps
        first = loader
    return steps


def lives(example: Example) -> list[list[list]]:
    """The steps of each rank, put together from those of all its processes."""
    world_size, load = len(example.lengths), None
    steps: list[list[list]] = [[] for _ in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        for before, stop in itertools.pairwise((0, *example.stops)):
            save = os.path.join(folder, str(stop))
            outcomes = run(world_size, life, example, load, save, stop - before, outcomes=True)
            for rank, outcome in enumerate(outcomes):
                if example.killed:
                    assert isinstance(outcome, Failure) and "SIGKILL" in outcome.message, outcome
                    outcome = json.loads(Path(save, f"steps_{rank}").read_text())
                steps[rank] += outcome
            load = save
        for rank, rest in enumerate(run(world_size, life, example, load, None, None)):
            steps[rank] += rest
    return steps


@parameterized.expand([(2,), (3,)])
def test_goes_on_wherever_it_was_stopped(world_size):
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(examples(world_size))
    def goes_on(example):
        expected = run(world_size, life, example, None, None, None)
        # The run that nobody interrupts is right: by arithmetic, before anything is compared with it.
        for rank_steps in expected:
            assert [step[2] for step in rank_steps] == ([False] * (example.steps - 1) + [True]) * EPOCHS
            for epoch in range(EPOCHS):
                seen = sorted(item for number, _, _, gathered in rank_steps if number == epoch for item in gathered)
                assert len(set(seen)) == len(seen)
                assert set(seen) <= set(example.everything())
                assert example.drop_last or seen == example.everything()
        assert lives(example) == expected

    goes_on()
