# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The same number of steps on every rank.

Three ways to go through a loader: `alone`, without a word to the other ranks; `counted`, to a number of steps that was
settled beforehand; and `together`, where the ranks find out with every step whether there is another one.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .agreement import Plan
from .batches import weight_of
from .channel import LONGEST, MOST_BYTES, Channel, Has, Heard, Pace, Turn, Word
from .epochs import OwnEpochs
from .skipping import Pass


class Step(NamedTuple):
    """
    One step of a rank.

    Args:
        batch (`Any`): What the loader has yielded.
        is_last (`bool`): Whether no step follows, on any rank that goes on in step with this one.
        is_replay (`bool`): Whether this rank has yielded the batch before in this epoch.
        ends_own (`bool`): Whether it is the last batch of the rank's own pass.
        mark ([`Mark`]): Where the rank's loader is behind this batch.
    """

    batch: Any
    is_last: bool
    is_replay: bool
    ends_own: bool
    mark: Mark


class Mark(NamedTuple):
    """
    Where a rank's loader is in an epoch.

    Args:
        batches (`int`): How many batches of the rank's own pass lie behind.
        in_replay (`bool`): Whether the batch is one of a replay, which follows when the pass has come to its end. In
            what is saved, also whether a replay comes next.
        state (`Any`): The loader's own state behind the batch, if it keeps one.
    """

    batches: int = 0
    in_replay: bool = False
    state: Any = None


_NOTHING = object()
_FAILED = object()


class Source:
    """
    The batches of one rank, from its own pass first, and then from replays of it for as long as they are needed.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The rank's own loader.
        start (`int`, *optional*, defaults to 0): At which step to begin.
        read_state (`Callable`, *optional*): Returns the loader's own state, if it keeps one.
        resumed (`tuple[int, Mark]`, *optional*):
            The step at which the loader was left, and where it was there. It goes on from there by itself if it keeps a
            state; without one it can only have been left in a replay.
        begin_order (`torch.Tensor`, *optional*):
            The random numbers with which the pass began in which the loader was left, see [`Pass`].
        on_pass (`Callable`, *optional*): Called before each pass over the loader, its own and every replay.
        may_end_at_once (`bool`, *optional*, defaults to `False`):
            Whether the loader goes on from the end of a pass. Some begin the next one with that, and others end once
            more before they do.
        epochs_before (`list[int]`, *optional*):
            The epochs that the loader counts by itself, see [`OwnEpochs`], as they were before the pass in which the
            loader was left. Defaults to what they are now.

    **Available attributes:**

        - **start** (`int`) -- As above.
        - **ended** (`bool`) -- Whether the rank's own pass has come to its end.
        - **end_state** (`Any`) -- The loader's own state then, if it keeps one.
        - **num_own** (`int`) -- How many batches of the rank's own pass have been read, or lie before what is read.
        - **epochs_before** (`list[int]`) -- As above.
        - **skipped_samples** (`int`) -- How many samples the steps that are skipped here hold, known with the first
          batch.
    """

    def __init__(
        self,
        loader: Any,
        start: int = 0,
        read_state: Callable[[], Any] | None = None,
        resumed: tuple[int, Mark] | None = None,
        begin_order: torch.Tensor | None = None,
        on_pass: Callable[[], None] | None = None,
        may_end_at_once: bool = False,
        epochs_before: list[int] | None = None,
    ):
        step, mark = resumed or (0, Mark())
        self._is_resumed = resumed is not None
        self._may_end_at_once = may_end_at_once
        self.start = max(start, step)
        self.skipped_samples = 0
        self._loader = loader
        self._read_state = read_state
        self._begin_order = begin_order
        self._on_pass = on_pass or (lambda: None)
        self.num_own, self.ended = mark.batches, mark.in_replay
        self.end_state = None
        # What lies between the step at which the loader was left and the one at which to begin.
        self._num_to_skip = self.start - step
        self._num_replayed = self.start - mark.batches if mark.in_replay else 0
        self._goes_on_in_replay = mark.in_replay and read_state is not None
        self._begins_replay = step == mark.batches
        self._own: Iterator[Any] | None = None
        self._replays: Iterator[Any] | None = None
        # Its own numbers of the epoch, as they have to be at the beginning of a pass, and in it.
        self._epochs = OwnEpochs(loader)
        self._epochs_in: list[int] | None = None
        self.epochs_before = self._epochs.read() if epochs_before is None else epochs_before

    def own(self) -> tuple[Any, tuple] | None:
        """
        Read the next batch of the rank's own pass, and the fields of a [`Mark`]; `None` when there is none left.

        The fields and not a `Mark`, and steps without their names in what follows: once a batch, names cost as much as
        all the rest.
        """
        if self.ended:
            return None
        if self._own is None:
            # Not when the source is made, but in the pass, where the other ranks hear of an error.
            opened = self._pass(self._num_to_skip)
            self._own = iter(opened)
            batch = next(self._own, _NOTHING)
            if batch is _NOTHING and self._may_end_at_once:
                opened = self._pass(self._num_to_skip)
                self._own = iter(opened)
                batch = next(self._own, _NOTHING)
            self._epochs_in = self._epochs.read()
            self.num_own += opened.skipped_batches
            self._num_replayed = self._num_to_skip - opened.skipped_batches
            self.skipped_samples = opened.skipped_samples
        else:
            batch = next(self._own, _NOTHING)
        if batch is _NOTHING:
            self.ended, self.end_state = True, self._state()
            return None
        self.num_own = number = self.num_own + 1
        return batch, (number, False, self._state())

    def replay(self) -> tuple[Any, Mark]:
        """Read the next batch of a replay, beginning anew as often as needed."""
        if self.own() is not None:
            raise RuntimeError(f"The loader was to yield {self.num_own - 1} batches, but it yields more.")
        if self._replays is None and self._goes_on_in_replay:
            # The loader was left in the middle of a replay and goes on there by itself. Some loaders do not go on from
            # the end of their own pass, but begin the next one, so that is where a replay begins.
            if self._begins_replay:
                self._epochs.write(self.epochs_before)
            self._replays = iter(self._loader)
            for _ in range(self._num_to_skip):
                self._next_replay()
        elif self._replays is None:
            self._epochs.write(self.epochs_before)
            self._replays = iter(self._pass(self._num_replayed % max(1, self.num_own)))
        return self._next_replay(), Mark(self.num_own, True, self._state())

    def _state(self) -> Any:
        # A copy, since batches are read ahead: some return what they go on to change.
        return None if self._read_state is None else copy.deepcopy(self._read_state())

    def _next_replay(self) -> Any:
        batch = next(self._replays, _NOTHING)
        # A loader that goes on from a state at the very end of a pass may take another pass to find that out.
        for _ in range(2 if self._is_resumed else 1):
            if batch is _NOTHING:
                self._epochs.write(self.epochs_before)
                self._replays = iter(self._pass(0))
                batch = next(self._replays, _NOTHING)
        if self._epochs_in is None:
            self._epochs_in = self._epochs.read()
        self._epochs.write(self._epochs_in)
        if batch is _NOTHING:
            raise RuntimeError(
                f"The loader has yielded {self.num_own} batches and yields none when it is iterated again, so there "
                "is nothing to repeat while other ranks go on. Give it an `__iter__` that starts anew, or pass "
                "`even_batches=False` and train under `join_uneven_inputs`."
            )
        return batch

    def _pass(self, num_to_skip: int) -> Pass:
        begin_order, self._begin_order = self._begin_order, None
        if begin_order is None:
            self._on_pass()
        return Pass(self._loader, num_to_skip, begin_order)

    @property
    def is_empty(self) -> bool:
        """Whether the rank's own pass has come to its end without a single batch."""
        return self.ended and self.num_own == 0


def alone(source: Source) -> Iterator[Step]:
    """
    Go through a rank's own pass, whatever the other ranks do.

    Args:
        source ([`Source`]): The rank's batches.

    Yields:
        [`Step`]: One for each batch. It is read one batch ahead, to know the last.
    """
    upcoming = source.own()
    while upcoming is not None:
        (batch, mark), upcoming = upcoming, source.own()
        yield batch, upcoming is None, False, upcoming is None, mark


def counted(source: Source, own: int, plan: Plan, say: Callable[[str], None]) -> Iterator[Step]:
    """
    Go through a rank's batches to a number of steps on which the ranks have settled.

    Args:
        source ([`Source`]): The rank's batches.
        own (`int`): How many batches the rank has of its own.
        plan ([`Plan`]): What the ranks have settled on, the number of steps included.
        say (`Callable`): Called with a sentence when the ranks begin to repeat batches, or stop with some left.

    Yields:
        [`Step`]: Equally many on every rank.

    Raises:
        `RuntimeError`: The loader has not yielded the number of batches that its length said.
    """
    steps = plan.steps()
    uneven = f"rank {plan.shortest_rank} has {plan.shortest} batches and rank {plan.longest_rank} has {plan.longest}"
    first_uneven, is_cut = max(source.start, plan.shortest), steps < plan.longest
    for number in range(source.start, steps):
        if number == first_uneven:
            say(
                f"{uneven}, so ranks without a batch repeat theirs from the beginning until all have made {steps} steps"
            )
        read = source.own() if number < own else source.replay()
        if read is None:
            raise RuntimeError(f"The loader was to yield {own} batches, but it has yielded {number}.")
        batch, mark = read
        ends_own, is_last = number + 1 == own, number + 1 == steps
        # Let the pass come to its end, as it would in a loop of the user's.
        if ends_own and source.own() is not None:
            raise RuntimeError(f"The loader was to yield {own} batches, but it yields more.")
        if is_last and is_cut:
            say(f"{uneven}, so all stop after {steps} steps, because of `drop_last=True`")
        yield batch, is_last, number >= own, ends_own, mark


def together(
    source: Source, channel: Channel, loader: str, pace: Pace, drop_last: bool, say: Callable[[str], None]
) -> Iterator[Step]:
    """
    Go through a rank's batches in step with all other ranks, which say beforehand for which steps they have a batch.

    They speak of a block of steps at once: of one step at first, of more where that pays, see [`Turn`]. While the user
    trains on one block, the word about the next is on its way, and the one behind that is read, a batch with every
    step. So nobody waits for a word, and up to three blocks are held, of one batch or of few bytes.

    A step for which some rank has no batch left is spoken of twice: with the first word the ranks hear that it will be
    taken, so those without a batch read one that they repeat, and with the second that all have one in hand. So a batch
    that cannot be read, whichever it is, is an error when its step comes, on all ranks at once, and not before.

    Args:
        source ([`Source`]): The rank's batches.
        channel ([`Channel`]): Over which the ranks speak.
        loader (`str`): The loader's name in messages.
        pace ([`Pace`]): What they have found out in earlier passes over the loader.
        drop_last (`bool`): Whether all stop with the first rank that has no batch, or go on with the last that has.
        say (`Callable`): Called with a sentence when the ranks begin to repeat batches, or stop with some left.

    Yields:
        [`Step`]: Equally many on every rank.

    Raises:
        `ValueError`: A rank has no batch at all while others have some.
        `RuntimeError`: A rank has failed, or has left its loop early.
    """
    world_size = channel.world_size
    turn = channel.begin(loader, pace)
    ahead = _Ahead(source, turn, world_size, drop_last)
    try:
        num_steps = 0
        block: _Block | None = ahead.next_block()
        while block is not None:
            upcoming = None
            for heard in block.heard:
                # Nothing here holds on to a batch that has been yielded.
                batch, mark, _ = block.batches.popleft()
                num_steps += 1
                is_last, is_replay = False, mark[1]
                if heard.own < world_size:
                    say(
                        f"{world_size - heard.own} of {world_size} ranks have no batch left for step {num_steps} of "
                        "this pass, so they repeat theirs from the beginning until the last has ended"
                    )
                if block.batches:
                    ahead.read()
                else:
                    if not block.is_final:
                        upcoming = ahead.next_block()
                    ending = block if upcoming is None else upcoming
                    if ending.failure is None and (upcoming is None or not upcoming.batches):
                        is_last = True
                        if ending.holders:
                            say(
                                f"{world_size - ending.holders} of {world_size} ranks have no batch left after "
                                f"{num_steps} steps, so all stop, because of `drop_last=True`"
                            )
                # The batch behind it has been read or looked for.
                ends_own = source.ended and not is_replay and mark[0] == source.num_own
                yield batch, is_last, is_replay, ends_own, mark
                del batch
            if block.failure is not None:
                raise block.failure
            block = upcoming
    except Exception as error:
        turn.fail(error)
        raise
    finally:
        ahead.close()
        turn.leave()


class _Read(NamedTuple):
    """A batch that has been read, where the loader is behind it, and how many bytes both take."""

    batch: Any
    mark: tuple
    weight: float


class _Block(NamedTuple):
    """
    Steps on which the ranks have agreed.

    Args:
        batches (`deque[_Read]`): The batches of the steps to take.
        heard (`list[Heard]`): What the ranks have for each of them.
        is_final (`bool`): Whether no step follows.
        holders (`int`): How many ranks have a batch of their own for the one that would follow, if none does.
        failure (`Exception` or `None`): Why none does, if it is because a rank cannot go on.
    """

    batches: deque[_Read]
    heard: list[Heard]
    is_final: bool
    holders: int
    failure: Exception | None


class _Ahead:
    """What a rank has read ahead of its steps, and what it has told the others of that."""

    def __init__(self, source: Source, turn: Turn, world_size: int, drop_last: bool):
        self._source = source
        self._turn = turn
        self._world_size = world_size
        self._fewest_holders = world_size if drop_last else 1
        # What has been read, of which nothing has been said, and of which the word is on its way. `None` stands behind
        # the end, and `_FAILED` for a batch that could not be read.
        self._unsaid: list[Any] = []
        self._said: list[Any] = []
        # How many of the next steps to speak of will be taken, though some rank has no batch of its own for them.
        self._num_agreed = 0
        self._weight = self._block_weight = self._last_weight = 0.0  # of all that is held, of the block, of a batch
        self._word: Word | None = None
        self._error: Exception | None = None

    @property
    def _limit(self) -> int:
        return min(LONGEST, self._turn.size + self._num_agreed)

    def read(self) -> bool:
        """Read one more batch of the block of which nothing has been said, unless it is complete."""
        # The first of a block is always read, and as many with it as there is memory for, if they weigh as the last did.
        is_heavy = bool(self._unsaid) and self._weight + self._last_weight > MOST_BYTES
        if is_heavy or len(self._unsaid) >= self._limit or self._error is not None:
            return False
        entry: Any = None
        try:
            read = self._source.own()
            if read is None and len(self._unsaid) < self._num_agreed:
                read = self._source.replay()
            if read is not None:
                # One of which nothing is known is as much as may be held.
                state = read[1][2]
                weight = weight_of(read[0]) + (0 if state is None else weight_of(state))
                self._last_weight = min(weight, MOST_BYTES + 1.0)
                self._weight += self._last_weight
                entry = _Read(*read, self._last_weight)
        except Exception as error:
            # Its step has not come yet, and the other ranks count on those before it.
            entry, self._error = _FAILED, error
        self._unsaid.append(entry)
        return True

    def next_block(self) -> _Block:
        """Wait for the word of all ranks about the next block, and say something about the one behind it."""
        # All of the last one have been yielded, or are about to be.
        self._weight -= self._block_weight
        if self._word is None:
            self._say()
        taken, is_final = 0, False
        while not taken and not is_final:
            heard = self._turn.hear(self._word)
            taken, is_final = self._settle(heard)
            said, self._said = self._said, []
            block = said[:taken]
            # Where this rank has come to its end, it has to look again whether it repeats a batch.
            self._unsaid = [each for each in said[taken:] + self._unsaid if each is not None]
            failure = None
            if is_final:
                self._turn.end()
                if heard[taken].failed:
                    failure = self._error if said[taken] is _FAILED else self._turn.failure(self._word)
            else:
                self._say()
        self._block_weight = sum(each.weight for each in block)
        return _Block(deque(block), heard[:taken], is_final, heard[taken].own if is_final else 0, failure)

    def _settle(self, heard: list[Heard]) -> tuple[int, bool]:
        """How many steps are taken now, and whether none follows."""
        goes_on = list(itertools.takewhile(lambda each: not each.failed and each.own >= self._fewest_holders, heard))
        taken = sum(1 for _ in itertools.takewhile(lambda each: each.own + each.replays == self._world_size, goes_on))
        is_final = taken == len(goes_on) < len(heard)
        self._num_agreed = max(len(goes_on), self._num_agreed) - taken
        return taken, is_final

    def _say(self) -> None:
        since = time.perf_counter()
        while self.read() and time.perf_counter() - since < self._turn.seconds:
            pass
        self._said, self._unsaid = self._unsaid[: self._limit], self._unsaid[self._limit :]
        self._word = self._turn.say(
            [self._has(each) for each in self._said],
            error=self._error,
            is_empty=self._source.is_empty,
            weight=self._last_weight,
        )

    @staticmethod
    def _has(entry: Any) -> Has:
        if entry is None:
            return Has.NOTHING
        if entry is _FAILED:
            return Has.FAILED
        return Has.REPLAY if entry.mark[1] else Has.OWN

    def close(self) -> None:
        """Let go of an error, which holds on to all that was there when it was raised."""
        self._error = None
