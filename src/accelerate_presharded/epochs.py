# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Who hears of a new epoch, and who set it last: the wrapper or the user."""

from __future__ import annotations

from typing import Any

from .sharding import read, walk_datasets, walk_samplers


# The names under which samplers and datasets keep the epoch they were last told.
_EPOCH_NAMES = ("epoch", "_epoch")

# The name under which loaders and datasets count their own passes.
_COUNTED = "current_epoch"


class _Told(int):
    """
    An epoch number that was passed on by [`Epochs`].

    It equals the plain number in every way but its type, so a plain number found in its place was written by someone
    else: the user called `set_epoch`, perhaps with the same number as before. It pickles as a plain `int`.
    """

    def __reduce__(self):
        return (int, (int(self),))


class Epochs:
    """
    The number of the epoch that a loader is in, and the objects under it that have a `set_epoch`.

    These are its samplers, however deeply wrapped, and its datasets. A user who calls `set_epoch` on one of them is
    not overruled: that number becomes the loader's epoch, and the others hear of it.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches):
            The loader to look at. It is not iterated.

    **Available attributes:**

        - **current** (`int`) -- The number of the epoch that is running or comes next, from 0.
    """

    def __init__(self, loader: Any):
        self.current = 0
        found = {id(obj): obj for walk in (walk_samplers, walk_datasets) for _, obj in walk(loader)}
        self._listeners = [_Listener(obj) for obj in found.values() if callable(read(obj, "set_epoch"))]

    def begin(self) -> None:
        """Start an epoch: adopt the number that the user has set, if any, and tell everyone who has not heard it."""
        by_user = [listener.epoch() for listener in self._listeners if listener.set_by_user()]
        if by_user:
            self.current = by_user[0]
        self._tell(overrule=False)

    def set(self, epoch: int) -> None:
        """
        Set the number of the epoch and tell everyone at once, whatever they had been told before.

        Args:
            epoch (`int`): The number of the epoch that comes next.
        """
        self.current = epoch
        self._tell(overrule=True)

    def _tell(self, overrule: bool) -> None:
        for listener in self._listeners:
            listener.tell(self.current, overrule)
        # Only now: a wrapper may have passed the number on to one that comes before it in the list.
        for listener in self._listeners:
            listener.mark()


class OwnEpochs:
    """
    The epochs that a loader and its datasets count by themselves, one more with each pass, as LitData's do.

    A replay is the same epoch again. Where some ranks replay and others do not, it must not count, or the next epoch
    would not be the same one on all ranks.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches): The loader to look at.
    """

    def __init__(self, loader: Any):
        found = [loader, *(obj for _, obj in walk_datasets(loader))]
        self._counting = [vars(obj) for obj in found if type((read(obj, "__dict__") or {}).get(_COUNTED)) is int]

    def read(self) -> list[int]:
        """Return the present numbers."""
        return [own[_COUNTED] for own in self._counting]

    def write(self, epochs: list[int]) -> None:
        """Go back to numbers that were read before."""
        for own, epoch in zip(self._counting, epochs):
            own[_COUNTED] = epoch


class _Listener:
    def __init__(self, obj: Any):
        self.obj = obj
        self.told: int | None = None
        self.seen: int | None = None
        # Samplers start at 0, so a 0 is nobody's word; any other number was set before the loader was prepared.
        if self.epoch() == 0:
            self.mark()

    def __getstate__(self) -> dict[str, Any]:
        # The marks do not travel with the numbers, so it is noted here that there was one.
        return {**self.__dict__, "_marked": not self.set_by_user()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marked = state.pop("_marked")
        self.__dict__.update(state)
        if marked:
            self.mark()

    def epoch(self) -> int | None:
        for name in _EPOCH_NAMES:
            epoch = read(self.obj, name)
            if isinstance(epoch, int) and not isinstance(epoch, bool):
                return int(epoch)
        return None

    def set_by_user(self) -> bool:
        name = self._own_name()
        if name is not None:
            return not isinstance(vars(self.obj)[name], _Told)
        return self.epoch() != self.seen

    def tell(self, epoch: int, overrule: bool) -> None:
        if self.set_by_user():
            # Also the case of a sampler to which a wrapper, told before it, has already passed the epoch on.
            heard = not overrule or self.epoch() == epoch
        else:
            heard = self.told == epoch
        if not heard:
            self.obj.set_epoch(epoch)
        self.told = epoch

    def mark(self) -> None:
        self.seen = self.epoch()
        name = self._own_name()
        if name is not None:
            vars(self.obj)[name] = _Told(vars(self.obj)[name])

    def _own_name(self) -> str | None:
        # Only a number in the instance's own dictionary can be marked; one behind a property cannot.
        own = read(self.obj, "__dict__") or {}
        names = (name for name in _EPOCH_NAMES if isinstance(own.get(name), int))
        return next((name for name in names if not isinstance(own[name], bool)), None)
