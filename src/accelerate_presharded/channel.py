# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What the ranks say to each other while they go through a loader: whether they have a batch for the steps to come."""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from .agreement import empty_message, report, reports


# How many steps one word may be about.
LONGEST = 64
# By how much that number changes at once, and after how many steps at the earliest.
_FACTOR, _PATIENCE = 4, 16
# How many words are said before the first step, see `together`.
_AHEAD = 3
# How soon after a word the next one comes, in seconds, where they are said of more steps at once, and of fewer. A word
# takes less than a hundredth of the first.
_SOON, _LATE = 0.05, 0.8
# How many bytes of batches a rank may hold for that.
MOST_BYTES = 2**25


class Has(enum.Enum):
    """What a rank has for a step: a batch of its own, one that it repeats, none, or one that could not be read."""

    OWN = enum.auto()
    REPLAY = enum.auto()
    NOTHING = enum.auto()
    FAILED = enum.auto()


class Heard(NamedTuple):
    """How many ranks have a batch of their own for a step, one that they repeat, and one that could not be read."""

    own: int
    replays: int = 0
    failed: int = 0


class Channel:
    """
    Over which the ranks of a process group add up some integers: their own gloo group, beside the one that trains.
    """

    _of_group: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> Channel:
        """
        Return the channel of the default process group. The first call has to be made by all ranks at once.

        Returns:
            [`Channel`]: One for all loaders.
        """
        world = dist.group.WORLD
        if world not in cls._of_group:
            cls._of_group[world] = cls()
        return cls._of_group[world]

    def __init__(self):
        self.group = dist.new_group(backend="gloo")
        self.world_size = dist.get_world_size()
        self.num_turns = 0
        self.num_words = 0

    def begin(self, loader: str, pace: Pace) -> Turn:
        """Begin a pass over a loader with this name, at the pace to which earlier passes over it have come."""
        self.num_turns += 1
        return Turn(self, self.num_turns, loader, pace)


@dataclass
class Pace:
    """
    What the ranks have found out in the passes over a loader that have come to their end.

    Args:
        size (`int`, *optional*, defaults to 1): About how many steps they speak at once.
        num_words (`int`, *optional*, defaults to 0): How many words of that size have been timed.
        seconds (`float`, *optional*, defaults to 0): How long they took.
    """

    size: int = 1
    num_words: int = 0
    seconds: float = 0.0


class Word(NamedTuple):
    """What was said: its number among all words, the sums to be, and the sums on their way."""

    number: int
    sums: torch.Tensor
    work: dist.Work


class Turn:
    """
    One pass in which the ranks speak over a [`Channel`].

    A word is about `size` steps, in a first pass about one to begin with, and about fewer where a rank has not read as
    many. Where words follow each other fast, they are said of more steps at once, as long as what has to be read ahead
    for that is small on every rank, and of fewer again where they follow each other slowly. All ranks learn of that with
    the word itself, and change together.

    Args:
        channel ([`Channel`]): Over which to speak.
        number (`int`): The number of the pass among all of them, the same on all ranks.
        loader (`str`): The loader's name in messages.
        pace ([`Pace`]): With which to begin, and which is brought up to date at the end.

    **Available attributes:**

        - **size** (`int`) -- About how many steps the next word is.
        - **seconds** (`float`) -- For how long to read batches before it is said, if there is one at least.
    """

    # Passes are told apart modulo this.
    _TURNS = 61

    def __init__(self, channel: Channel, number: int, loader: str, pace: Pace):
        self.size = pace.size
        self.seconds = _SOON
        self._pace = pace
        self._channel = channel
        self._pass = number % self._TURNS
        self._loader = loader
        self._open = True
        self._first: int | None = None
        # What a rank has for a step is one digit of a number, so that the sum over all ranks counts each of them.
        self._base = base = channel.world_size + 1
        self._digits = {Has.NOTHING: 0, Has.OWN: 1, Has.REPLAY: base, Has.FAILED: base**2}
        self._unknown = base**3
        # Those are not timed.
        self._num_ahead = _AHEAD
        self._num_words, self._since = pace.num_words, time.perf_counter() - pace.seconds

    def say(
        self, steps: Sequence[Has], error: Exception | None = None, is_empty: bool = False, weight: float = 0
    ) -> Word:
        """
        Say what this rank has for the next of the steps that have not been taken.

        Args:
            steps (`Sequence[Has]`): One entry for each step that it knows of, at least one, and up to `LONGEST`.
            error (`Exception`, *optional*): Why a batch could not be read.
            is_empty (`bool`, *optional*, defaults to `False`): Whether this rank has no batch at all.
            weight (`float`, *optional*, defaults to 0): How many bytes a batch takes.

        Returns:
            [`Word`]: What [`~Turn.hear`] waits for.
        """
        if Has.FAILED in steps:
            report(self._channel.num_words, _reason(error))
        elif is_empty:
            report(self._channel.num_words, "empty")
        entries = [self._digits[each] for each in steps]
        entries += [self._unknown] * (LONGEST - len(entries))
        return self._send(entries, changes=self._change(weight))

    def fail(self, error: Exception) -> None:
        """Say that this rank cannot go on, instead of the next word, unless the pass is over or others are to blame."""
        if not self._open:
            return
        self._open = False
        # A dying worker makes torch raise an error from a signal handler, so one more may come in here.
        for attempt in (
            lambda: report(self._channel.num_words, _reason(error)),
            lambda: self._send(leaves=True),
        ):
            for _ in range(3):
                with contextlib.suppress(Exception):
                    attempt()
                    break

    def end(self) -> None:
        """Note that the pass comes to its end on all ranks, so nothing more is said."""
        self._open = False
        # The same size and number on all of them, since they have heard the same words.
        self._pace.size, self._pace.num_words = self.size, self._num_words
        self._pace.seconds = time.perf_counter() - self._since

    def leave(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Say that this rank goes on no further, if the pass has not come to its end."""
        # What is left open until the interpreter ends is closed when the names of this module are gone.
        if _is_finalizing():
            return
        # A loop that is left by `break` closes its iterator at once, on all ranks at the same place if all leave. What
        # the garbage collector closes is closed whenever it happens to run, so nothing can be said in its name.
        if not self._open or _collecting or not dist.is_initialized():
            return
        self._open = False
        with contextlib.suppress(Exception):
            report(self._channel.num_words, "left its loop")
            self._send(leaves=True)

    def hear(self, word: Word) -> list[Heard]:
        """
        Wait for the word of all ranks about some steps.

        Args:
            word ([`Word`]): What [`~Turn.say`] returned for them.

        Returns:
            `list[Heard]`: One entry for each of the steps that all ranks know of, at least one.

        Raises:
            `RuntimeError`: A rank has left, is in another pass, or is gone.
            `ValueError`: A rank has no batch at all while others have some.
        """
        world_size = self._channel.world_size
        try:
            word.work.wait()
        except RuntimeError:
            # It may be from a signal handler, by which torch reports the death of a worker, and not from the group.
            self._complain_if_gone(word)
            raise
        left, marks, grow, shrink, *sums = word.sums.tolist()
        if left:
            self._open = False
            raise self.failure(word)
        if marks != self._mark() * world_size:
            self._open = False
            raise RuntimeError(
                f"{self._loader}: the ranks are not in the same pass, so a rank must have left its loop early while "
                "others went on. Leave it on all ranks at the same step, or pass `even_batches=False`."
            )
        base = self._base
        known = itertools.takewhile(lambda each: each < self._unknown, sums)
        heard = [Heard(each % base, each // base % base, each // base**2) for each in known]
        first = heard[0]
        if word.number == self._first and not first.failed and 0 < first.own < world_size:
            empty = [rank for rank, text in reports(word.number) if text == "empty"]
            if empty:
                self._open = False
                full = next(rank for rank in range(world_size) if rank not in empty)
                raise ValueError(empty_message(self._loader, empty, full))
        if shrink:
            self.size = max(1, self.size // _FACTOR)
        elif grow == world_size:
            self.size = min(LONGEST, self.size * _FACTOR)
        return heard

    def failure(self, word: Word) -> RuntimeError:
        """Make the error of a rank that cannot go on because of what others have said of themselves."""
        texts = "; ".join(f"rank {rank} {text}" for rank, text in reports(word.number) if text != "empty")
        return RuntimeError(f"{self._loader}: {texts or 'a rank has left its loop'}, so this rank cannot go on.")

    def _complain_if_gone(self, word: Word) -> None:
        try:
            word.work.wait()
        except RuntimeError as error:
            self._open = False
            raise RuntimeError(
                f"{self._loader}: a rank has gone before the ranks could agree on the next step. Its own output says why."
            ) from error

    def _change(self, weight: float) -> int:
        """Whether this rank would speak of more steps at once, 1, or of fewer, -1."""
        now = time.perf_counter()
        if self._num_ahead:
            self._num_ahead -= 1
            self._since = now - self._pace.seconds
            return 0
        self._num_words += 1
        if self._num_words <= _PATIENCE // self.size:
            return 0
        seconds = (now - self._since) / self._num_words
        self._num_words, self._since = 0, now
        if seconds > _LATE:
            return -1
        return int(seconds < _SOON and 3 * self.size * _FACTOR * weight <= MOST_BYTES)

    def _mark(self) -> int:
        # The ranks change their size together, so if one has another it is out of step.
        return self._pass + self._TURNS * self.size

    def _send(self, steps: Sequence[int] = (0,) * LONGEST, leaves: bool = False, changes: int = 0) -> Word:
        number = self._channel.num_words
        self._channel.num_words += 1
        if self._first is None:
            self._first = number
        # Equally many integers in every word, so that ranks which are not in the same pass can hear that they are not.
        header = [int(leaves), self._mark(), int(changes > 0), int(changes < 0)]
        sums = torch.tensor([*header, *steps])
        return Word(number, sums, dist.all_reduce(sums, group=self._channel.group, async_op=True))


def _reason(error: Exception | None) -> str:
    return f"raised {type(error).__name__}: {error}"


_collecting = False


def _note_collection(phase: str, info: dict) -> None:
    global _collecting
    _collecting = phase == "start"


gc.callbacks.append(_note_collection)
