# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Runs a function on new rank processes, with what comes with Python and nothing else."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait


# Seconds that the others get after a rank has failed: they may only be waiting for it.
GRACE = 5.0


def launch(world_size: int, function: Callable, *args, environ=None, fork: bool = False, timeout: float = 90.0) -> str:
    """
    Run `function(rank, *args)` on every rank at once, in new processes that find a launcher's variables.

    Args:
        world_size (`int`): How many ranks.
        function (`Callable`): A function of a module.
        environ (`Callable`, *optional*): More environment variables for a rank, from its number.
        fork (`bool`, *optional*, defaults to `False`):
            Whether to fork the ranks from a process that has imported everything, which saves seconds. What is forked
            cannot use CUDA if an import has touched it.
        timeout (`float`, *optional*, defaults to 90): Seconds after which ranks that have not ended are given up.

    Returns:
        `str`: What went wrong, or nothing.
    """
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        # The first optimizer imports the second, which takes seconds.
        context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    port = _free_port()
    ranks: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            **(environ(rank) if environ is not None else {}),
        }
        # Where they stand comes before they are killed.
        rest = (theirs, variables, timeout - 5, function, rank, args)
        process = context.Process(target=_be_a_rank, args=rest, daemon=True)
        process.start()
        theirs.close()
        ranks[ours] = rank
        processes.append(process)
    try:
        return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(_outcomes(ranks, timeout).items()) if text)
    finally:
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()


def _outcomes(ranks: dict[Connection, int], timeout: float) -> dict[int, str]:
    found: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    waited_for = dict(ranks)
    while waited_for:
        ready = wait(list(waited_for), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waited_for.pop(connection)
            try:
                found[rank] = connection.recv()
            except EOFError:
                found[rank] = "the process died"
            if found[rank]:
                deadline = min(deadline, time.monotonic() + GRACE)
    found.update(dict.fromkeys(waited_for.values(), "no answer in time"))
    # Nobody ends before all have: the others may still need its connections.
    for connection in ranks:
        connection.close()
    return found


def _be_a_rank(connection: Connection, variables: dict, patience: float, function: Callable, rank: int, args) -> None:
    faulthandler.dump_traceback_later(patience)
    os.environ.update({name: str(value) for name, value in variables.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    outcome = ""
    try:
        function(rank, *args)
    except BaseException:
        outcome = traceback.format_exc()
    connection.send(outcome)
    try:
        connection.recv()
    except EOFError:
        faulthandler.cancel_dump_traceback_later()
    # Not in order: a group in which a rank has failed may wait for it for ever when it is taken down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
