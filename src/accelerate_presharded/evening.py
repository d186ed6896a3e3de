# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The same number of steps on every rank.

Three ways to go through a loader: `alone`, without a word to the other ranks; `counted`, to a number of steps that was
settled beforehand; and `together`, where the ranks find out with every step whether there is another one.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .agreement import Plan, empty_message, report, reports
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
        self._read_state = read_state or (lambda: None)
        self._begin_order = begin_order
        self._on_pass = on_pass or (lambda: None)
        self._num_own, self.ended = mark.batches, mark.in_replay
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

    def own(self) -> tuple[Any, Mark] | None:
        """Read the next batch of the rank's own pass, and where the loader is then; `None` when there is none left."""
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
            self._num_own += opened.skipped_batches
            self._num_replayed = self._num_to_skip - opened.skipped_batches
            self.skipped_samples = opened.skipped_samples
        else:
            batch = next(self._own, _NOTHING)
        if batch is _NOTHING:
            self.ended, self.end_state = True, self._read_state()
            return None
        self._num_own += 1
        return batch, Mark(self._num_own, False, self._read_state())

    def replay(self) -> tuple[Any, Mark]:
        """Read the next batch of a replay, beginning anew as often as needed."""
        if self.own() is not None:
            raise RuntimeError(f"The loader was to yield {self._num_own - 1} batches, but it yields more.")
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
            self._replays = iter(self._pass(self._num_replayed % max(1, self._num_own)))
        return self._next_replay(), Mark(self._num_own, True, self._read_state())

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
                f"The loader has yielded {self._num_own} batches and yields none when it is iterated again, so there "
                "is nothing to repeat while other ranks go on. Give it an `__iter__` that starts anew, or pass "
                "`even_batches=False` and train under `join_uneven_inputs`."
            )
        return batch

    def _pass(self, num_to_skip: int) -> Pass:
        begin_order, self._begin_order = self._begin_order, None
        if begin_order is None:
            self._on_pass()
        return Pass(self._loader, num_to_skip, begin_order)

    def ends_own(self, mark: Mark) -> bool:
        """Tell whether what is behind a batch is the end of the rank's own pass, as far as it has been read."""
        return self.ended and mark.batches == self._num_own

    @property
    def is_empty(self) -> bool:
        """Whether the rank's own pass has come to its end without a single batch."""
        return self.ended and self._num_own == 0


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
        yield Step(batch, upcoming is None, False, upcoming is None, mark)


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
    for number in range(source.start, steps):
        if number == max(source.start, plan.shortest):
            say(
                f"{uneven}, so ranks without a batch repeat theirs from the beginning until all have made {steps} steps"
            )
        read = source.own() if number < own else source.replay()
        if read is None:
            raise RuntimeError(f"The loader was to yield {own} batches, but it has yielded {number}.")
        batch, mark = read
        # Let the pass come to its end, as it would in a loop of the user's.
        if number + 1 == own and source.own() is not None:
            raise RuntimeError(f"The loader was to yield {own} batches, but it yields more.")
        if number + 1 == steps < plan.longest:
            say(f"{uneven}, so all stop after {steps} steps, because of `drop_last=True`")
        yield Step(batch, number + 1 == steps, number >= own, number + 1 == own, mark)


def together(
    source: Source, channel: Channel, loader: str, drop_last: bool, say: Callable[[str], None]
) -> Iterator[Step]:
    """
    Go through a rank's batches in step with all other ranks, which say with every step whether they have a batch.

    It is read two batches ahead: the word about the step after the next is on its way while the user trains on the
    one before, so that nobody waits for it.

    Args:
        source ([`Source`]): The rank's batches.
        channel ([`Channel`]): Over which the ranks speak.
        loader (`str`): The loader's name in messages.
        drop_last (`bool`): Whether all stop with the first rank that has no batch, or go on with the last that has.
        say (`Callable`): Called with a sentence when the ranks begin to repeat batches, or stop with some left.

    Yields:
        [`Step`]: Equally many on every rank.

    Raises:
        `ValueError`: A rank has no batch at all while others have some.
        `RuntimeError`: A rank has failed, or has left its loop early.
    """
    turn = channel.begin(loader)

    def takes_place(holders: int) -> bool:
        return holders == channel.world_size if drop_last else holders > 0

    def ahead() -> tuple[Any, Word]:
        # Read a batch and tell the others whether there was one.
        own = source.own()
        return own, turn.say(own is not None, is_empty=source.is_empty)

    def in_hand(own: tuple[Any, Mark] | None) -> tuple[Any, Mark, bool]:
        # Before the next word is said, for if there is nothing to repeat, that is what the others have to hear.
        return (*own, False) if own is not None else (*source.replay(), True)

    try:
        own, word = ahead()
        holders = turn.hear(word)
        if takes_place(holders):
            current = in_hand(own)
            own, word = ahead()
        num_steps = 0
        while takes_place(holders):
            num_steps += 1
            if holders < channel.world_size:
                say(
                    f"{channel.world_size - holders} of {channel.world_size} ranks have no batch left for step "
                    f"{num_steps} of this pass, so they repeat theirs from the beginning until the last has ended"
                )
            batch, mark, is_replay = current
            ends_own = not is_replay and own is None
            holders = turn.hear(word)
            is_last = not takes_place(holders)
            if not is_last:
                current = in_hand(own)
                own, word = ahead()
            else:
                turn.end()
                if holders:
                    say(
                        f"{channel.world_size - holders} of {channel.world_size} ranks have no batch left after "
                        f"{num_steps} steps, so all stop, because of `drop_last=True`"
                    )
            yield Step(batch, is_last, is_replay, ends_own, mark)
        turn.end()
    except Exception as error:
        turn.fail(error)
        raise
    finally:
        turn.leave()


class Channel:
    """
    Over which the ranks of a process group add up one integer with every step: their own gloo group, beside the one
    that trains.
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

    def begin(self, loader: str) -> Turn:
        """Begin a pass over a loader with this name."""
        self.num_turns += 1
        return Turn(self, self.num_turns, loader)


class Word(NamedTuple):
    """What was said about one step: its number among all, the sum to be, and the sum on its way."""

    number: int
    total: torch.Tensor
    work: dist.Work


class Turn:
    """
    One pass in which the ranks speak over a [`Channel`].

    Each rank's integer has four digits: that it has a batch, that it has failed, that it has left, and in which turn
    it is. The base is larger than the number of ranks, so the digits of the sum are the sums of the digits.
    """

    # Turns are told apart modulo this, so that the digit of the turn stays small.
    _TURNS = 61

    def __init__(self, channel: Channel, number: int, loader: str):
        self._channel = channel
        self._mark = number % self._TURNS
        self._loader = loader
        self._open = True
        self._first: int | None = None

    def say(self, has_batch: bool, is_empty: bool = False) -> Word:
        """Say whether this rank has a batch for the next step of which nothing was said."""
        if is_empty:
            report(self._channel.num_words, "empty")
        return self._send(has=has_batch)

    def fail(self, error: Exception) -> None:
        """Say that this rank has failed, instead of whether it has a batch, unless others have said so of themselves."""
        if not self._open:
            return
        self._open = False
        reason = f"raised {type(error).__name__}: {error}"
        # A dying worker makes torch raise an error from a signal handler, so one more may come in here.
        for attempt in (lambda: report(self._channel.num_words, reason), lambda: self._send(failed=True)):
            for _ in range(3):
                with contextlib.suppress(Exception):
                    attempt()
                    break

    def end(self) -> None:
        """Note that the pass has come to its end on all ranks, so nothing more is said."""
        self._open = False

    def leave(self) -> None:
        """Say that this rank goes on no further, if the pass has not come to its end."""
        # A loop that is left by `break` closes its iterator at once, on all ranks at the same place if all leave. What
        # the garbage collector closes is closed whenever it happens to run, so nothing can be said in its name.
        if not self._open or _collecting or not dist.is_initialized():
            return
        self._open = False
        with contextlib.suppress(Exception):
            report(self._channel.num_words, "left its loop")
            self._send(left=True)

    def hear(self, word: Word) -> int:
        """
        Wait for the word of all ranks about a step.

        Args:
            word ([`Word`]): What [`~Turn.say`] returned for that step.

        Returns:
            `int`: How many ranks have a batch for it.
        """
        world_size = self._channel.world_size
        try:
            word.work.wait()
        except RuntimeError:
            # It may be from a signal handler, by which torch reports the death of a worker, and not from the group.
            self._complain_if_gone(word)
            raise
        rest, has = divmod(int(word.total), world_size + 1)
        rest, failed = divmod(rest, world_size + 1)
        turns, left = divmod(rest, world_size + 1)
        if failed or left:
            self._open = False
            texts = "; ".join(f"rank {rank} {text}" for rank, text in reports(word.number) if text != "empty")
            raise RuntimeError(f"{self._loader}: {texts or 'a rank has left its loop'}, so this rank cannot go on.")
        if turns != self._mark * world_size:
            self._open = False
            raise RuntimeError(
                f"{self._loader}: the ranks are not in the same pass, so a rank must have left its loop early while "
                "others went on. Leave it on all ranks at the same step, or pass `even_batches=False`."
            )
        if 0 < has < world_size and word.number == self._first:
            empty = [rank for rank, text in reports(word.number) if text == "empty"]
            if empty:
                self._open = False
                full = next(rank for rank in range(world_size) if rank not in empty)
                raise ValueError(empty_message(self._loader, empty, full))
        return has

    def _complain_if_gone(self, word: Word) -> None:
        try:
            word.work.wait()
        except RuntimeError as error:
            self._open = False
            raise RuntimeError(
                f"{self._loader}: a rank has gone before the ranks could agree on the next step. Its own output says why."
            ) from error

    def _send(self, has: bool = False, failed: bool = False, left: bool = False) -> Word:
        base = self._channel.world_size + 1
        number = self._channel.num_words
        self._channel.num_words += 1
        if self._first is None:
            self._first = number
        total = torch.tensor(has + base * failed + base**2 * left + base**3 * self._mark)
        return Word(number, total, dist.all_reduce(total, group=self._channel.group, async_op=True))


_collecting = False


def _note_collection(phase: str, info: dict) -> None:
    global _collecting
    _collecting = phase == "start"


gc.callbacks.append(_note_collection)
