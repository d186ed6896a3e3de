# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The checks for GPUs: on GPUs where there are some, and on the CPU as far as they go there, so that none rots."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import accelerate
import pytest
import torch
from ranks import run
from shared import stand_in_gpus


HERE = Path(__file__).parent / "cuda"
sys.path.append(str(HERE))

import checks  # noqa: E402
from launching import launch  # noqa: E402


def run_script(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


def counts(output: str) -> tuple[int, ...]:
    last = re.search(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", output, re.MULTILINE)
    assert last, output
    return tuple(map(int, last.groups()))


NUM_ANYWHERE, NUM_GPU_RANKS = len(checks.ANYWHERE), len(checks.GPU_RANKS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_gpus():
    status, output = run_script()
    assert status == 0, output
    assert counts(output)[0] >= NUM_ANYWHERE


def test_on_the_cpu():
    status, output = run_script("--device", "cpu")
    assert status == 0, output
    assert counts(output) == (NUM_ANYWHERE, 0, NUM_ANYWHERE + NUM_GPU_RANKS), output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_all_is_skipped():
    status, output = run_script()
    assert status == 0
    assert counts(output) == (0, 0, 2 * NUM_ANYWHERE + NUM_GPU_RANKS)
    assert output.count("no CUDA GPU here") == NUM_ANYWHERE
    assert output.count("this needs 2 GPUs, and none can be seen") == NUM_ANYWHERE + NUM_GPU_RANKS - 1


# What Accelerate does on GPU ranks alone, with real ranks that it takes for such.


class Joining(checks.Accelerator):
    """Accelerate joins on GPU ranks only, and there it also puts the models on them."""

    preparing = False
    multi_device = property(lambda self: not self.preparing)

    def prepare(self, *args, **kwargs):
        self.preparing = True
        try:
            return super().prepare(*args, **kwargs)
        finally:
            self.preparing = False


class StandIn(checks.Setting):
    """A GPU of its own for each rank, which is the CPU."""

    def accelerator(self, **settings):
        accelerate.PartialState(cpu=True)
        mesh = settings.pop("parallelism_config", None)
        dimensions = None
        if mesh is not None:
            dimensions = {"dp_shard": mesh.dp_shard_size, "tp": mesh.tp_size}
            dimensions = {name: size for name, size in dimensions.items() if size > 1}
        fsdp = settings.pop("fsdp_plugin", None) is not None
        if not fsdp and mesh is None:
            return Joining(cpu=True, **settings)
        arguments = kept.enter_context(stand_in_gpus(dimensions, fsdp))
        return checks.Accelerator(**arguments, **settings)


kept = contextlib.ExitStack()


def as_if_on_gpus(name: str) -> None:
    (only,) = next(check.runs for check in checks.GPU_RANKS if check.name == name)
    with kept:
        only(StandIn("cpu", "gloo", "", torch.distributed.get_rank()))


@pytest.mark.parametrize("check", checks.GPU_RANKS, ids=lambda check: check.name)
def test_checks_for_gpu_ranks(check):
    if check.lacks:
        pytest.skip(check.lacks)
    if check.runs[0] is checks.joined and not hasattr(accelerate.Accelerator, "multi_device"):
        pytest.skip("this version of Accelerate has no property of its own to ask whether to join")
    run(check.num_ranks, as_if_on_gpus, check.name)


# The launcher.


def do_nothing(rank: int) -> None:
    pass


def fail_on_the_second(rank: int) -> None:
    checks.same("rank", rank, 0)


def die_on_the_second(rank: int) -> None:
    if rank:
        os._exit(3)


def wait_for_the_second(rank: int) -> None:
    if not rank:
        time.sleep(60)
    raise KeyError("lost")


@pytest.mark.parametrize(
    "function, said",
    [
        (do_nothing, r""),
        (fail_on_the_second, r"rank 1: Traceback(?s:.*)AssertionError: rank: found 1, expected 0\n"),
        (die_on_the_second, r"rank 1: the process died"),
        (wait_for_the_second, r"rank 0: no answer in time\nrank 1: Traceback(?s:.*)KeyError: 'lost'\n"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_rank_does_is_told(function, said):
    assert re.fullmatch(said, launch(2, function, fork=True))
