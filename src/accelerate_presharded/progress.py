# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""How far a rank has come in its loader, in a form that can be saved and read back without executing anything."""

from __future__ import annotations

import collections
import inspect
import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from .epochs import Epochs, OwnEpochs
from .evening import Mark, Source
from .sharding import read, walk_samplers


VERSION = 1

# The entries of a rank's part, by type. Everything of variable form is in the last.
_ENTRIES = {
    "process_index": int,
    "epoch": int,
    "batches": int,
    "samples": int,
    "own_batches": int,
    "in_replay": bool,
    "is_last": bool,
    "cut_short": int,
    "loader": bytes,
}


class Progress:
    """
    The epoch that a loader is in and how far it has come in it, shared by all loaders that go over the same data.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader that is wrapped.

    **Available attributes:**

        - **epochs** ([`Epochs`]) -- The number of the epoch, and who has to hear of it.
        - **batches** (`int`) -- How many batches the rank has yielded in the epoch, replays included.
        - **samples** (`int`) -- How many samples they hold, replays left out.
        - **keeps_state** (`bool`) -- Whether the wrapped loader has a state of its own with which it can go on.
    """

    def __init__(self, loader: Any):
        self.epochs = Epochs(loader)
        self.batches = 0
        self.samples = 0
        self._fields: tuple = Mark()
        self._is_last = False
        # The wrapped loader's state at the end of the last epoch, and how many passes it has begun since.
        self._end_state: Any = None
        self._cut_short = 0
        # The epochs that the loader counts by itself, as they were before the pass that is under way.
        self._epochs_before: list[int] | None = None
        self._loader = loader
        self._is_resumed = False
        self._may_end_at_once = False
        # Of the beginning of the pass that is under way; where none is, those of the present count.
        self._random: dict[str, Any] | None = None

    @property
    def keeps_state(self) -> bool:
        return self.holder() is not None

    def holder(self) -> Any:
        """
        Find who keeps a state: the loader, or a stream that is read in this process.

        Returns:
            `Any`: The object with `state_dict` and `load_state_dict`, or `None`.
        """
        dataset = read(self._loader, "dataset")
        for candidate in (self._loader, dataset):
            if candidate is dataset and (
                read(self._loader, "num_workers") or not isinstance(dataset, IterableDataset)
            ):
                continue
            state_dict, load_state_dict = read(candidate, "state_dict"), read(candidate, "load_state_dict")
            if callable(state_dict) and callable(load_state_dict) and not _has_required_arguments(state_dict):
                return candidate
        return None

    @property
    def _mark(self) -> Mark:
        # The names are put on when someone looks.
        return Mark(*self._fields)

    def begin(self, skip: int) -> Source | None:
        """
        Begin a pass, in the middle of the epoch if a saved state says so.

        Args:
            skip (`int`): At which step of the epoch to begin at the earliest.

        Returns:
            [`Source`] or `None`: The batches from there on; `None` if the state was saved behind the last batch.
        """
        self.epochs.begin()
        holder = self.holder()
        read_state = None if holder is None else holder.state_dict
        resumed = begin_order = None
        is_resumed, self._is_resumed = self._is_resumed, False
        for _ in range(self._cut_short if is_resumed and holder is self._loader else 0):
            # Each of them has drawn an order, which the next epoch's follows.
            own_epochs = OwnEpochs(self._loader)
            before = own_epochs.read()
            next(iter(self._loader), None)
            own_epochs.write(before)
        if is_resumed and self._is_last and (holder is not None or skip):
            return None
        if is_resumed and (holder is not None or skip == self.batches):
            begin_order = self._random and self._random["torch"]
            if holder is not None or self._mark.in_replay:
                resumed = (self.batches, self._mark)
            else:
                self.samples = 0  # they are counted while they are skipped
        else:
            self._reset()
        # Neither do some begin the next pass at once behind a replay in which they were left.
        behind_replay = resumed is not None and holder is not None and self._mark.in_replay
        may_end_at_once, self._may_end_at_once = self._may_end_at_once, behind_replay
        return Source(
            self._loader,
            skip,
            read_state,
            resumed,
            begin_order,
            self._note_random_state,
            may_end_at_once,
            self._epochs_before,
        )

    def advance(self, batches: int, samples: int, mark: Mark, source: Source, is_last: bool, ends_own: bool) -> None:
        """
        Note that a batch is about to be yielded.

        Args:
            source ([`Source`]): Where it comes from.
            is_last (`bool`): Whether it is the last of the epoch.
            batches (`int`): How many have been yielded with it.
            samples (`int`): How many samples they hold, replays left out.
            mark ([`Mark`]): Where the loader is behind it.
            ends_own (`bool`): Whether it is the last of the rank's own pass.
        """
        self.batches, self.samples, self._fields = batches, samples, mark
        self._is_last, self._epochs_before = is_last, source.epochs_before
        if is_last:
            if source.ended:
                # All its replays have been begun since, and the last may not have come to its end.
                self._fields = mark = self._mark._replace(state=source.end_state)
                self._cut_short = math.ceil((batches - mark.batches) / max(1, mark.batches))
            else:
                self._cut_short = 1  # all ranks stop with the shortest
            # What follows is another pass, which begins with the random numbers of that time.
            self._random = None
        elif ends_own and self.keeps_state:
            self._fields = self._mark._replace(in_replay=True)

    def end(self) -> None:
        """Note that the epoch has come to its end."""
        self.epochs.current += 1
        state, cut_short = self._mark.state, self._cut_short
        self._reset()
        self._end_state, self._cut_short = state, cut_short

    def to_dict(self, process_index: int) -> dict[str, Any]:
        """
        Return the progress as plain data.

        Args:
            process_index (`int`): The data-parallel index of this rank.

        Returns:
            `dict[str, Any]`: Numbers, and one entry of bytes.
        """
        holder = self.holder()
        state = self._mark.state if self.batches else self._end_state
        if state is None and holder is not None:
            state = holder.state_dict()
        random = self._random or self._random_state()
        own = {
            "state": state,
            "random": random,
            "mid_pass": self._random is not None,
            "epochs_before": self._epochs_before,
        }
        return {
            "process_index": process_index,
            "epoch": int(self.epochs.current),
            "batches": self.batches,
            "samples": self.samples,
            "own_batches": self._mark.batches,
            "in_replay": self._mark.in_replay,
            "is_last": self._is_last,
            "cut_short": self._cut_short,
            "loader": _pack(own),
        }

    def check(self, entries: Any) -> dict[str, Any]:
        """
        Check that something is what [`~Progress.to_dict`] returns and that this loader can take it.

        Args:
            entries (`Any`): What was found.

        Returns:
            `dict[str, Any]`: The same, with the last entry unpacked: what [`~Progress.go_on`] takes.

        Raises:
            `ValueError`: It is something else, or the state of a loader of another kind.
        """
        if not isinstance(entries, dict) or any(
            type(entries.get(name)) is not kind for name, kind in _ENTRIES.items()
        ):
            raise ValueError("what was found is not the state of a loader")
        try:
            inner = _unpack(entries["loader"])
        except Exception as error:  # whatever broken or foreign bytes bring up
            raise ValueError(f"the loader's own part of the state cannot be read: {reason_of(error)}") from error
        if (inner["state"] is not None) != self.keeps_state:
            had, has = ("had", "has none") if inner["state"] is not None else ("had none of its own", "has")
            raise ValueError(f"the loader that was saved {had} a state, and the one that is to go on {has}")
        return {**entries, "loader": inner}

    def go_on(self, entries: dict[str, Any]) -> None:
        """
        Go on from a saved progress.

        Args:
            entries (`dict[str, Any]`): What [`~Progress.check`] has returned.
        """
        inner = entries["loader"]
        holder = self.holder()
        # A stream goes on from any state with what follows it. Between epochs nothing does: it begins anew.
        in_epoch = entries["batches"] and not entries["is_last"]
        if inner["state"] is not None and (holder is self._loader or in_epoch):
            holder.load_state_dict(inner["state"])
            self._may_end_at_once = not in_epoch
        for generator, state in zip(self._generators(), inner["random"]["generators"]):
            generator.set_state(state)
        self.epochs.set(entries["epoch"])
        self.batches, self.samples = entries["batches"], entries["samples"]
        self._fields = Mark(entries["own_batches"], entries["in_replay"], inner["state"])
        self._is_last, self._cut_short = entries["is_last"], entries["cut_short"]
        self._end_state = None if entries["batches"] else inner["state"]
        self._random = inner["random"] if inner["mid_pass"] else None
        self._epochs_before = inner["epochs_before"]
        self._is_resumed = True

    def _reset(self) -> None:
        self.batches = self.samples = 0
        self._fields, self._is_last, self._random = Mark(), False, None
        self._end_state, self._cut_short = None, 0
        self._epochs_before = None

    def _generators(self) -> list[torch.Generator]:
        """The random number generators that the order of the samples may come from, besides torch's own."""
        found = [read(obj, "generator") for _, obj in walk_samplers(self._loader)]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _note_random_state(self) -> None:
        self._random = None if self.keeps_state else self._random_state()

    def _random_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "generators": [each.get_state() for each in self._generators()]}


def reason_of(error: Exception) -> str:
    """
    Say in one line why something could not be read.

    Args:
        error (`Exception`): What it has brought up, with a message of any length, or with none.

    Returns:
        `str`: The first line of the message, or else the name of the class.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _has_required_arguments(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def _pack(own: dict[str, Any]) -> bytes:
    # A line of JSON, and behind it the loader's own state, which can be anything.
    buffer = io.BytesIO()
    if own["state"] is not None:
        torch.save(_plain(own["state"]), buffer)
    random = own["random"]
    random = {"torch": _to_hex(random["torch"]), "generators": list(map(_to_hex, random["generators"]))}
    return json.dumps({**own, "state": None, "random": random}).encode() + b"\n" + buffer.getvalue()


def _unpack(packed: bytes) -> dict[str, Any]:
    line, _, state = packed.partition(b"\n")
    own = json.loads(line)
    random = own["random"]
    own["random"] = {"torch": _from_hex(random["torch"]), "generators": list(map(_from_hex, random["generators"]))}
    if state:
        # `weights_only`: what is read is data, whoever wrote it.
        own["state"] = _unplain(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
    return own


def _to_hex(random_state: torch.Tensor) -> str:
    return random_state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# numpy's arrays and Python's deques are data too, but torch does not read them back without executing something.
_ARRAY, _DEQUE = "__numpy_array__", "__deque__"


def _plain(data: Any) -> Any:
    if isinstance(data, numpy.generic):
        return data.item()
    if isinstance(data, numpy.ndarray):
        return {_ARRAY: torch.from_numpy(numpy.asarray(data, order="C"))}
    if isinstance(data, collections.deque):
        return {_DEQUE: [_plain(value) for value in data]}
    if isinstance(data, dict):
        return {_plain(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)) and not hasattr(data, "_fields"):
        return type(data)(_plain(value) for value in data)
    return data


def _unplain(data: Any) -> Any:
    if isinstance(data, dict):
        if data.keys() == {_ARRAY}:
            return data[_ARRAY].numpy()
        if data.keys() == {_DEQUE}:
            return collections.deque(_unplain(value) for value in data[_DEQUE])
        return {key: _unplain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_unplain(value) for value in data)
    return data
