# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Ranks on this machine that audit a loader in several stages, and the process that looks after them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import accelerate
import numpy
import torch
import torch.distributed as dist

from .accelerator import Accelerator
from .auditing import OtherRankFailed, Seen, ShardingReport, audit
from .data_loader import is_prepared


# Seconds that the other ranks get to say what they have to say, once one has failed.
_GRACE = 3.0
# Seconds between two lines of a rank about its progress.
_INTERVAL = 0.2


@dataclass(frozen=True)
class Job:
    """
    What the ranks have to do.

    Args:
        factory (`str`): `"module:function"` or `"path/file.py:function"`, which makes a rank's loader.
        key (`str` or `int`, *optional*): What to tell samples apart by.
        max_batches (`int`, *optional*): How many batches of each rank to read at most.
        already_sharded (`bool`, *optional*): What our `prepare` is told.
        keeps_samples (`bool`, *optional*, defaults to `False`): Whether to return who has seen which sample.
    """

    factory: str
    key: str | int | None = None
    max_batches: int | None = None
    already_sharded: bool | None = None
    keeps_samples: bool = False


@dataclass(frozen=True)
class Outcome:
    """
    What came of a stage.

    Args:
        report (`dict[str, Any]`, *optional*): The report; `None` if there was an error.
        error (`str`, *optional*): What went wrong, in a line.
        details (`str`, *optional*): The traceback.
        is_usage_error (`bool`, *optional*, defaults to `False`): Whether the command was called in a wrong way.
        seen (`list[Seen]`, *optional*): The samples of each rank, if the job keeps them.
    """

    report: dict[str, Any] | None = None
    error: str | None = None
    details: str | None = None
    is_usage_error: bool = False
    seen: list[Seen] | None = None


class UsageError(Exception):
    """The command names something that is not there, or that is no factory."""


def run_stages(
    job: Job, stages: list[str], num_processes: int, timeout: float, on_samples: Callable[[int], Any]
) -> dict[str, Outcome]:
    """
    Audit a loader in several stages, each on new ranks. If the first fails, the others are not begun.

    Args:
        job ([`Job`]): What to do.
        stages (`list[str]`): `"before"` first, then `"accelerate"` and `"accelerate_presharded"`.
        num_processes (`int`): How many ranks.
        timeout (`float`): The seconds after which ranks of which none goes on are given up.
        on_samples (`Callable`): Called now and then with the number of samples read since.

    Returns:
        `dict[str, Outcome]`: What came of each stage.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    outcomes: dict[str, Outcome] = {}
    try:
        _check(job.factory)
    except UsageError as error:
        return {"before": Outcome(error=str(error), is_usage_error=True)}
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        for stage in stages:
            crew = _Crew(context, job, stage, num_processes, Path(folder))
            try:
                outcomes[stage] = crew.work(timeout, on_samples)
            finally:
                crew.end()
            if outcomes[stages[0]].report is None:
                break
    return outcomes


class _Crew:
    """The ranks of one stage, as this process sees them."""

    def __init__(self, context: Any, job: Job, stage: str, num_processes: int, folder: Path):
        self._job, self._stage, self._folder = job, stage, folder
        # Hosted here, as a launcher does, so that no rank takes it with it.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._processes, self._connections = [], []
        try:
            for rank in range(num_processes):
                ours, theirs = context.Pipe()
                arguments = (rank, num_processes, self._store.port, job, stage, folder, theirs)
                process = context.Process(target=_be_a_rank, args=arguments)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.end()
            raise

    def work(self, timeout: float, on_samples: Callable[[int], Any]) -> Outcome:
        """Wait until all ranks are through, one has failed, or none has gone on for too long."""
        waiting = dict(zip(self._connections, range(len(self._connections))))
        failures: list[tuple[int, _Failure]] = []
        report = None
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    message = _Failure(f"the process has ended ({_how(self._processes[rank].exitcode)})")
                if isinstance(message, int):
                    on_samples(message)
                    if not failures:
                        deadline = time.monotonic() + timeout
                    continue
                del waiting[connection]
                if isinstance(message, _Failure):
                    if not failures:
                        deadline = time.monotonic() + _GRACE
                    failures.append((rank, message))
                elif rank == 0:
                    report = message
        if failures:
            rank, failure = next((each for each in failures if not each[1].is_echo), failures[0])
            error = failure.error if failure.is_usage_error else f"Rank {rank} failed: {failure.error}"
            return Outcome(error=error, details=failure.details, is_usage_error=failure.is_usage_error)
        if waiting:
            ranks = ", ".join(str(rank) for rank in sorted(waiting.values()))
            return Outcome(
                error=f"It hangs: rank{'s' * (len(waiting) > 1)} {ranks} did not come to the end, and nothing has been "
                f"read for {timeout:g} seconds."
            )
        seen = None
        if self._job.keeps_samples:
            ranks = range(len(self._processes))
            seen = [_load(self._folder, self._stage, rank).seen for rank in ranks]
        return Outcome(report=report, seen=seen)

    def end(self) -> None:
        """End the ranks and the workers of their loaders."""
        for process in self._processes:
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


@dataclass(frozen=True)
class _Failure:
    error: str
    details: str | None = None
    is_usage_error: bool = False
    is_echo: bool = False  # of another rank's failure


def _be_a_rank(
    rank: int, num_processes: int, port: int, job: Job, stage: str, folder: Path, connection: Connection
) -> None:
    if hasattr(os, "setsid"):
        # A group of its own: Ctrl-C is for the process that looks after the ranks, and ends them all.
        os.setsid()
    os.dup2(2, 1)  # what the factory prints is no part of the report
    try:
        _join(rank, num_processes, port)
        report = _audit_stage(rank, job, stage, folder, connection)
        _file(folder, stage, rank).write_bytes(pickle.dumps(report))
        message: Any = report.to_dict()
    except UsageError as error:
        message = _Failure(str(error), is_usage_error=True)
    except (Exception, SystemExit) as error:
        text = str(error).strip().splitlines()
        message = _Failure(
            f"{type(error).__name__}: {text[0] if text else ''}",
            "".join(traceback.format_exception(type(error), error, _beyond_us(error))).rstrip(),
            is_echo=isinstance(error, OtherRankFailed),
        )
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(EOFError, OSError):
        connection.send(message)
        # The others may still need this rank's connections. What follows is the end, by force.
        connection.recv()
    os._exit(0)


def _beyond_us(error: BaseException) -> Any:
    """Leave the frames of this module out of a traceback, where what follows is the user's code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return frame or error.__traceback__


def _join(rank: int, num_processes: int, port: int) -> None:
    """Make this process what a launcher's child is after it has initialized its process group."""
    sys.path.insert(0, os.getcwd())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_processes),
        LOCAL_WORLD_SIZE=str(num_processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
        # As under torchrun: the store is hosted elsewhere, and rank 0 is a client like the others.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    torch.set_num_threads(1)
    # The same in every stage, or their orders could not be compared.
    random.seed(rank)
    numpy.random.seed(rank)
    dist.init_process_group("gloo")


def _audit_stage(rank: int, job: Job, stage: str, folder: Path, connection: Connection) -> ShardingReport:
    is_ours = stage == "accelerate_presharded"
    accelerator = Accelerator(cpu=True) if is_ours else accelerate.Accelerator(cpu=True)
    loader = _make_loader(job.factory, accelerator)
    if is_ours:
        loader = accelerator.prepare(loader, already_sharded=job.already_sharded)
    elif stage == "accelerate":
        loader = accelerator.prepare(loader)
    before = None if stage == "before" else _load(folder, "before", rank)
    said, unsaid = time.monotonic(), 0

    def on_batch(samples: int) -> None:
        nonlocal said, unsaid
        unsaid += samples
        if time.monotonic() - said > _INTERVAL:
            connection.send(unsaid)
            said, unsaid = time.monotonic(), 0

    return audit(loader, accelerator, key=job.key, max_batches=job.max_batches, before=before, on_batch=on_batch)


def _file(folder: Path, stage: str, rank: int) -> Path:
    return folder / f"{stage}-{rank}"


def _load(folder: Path, stage: str, rank: int) -> ShardingReport:
    return pickle.loads(_file(folder, stage, rank).read_bytes())


def _check(factory: str) -> None:
    """Find out what is wrong with the name of a factory without executing anything."""
    place, _, name = factory.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(
            f"{factory!r} names no factory. Expected is MODULE:FUNCTION or FILE.py:FUNCTION, such as train.py:make_loader."
        )
    if _is_file(place) and not Path(place).is_file():
        raise UsageError(f"There is no file {place!r}.")


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _make_loader(factory: str, accelerator: accelerate.Accelerator) -> Any:
    place, _, name = factory.rpartition(":")
    module = _import_file(Path(place)) if _is_file(place) else _import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}." if function is None else f"{factory} is no function.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    needed += [each.name for each in parameters if each.default is each.empty and each.kind == each.KEYWORD_ONLY]
    if needed not in ([], ["accelerator"]):
        raise UsageError(
            f"{factory} asks for {', '.join(needed)}. A factory takes no argument, or one that is called `accelerator`."
        )
    loader = function(accelerator=accelerator) if needed else function()
    if isinstance(loader, (tuple, list, dict, str)) or not hasattr(type(loader), "__iter__"):
        raise UsageError(f"{factory} returns a {type(loader).__name__}. Expected is one loader.")
    if is_prepared(loader):
        raise UsageError(
            f"{factory} returns a loader that is prepared. Expected is the loader that goes to `prepare`."
        )
    return loader


def _import_file(path: Path) -> Any:
    sys.path.insert(0, str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise UsageError(f"{str(path)!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for the pickles of worker processes
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"There is no module {name!r} to import here.") from None
        raise
