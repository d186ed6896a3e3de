# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Posting and reading facts with up to 1024 ranks: each a client of one real store, all on this machine."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from accelerate_presharded import agreement
from accelerate_presharded.agreement import Facts, agree, post_ordinary

from .harness import Figure, Row, duration
from .ranks import launch


PROCESSES = 4
# How often a rank asks whether the others have come depends on how long it waits and not on how many they are.
POLLS = "check"


class _Store:
    """A client's store that counts the messages it sends."""

    def __init__(self, store: dist.Store):
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable:
        function = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return function(*args)

        return counted


class _Clients(threading.local):
    """What `agreement` takes for the process group: in each thread, one rank of a larger world."""

    exchange: tuple = ()


def speak(world_size: int) -> dict[str, Any]:
    """Be a part of the ranks, one in each thread, first with a loader that is sharded and then with an ordinary one."""
    clients = _Clients()
    agreement._Exchange.current = classmethod(lambda cls: clients.exchange)
    mine = range(dist.get_rank(), world_size, dist.get_world_size())
    # Hosted by the first process, beside its clients.
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = [None if host is None else host.port]
    dist.broadcast_object_list(port)
    stores = {
        rank: _Store(dist.TCPStore("127.0.0.1", port[0], world_size, False, wait_for_workers=False)) for rank in mine
    }
    errors: list[BaseException] = []
    meet = threading.Barrier(len(mine) + 1)
    polls: list[int] = []

    def be(rank: int) -> None:
        clients.exchange = (stores[rank], world_size, agreement._Exchange())
        facts = Facts(
            rank, world_size, rank, "The DataLoader over Dataset", world_size, rank, 100, 1600, dataset_length=10**6
        )
        for function in (agree, post_ordinary):
            try:
                meet.wait()  # all threads are there, and stay until the others' processes are too
                meet.wait()
                function(facts)
            except BaseException as error:
                errors.append(error)
            meet.wait()

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in mine]
    for thread in threads:
        thread.start()
    found: dict[str, Any] = {}
    for name in ("agree", "post"):
        for store in stores.values():
            store.calls.clear()
        meet.wait()
        dist.barrier()
        begin = time.perf_counter()
        meet.wait()
        meet.wait()
        found[name] = time.perf_counter() - begin
        if errors:
            raise errors[0]
        polls = [store.calls.pop(POLLS, 0) for store in stores.values()]
        found[f"{name} trips"] = [sum(store.calls.values()) for store in stores.values()]
        found[f"{name} polls"] = statistics.median(polls)
        dist.barrier()
    for thread in threads:
        thread.join()
    return found


def measure(world_size: int) -> dict[str, Any]:
    """Have so many ranks agree."""
    parts = launch(min(PROCESSES, world_size), speak, world_size)
    together: dict[str, Any] = {name: max(part[name] for part in parts) for name in ("agree", "post")}
    for name in ("agree", "post"):
        together[f"{name} trips"] = sorted(trips for part in parts for trips in part[f"{name} trips"])
        together[f"{name} polls"] = max(part[f"{name} polls"] for part in parts)
    return together


def rows(quick: bool) -> list[Row]:
    """Measure worlds of growing size."""
    sizes = (8, 32) if quick else (16, 128, 1024)
    found = {world_size: measure(world_size) for world_size in sizes}
    largest = sizes[-1]
    lines = []
    for name, what in (("agree", "sharded loader"), ("post", "ordinary loader")):
        seconds = [measured[name] for measured in found.values()]
        note = ", ".join(f"{size} ranks {duration(measured[name])}" for size, measured in found.items())
        lines.append(
            Row(
                f"facts of {largest} ranks posted and read, {what}",
                "measured",
                Figure.of([seconds[-1]]),
                5,
                unit="s",
                note=note,
            )
        )
        # The last rank to come reads for all, and one other message or two is the last one's as well.
        trips = {size: int(statistics.median(measured[f"{name} trips"])) for size, measured in found.items()}
        most = {size: measured[f"{name} trips"][-1] for size, measured in found.items()}
        note = ", ".join(
            f"{size} ranks {trips[size]}, at most {most[size]}, and {found[size][f'{name} polls']:g} questions"
            for size in sizes
        )
        growth = most[largest] / most[sizes[0]]
        lines.append(
            Row(
                f"round trips of a rank, {largest} ranks, {what}",
                f"{sizes[0]} ranks",
                Figure.of([growth]),
                1,
                "exactly",
                note=note,
            )
        )
    return lines
