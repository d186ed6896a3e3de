# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What the ranks say to each other about a loader when it is prepared, and the plan that they settle on.

It goes through the key-value store of the process group, not through collectives, so a rank can speak without waiting
for the others, and one that never comes can be named.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist


TIMEOUT_VARIABLE = "ACCELERATE_PRESHARDED_TIMEOUT"
DEFAULT_TIMEOUT = 60.0

_KEY = "already_sharded"

# How long a rank may take from an ordinary loader of its own to the presharded one that others wait for at the same
# place in the script, before it counts as one that takes theirs for an ordinary one. In seconds.
_GRACE = 5.0


@dataclass(frozen=True)
class Facts:
    """
    What a rank tells the others about a loader.

    Args:
        rank (`int`): The rank in the process group.
        num_processes (`int`): The data-parallel size.
        process_index (`int`): The data-parallel index.
        loader (`str`): The loader's name in messages.
        num_shards (`int`, *optional*): For how many shards the loader says that it is cut.
        index (`int`, *optional*): Which shard it says that it reads.
        num_batches (`int`, *optional*): The batches of one pass; `None` if they cannot be counted beforehand.
        num_samples (`int`, *optional*): The real samples of one pass; `None` if they cannot be counted beforehand.
        drop_last (`bool`, *optional*, defaults to `False`): Whether the loader drops a last batch that is not full.
        even_batches (`bool`, *optional*, defaults to `True`): Whether all ranks are to make the same number of steps.
        dataset_length (`int`, *optional*): The length of the dataset that the loader holds.
        fingerprint (`str`, *optional*): What tells the contents of that dataset from another's.
    """

    rank: int
    num_processes: int
    process_index: int
    loader: str
    num_shards: int | None = None
    index: int | None = None
    num_batches: int | None = None
    num_samples: int | None = None
    drop_last: bool = False
    even_batches: bool = True
    dataset_length: int | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Plan:
    """
    What all ranks know about a presharded loader once they have agreed.

    Args:
        shortest (`int`, *optional*): The smallest number of batches of any rank; `None` if not known beforehand.
        longest (`int`, *optional*): The largest.
        shortest_rank (`int`, *optional*): A rank that has the smallest number.
        longest_rank (`int`, *optional*): A rank that has the largest.
        drop_last (`bool`, *optional*, defaults to `False`): Whether the ranks stop together at the shortest.
        num_samples (`int`, *optional*): The real samples of all ranks in one pass; `None` if not known beforehand.
    """

    shortest: int | None = None
    longest: int | None = None
    shortest_rank: int | None = None
    longest_rank: int | None = None
    drop_last: bool = False
    num_samples: int | None = None

    def steps(self) -> int | None:
        """Return the number of steps that every rank makes with even batches, or `None` if not known beforehand."""
        return self.shortest if self.drop_last else self.longest


def settle(facts: Iterable[Facts]) -> Plan:
    """
    Make the plan that follows from what all ranks have said.

    Args:
        facts (list of [`Facts`]): One entry for each rank, in any order.

    Returns:
        [`Plan`]: The same for the same facts, whichever rank makes it.

    Raises:
        `ValueError`: two ranks read the same shard, ranks disagree on the data-parallel size, or a rank has no batch
        at all while others have some. The message names them.
    """
    facts = sorted(facts, key=lambda fact: fact.rank)
    loader = facts[0].loader

    sizes = {fact.num_processes: fact.rank for fact in reversed(facts)}
    if len(sizes) > 1:
        stated = ", ".join(f"rank {rank} says {size}" for size, rank in sorted(sizes.items(), key=lambda x: x[1]))
        raise ValueError(f"{loader}: the ranks were given different numbers of processes: {stated}.")

    holders: dict[int, Facts] = {}
    for fact in facts:
        if fact.num_shards is None or fact.num_shards == 1:
            continue
        holder = holders.setdefault(fact.index, fact)
        if holder.process_index != fact.process_index:
            raise ValueError(
                f"{loader}: ranks {holder.rank} and {fact.rank} both read shard {fact.index} of {fact.num_shards}, so "
                "some data is read twice and some not at all. Give each data-parallel rank a shard of its own, or pass "
                "`already_sharded=False` to have the loader sharded."
            )
    by_index: dict[int, Facts] = {}
    for fact in facts:
        peer = by_index.setdefault(fact.process_index, fact)
        if (peer.num_shards, peer.index) != (fact.num_shards, fact.index):
            raise ValueError(
                f"{loader}: ranks {peer.rank} and {fact.rank} have the same data-parallel index {fact.process_index}, "
                f"but read shards {peer.index} of {peer.num_shards} and {fact.index} of {fact.num_shards}. Build the "
                "loader with the data-parallel size and index, not with those of the whole world."
            )

    uneven = [fact.rank for fact in facts if not fact.even_batches]
    if 0 < len(uneven) < len(facts):
        raise ValueError(
            f"{loader}: {named(uneven)} `even_batches=False`, and the other ranks have `even_batches=True`. Set it to "
            "the same on every rank."
        )

    samples = [fact.num_samples for fact in by_index.values()]
    num_samples = None if None in samples else sum(samples)
    drop_last = all(fact.drop_last for fact in facts)
    counts = [fact.num_batches for fact in facts]
    if None in counts:
        return Plan(drop_last=drop_last, num_samples=num_samples)

    shortest = min(facts, key=lambda fact: fact.num_batches)
    longest = max(facts, key=lambda fact: fact.num_batches)
    if all(fact.even_batches for fact in facts) and shortest.num_batches == 0 < longest.num_batches:
        empty = [fact.rank for fact in facts if fact.num_batches == 0]
        raise ValueError(empty_message(loader, empty, longest.rank))
    return Plan(
        shortest.num_batches, longest.num_batches, shortest.rank, longest.rank, drop_last, num_samples=num_samples
    )


def empty_message(loader: str, empty: list[int], full: int) -> str:
    """Say that some ranks have no batch while another has some. `empty` and `full` are ranks."""
    return (
        f"{loader}: {named(empty)} no batch at all, while rank {full} has some, so there is nothing to repeat. Give "
        "every rank at least one batch (fewer shards or ranks, a smaller batch size, `drop_last=False`), or pass "
        "`even_batches=False` and train under `join_uneven_inputs`."
    )


def named(ranks: list[int]) -> str:
    """Name ranks as the subject of a sentence with "has" or "have": `"rank 1 has"`, `"ranks 1, 2 have"`."""
    few = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {few} has" if len(ranks) == 1 else f"ranks {few} have"


def can_speak(num_processes: int, process_index: int) -> bool:
    """
    Tell whether this process can reach the others that it was told of.

    Args:
        num_processes (`int`): The number of processes that the loader is prepared for.
        process_index (`int`): The index of this process among them.

    Returns:
        `bool`: `False` without a process group, for a single process, or if the numbers are not the group's.
    """
    if not (dist.is_available() and dist.is_initialized()) or num_processes == 1:
        return False
    return (dist.get_world_size(), dist.get_rank()) == (num_processes, process_index)


def agree(facts: Facts, timeout: float | None = None) -> Plan:
    """
    Post the facts of a presharded loader, wait for those of the other ranks, and return the plan.

    Args:
        facts ([`Facts`]): What this rank has to say.
        timeout (`float`, *optional*):
            How long to wait, in seconds. Defaults to the environment variable `ACCELERATE_PRESHARDED_TIMEOUT`, and
            to 60 without it.

    Returns:
        [`Plan`]: The same on every rank.

    Raises:
        `ValueError`: The same on every rank that waits: what [`settle`] refuses, a rank that takes the loader for an
        ordinary one, or a rank that has not come in time.
    """
    site = _Exchange.current()[2].site()

    def look(posted: list[dict], missing: list[int]) -> str | None:
        store = _Exchange.current()[0]
        ordinary = _facts(_parse(store.get(site))) if store.check([site]) else []
        disagreeing = [fact for fact in ordinary if fact.rank in missing]
        return _disagreement(_facts(posted), disagreeing) if disagreeing else None

    def absence(posted: list[dict], missing: list[int], seconds: float) -> str:
        return _absence(min(_facts(posted), key=lambda fact: fact.rank).loader, missing, seconds)

    decided = _decide_together(asdict(facts), lambda posted: asdict(settle(_facts(posted))), absence, look, timeout)
    return Plan(**decided)


def agree_on_loading(what: str, problem: str | None, timeout: float | None = None) -> bool:
    """
    Find out whether every rank can load its part of something, before any rank does.

    Args:
        what (`str`): What is loaded, in messages.
        problem (`str`, *optional*): Why this rank cannot load its part; `""` if there is nothing to load.
        timeout (`float`, *optional*): As in [`agree`].

    Returns:
        `bool`: `True` if every rank has a part, `False` if none has.

    Raises:
        `ValueError`: Some rank cannot load its part, or has none while others have, or has not come in time. The same
        on every rank.
    """

    def decide(posted: list[dict]) -> dict[str, Any]:
        posted = sorted(posted, key=lambda entry: entry["rank"])
        missing = [entry["rank"] for entry in posted if entry["problem"] == ""]
        problems = [f"Rank {entry['rank']}: {entry['problem']}" for entry in posted if entry["problem"]]
        if missing and len(missing) < len(posted):
            problems.append(f"{named(missing).capitalize()} none, which is there for every rank or for none.")
        if problems:
            more = f" The same kind of thing on {len(problems) - 3} more ranks." if len(problems) > 3 else ""
            raise ValueError(f"{what} cannot be loaded, and nothing was. {' '.join(problems[:3])}{more}")
        return {"found": not missing}

    def absence(posted: list[dict], missing: list[int], seconds: float) -> str:
        return (
            f"{what} cannot be loaded: within {seconds:g} seconds {named(missing)} not come to load. Call `load_state` "
            f"on every rank, or set {TIMEOUT_VARIABLE} to more seconds."
        )

    entry = {"rank": dist.get_rank(), "problem": problem}
    return _decide_together(entry, decide, absence, None, timeout)["found"]


def refuse(reason: str) -> None:
    """
    Tell the ranks that wait for this one in [`agree`] that it cannot prepare its loader, and why.

    Args:
        reason (`str`): The message of the error that this rank raises, which names the rank.
    """
    store, world_size, counters = _Exchange.current()
    key = f"{_KEY}/{counters.number()}"
    counters.site()
    store.compare_set(f"{key}/verdict", "", json.dumps({"error": reason}))
    store.add(f"{key}/count", 1)


def post_ordinary(facts: Facts) -> str | None:
    """
    Post the facts of an ordinary loader, without waiting, and compare them with those that are there already.

    Args:
        facts ([`Facts`]): What this rank has to say.

    Returns:
        `str` or `None`: What differs between the ranks' datasets, said to one rank only, the first that differs.
    """
    store, world_size, counters = _Exchange.current()
    key = counters.site()
    own = json.dumps(asdict(facts)) + "\n"
    # All of it is only read by a rank that misses another; those that go on read no more than what the first has said.
    store.append(key, own)
    (first,) = _facts(_parse(store.compare_set(f"{key}/first", "", own)))
    difference = None
    if (facts.dataset_length, facts.fingerprint) != (first.dataset_length, first.fingerprint):
        if store.compare_set(f"{key}/differs", "", str(facts.rank)) == str(facts.rank).encode():
            difference = _difference(first, facts)
    if store.add(f"{key}/count", 1) == world_size:
        for name in (key, f"{key}/first", f"{key}/differs", f"{key}/count"):
            store.delete_key(name)
    return difference


def timeout_from_environment() -> float:
    """
    Return how long a rank waits for the others at `prepare`, in seconds.

    Returns:
        `float`: The value of the environment variable `ACCELERATE_PRESHARDED_TIMEOUT`, or 60.

    Raises:
        `ValueError`: The variable does not hold a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT
    try:
        timeout = float(text)
    except ValueError:
        timeout = 0.0
    if not timeout > 0:
        raise ValueError(f"{TIMEOUT_VARIABLE} should be a number of seconds above 0, but it is {text!r}.")
    return timeout


def report(number: int, text: str) -> None:
    """
    Say something about a step that the ranks take together, before contributing to it.

    Args:
        number (`int`): The number of the step among all steps of the process group.
        text (`str`): One line.
    """
    store, _, _ = _Exchange.current()
    store.append(f"{_KEY}/step/{number}", json.dumps([dist.get_rank(), text]) + "\n")


def reports(number: int) -> list[tuple[int, str]]:
    """
    Read what the ranks have said about a step. To be called when all of them have contributed to it.

    Args:
        number (`int`): The number of the step among all steps of the process group.

    Returns:
        `list[tuple[int, str]]`: Ranks and texts, in the order of the ranks.
    """
    store, _, _ = _Exchange.current()
    key = f"{_KEY}/step/{number}"
    if not store.check([key]):
        return []
    return [(rank, text) for rank, text in sorted(_parse(store.get(key)))]


def _decide_together(
    entry: dict[str, Any],
    decide: Callable[[list[dict]], dict[str, Any]],
    absence: Callable[[list[dict], list[int], float], str],
    look: Callable[[list[dict], list[int]], str | None] | None,
    timeout: float | None,
) -> dict[str, Any]:
    """
    Post an entry, and return what the ranks decide when all entries are there, or raise the error that they decide.

    The number of messages of a rank does not grow with the number of ranks: the last one to come reads what all have
    posted, decides, and posts the decision that the others wait for.
    """
    timeout = timeout_from_environment() if timeout is None else timeout
    store, world_size, counters = _Exchange.current()
    key = f"{_KEY}/{counters.number()}"

    def verdict(posted: list[dict]) -> dict[str, Any]:
        try:
            return {"decided": decide(posted)}
        except ValueError as error:
            return {"error": str(error)}

    def wait() -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        next_look = time.monotonic() + 1.0
        suspected = None
        pause = 0.0005
        # Not `store.wait`: it complains on stderr whenever its time is up, and a look around needs short times.
        while not store.check([f"{key}/verdict"]):
            now = time.monotonic()
            if now >= min(next_look, deadline):
                next_look = now + 1.0
                posted = _parse(store.get(f"{key}/entries"))
                missing = sorted(set(range(world_size)) - {entry["rank"] for entry in posted})
                seen = look(posted, missing) if look is not None and missing else None
                suspected = None if seen is None else (suspected or now)
                if seen is not None and (now >= suspected + _GRACE or now >= deadline):
                    return {"error": seen}
                if now >= deadline:
                    # All have come if the last one died before it could speak for all: then anyone can.
                    return {"error": absence(posted, missing, timeout)} if missing else verdict(posted)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return json.loads(store.get(f"{key}/verdict"))

    store.append(f"{key}/entries", json.dumps(entry) + "\n")
    is_last = store.add(f"{key}/count", 1) == world_size
    mine = verdict(_parse(store.get(f"{key}/entries"))) if is_last else wait()
    # Whoever speaks first decides for all: a rank that comes too late hears the error that the others have raised.
    decided = json.loads(store.compare_set(f"{key}/verdict", "", json.dumps(mine)))
    if store.add(f"{key}/count", 1) == 2 * world_size:
        for name in ("entries", "count", "verdict"):
            store.delete_key(f"{key}/{name}")
    if "error" in decided:
        raise ValueError(decided["error"])
    return decided["decided"]


def _disagreement(posted: list[Facts], disagreeing: list[Facts]) -> str:
    one, other = min(posted, key=lambda fact: fact.rank), min(disagreeing, key=lambda fact: fact.rank)
    return (
        f"{one.loader}: the ranks disagree. It is already sharded on rank {one.rank}, but on rank {other.rank} nothing "
        f"says so ({other.loader}). Pass `already_sharded=True` or `already_sharded=False` on every rank."
    )


def _absence(loader: str, missing: list[int], timeout: float) -> str:
    return (
        f"{loader} is already sharded, so every rank has to prepare its own, but within {timeout:g} seconds "
        f"{named(missing)} not prepared any. Call `prepare` on every rank, pass `already_sharded=False` on all of "
        f"them, or set {TIMEOUT_VARIABLE} to more seconds if a rank takes that long."
    )


def _difference(first: Facts, other: Facts) -> str:
    def contents(fact: Facts) -> str:
        print_of = "" if fact.fingerprint is None else f" and fingerprint {fact.fingerprint}"
        return f"rank {fact.rank} holds a dataset of length {fact.dataset_length}{print_of}"

    return f"{contents(first)}, and {contents(other)}"


def _parse(posted: bytes) -> list[Any]:
    return [json.loads(line) for line in posted.decode().splitlines()]


def _facts(posted: list[dict[str, Any]]) -> list[Facts]:
    return [Facts(**entry) for entry in posted]


class _Exchange:
    """The store of the default process group, and how many loaders have been spoken of in it."""

    _counters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> tuple[dist.Store, int, _Exchange]:
        group = dist.group.WORLD
        if group not in cls._counters:
            cls._counters[group] = cls()
        return dist.distributed_c10d._get_default_store(), dist.get_world_size(), cls._counters[group]

    def __init__(self):
        self._number = 0
        self._sites: Counter[str] = Counter()

    def number(self) -> int:
        # Presharded loaders are prepared on every rank, in the same order.
        self._number += 1
        return self._number

    def site(self) -> str:
        # An ordinary loader may be prepared on some ranks only, so it has no number that all ranks agree on. What it
        # has is the place in the script, which is the same on all ranks, and how often that place was passed.
        frame, lines = sys._getframe(1), []
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(("accelerate.", f"{__package__}.")):
                lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        place = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        self._sites[place] += 1
        return f"{_KEY}/{place}/{self._sites[place]}"
