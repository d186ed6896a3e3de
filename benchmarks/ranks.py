# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Run a function on several ranks: new processes, joined by gloo, one thread each."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


# Ranks are forked from a process that has imported these, so they start in milliseconds.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "accelerate", "accelerate_presharded"]


def launch(world_size: int, function: Callable, *args: Any, timeout: float = 900.0) -> list[Any]:
    """
    Call `function(*args)` on every rank at the same time.

    Args:
        world_size (`int`): The number of ranks. A single one has no process group.
        function (`Callable`): A function of a module, so that the ranks can import it.
        *args (`Any`): What it is called with.
        timeout (`float`, *optional*, defaults to 900): The seconds until ranks are given up.

    Returns:
        `list`: What the ranks have returned, by rank.

    Raises:
        `RuntimeError`: A rank has raised an error, has died, or has not come to an end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # Hosted here, as a launcher does it, so that no port has to be guessed.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ends, processes = {}, []
    patience = 0.0
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_be_a_rank, args=(theirs, rank, world_size, store.port, function, args), daemon=False
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends[ours] = rank
        results = _collect(ends, time.monotonic() + timeout)
        patience = 5.0
        return results
    finally:
        for process in processes:
            process.join(timeout=patience)  # none for those that wait for one that has failed
            if process.is_alive():
                process.kill()
                process.join()


def _collect(ends: dict[Any, int], deadline: float) -> list[Any]:
    results: list[Any] = [None] * len(ends)
    waiting = dict(ends)
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} have not come to an end in time")
        for end in ready:
            rank = waiting.pop(end)
            try:
                error, results[rank] = end.recv()
            except EOFError:
                error = "it has died"
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
    return results


def _ask_no_name_server() -> None:
    # A client of the store looks up the name of its own address. That is no part of what is measured, and where the
    # name server is slow, a thousand of them take minutes.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def _be_a_rank(end: Any, rank: int, world_size: int, port: int, function: Callable, args: tuple) -> None:
    _ask_no_name_server()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        if world_size > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
            )
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo")
        end.send((None, function(*args)))
        if world_size > 1:
            dist.barrier()  # nobody leaves while another still needs it
    except BaseException:
        end.send((traceback.format_exc(), None))
        raise SystemExit(1) from None
