# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""This package's names in the place of Accelerate's, for code that builds its own `Accelerator`."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import accelerate
from accelerate.logging import get_logger

from . import __version__
from .accelerator import Accelerator
from .configuration import DataLoaderConfiguration
from .data_loader import prepare_data_loader, prepare_ordinary, skip_first_batches, skip_ordinary


logger = get_logger(__name__)

# Accelerate's object, and the one that takes its place.
_PAIRS = (
    (Accelerator.__base__, Accelerator),
    (DataLoaderConfiguration.__base__, DataLoaderConfiguration),
    (prepare_ordinary, prepare_data_loader),
    (skip_ordinary, skip_first_batches),
)
_OURS = {id(original): ours for original, ours in _PAIRS}
_ORIGINAL = {id(ours): original for original, ours in _PAIRS}

# The methods of Accelerate's `Accelerator` call these, when this package's overrides have decided already.
_LEFT = {("accelerate.accelerator", "prepare_data_loader"), ("accelerate.accelerator", "skip_first_batches")}


class Patch:
    """
    What [`patch_accelerate`] has replaced. As a context manager it is undone at the end of the `with` block.

    Args:
        replaced (`set[tuple[str, str]]`): The modules and the names in them that were replaced.
        kept (`set[tuple[str, str]]`): Those that held this package's objects before.
    """

    def __init__(self, replaced: set[tuple[str, str]], kept: set[tuple[str, str]]):
        self._replaced = replaced
        self._kept = kept

    def undo(self) -> None:
        """
        Give every module Accelerate's own names back. A second call does nothing, nor does the `undo` of a call that
        found the patch in place already.

        Modules that were imported in the meantime and have this package's objects from the patched `accelerate` get
        Accelerate's own too. What a module has imported from this package stays.
        """
        global _active
        if self is not _active:
            return
        _active = None
        _stop_announcing()
        for place, namespace, ours in list(_holders(_ORIGINAL)):
            if place in self._replaced or not (place in self._kept or _imports_us(*place, namespace)):
                namespace[place[1]] = _ORIGINAL[id(ours)]

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


_active: Patch | None = None


def patch_accelerate() -> Patch:
    """
    Put this package's `Accelerator`, `DataLoaderConfiguration`, `prepare_data_loader` and `skip_first_batches` in the
    place of Accelerate's own, so that code that builds its own `Accelerator`, such as the `Trainer` of transformers,
    leaves loaders alone that are already sharded.

    It takes effect at once, in every module that has imported one of these names already and in all that import one
    later. Call it at the top of the script. Objects that exist already stay what they are, and so does a subclass of
    `Accelerator` that was defined before: a warning names it. Subclasses that are defined later are subclasses of this
    package's `Accelerator`. What a function has stored in a local variable, a default value or an object is not found.

    This package's classes are subclasses of Accelerate's, so `isinstance` says yes to the new objects whichever of
    them it is asked about. An object made before is no instance of the class that `accelerate.Accelerator` is now.

    Returns:
        [`~patching.Patch`]: Its `undo()`, or the end of its `with` block, gives Accelerate's own names back. While the
        patch is in place, another call changes nothing, and neither does the `undo` of what it returns.

    Example:

    ```python
    >>> import accelerate
    >>> from accelerate_presharded import Accelerator, patch_accelerate

    >>> with patch_accelerate():
    ...     accelerate.Accelerator is Accelerator
    True
    >>> accelerate.Accelerator is Accelerator
    False
    ```
    """
    global _active
    if _active is not None:
        return Patch(set(), set())
    earlier = [subclass for subclass in Accelerator.__base__.__subclasses__() if subclass is not Accelerator]
    if earlier:
        names = ", ".join(f"`{subclass.__module__}.{subclass.__qualname__}`" for subclass in earlier)
        warnings.warn(
            f"{names} was defined before `patch_accelerate()` as a subclass of accelerate's own `Accelerator`, and "
            "shards every loader as before. Call `patch_accelerate()` before it is imported, or define it as a "
            "subclass of `accelerate_presharded.Accelerator`.",
            stacklevel=2,
        )
    kept = {place for place, _, _ in _holders(_ORIGINAL)}
    replaced = set()
    for place, namespace, original in list(_holders(_OURS)):
        if place not in _LEFT:
            namespace[place[1]] = _OURS[id(original)]
            replaced.add(place)
    _active = Patch(replaced, kept)
    return _active


def patch_and_announce(command: str) -> None:
    """
    Patch for a program that does not know of it, and say so once, when it makes its first `Accelerator`.

    Args:
        command (`str`): The command by which the user has asked for it.
    """
    if _active is not None:
        return
    patch_accelerate()
    make = Accelerator.__init__

    # Not at the import: many programs import Accelerate and never train. Ranks are known only afterwards.
    @functools.wraps(make)
    def make_and_announce(self, *args, **kwargs):
        _stop_announcing()
        make(self, *args, **kwargs)
        logger.warning(
            f"accelerate-presharded {__version__} is in the place of accelerate {accelerate.__version__} (by "
            f"`{command}`): DataLoaders that are already sharded across ranks are left alone."
        )

    Accelerator.__init__ = make_and_announce


def _stop_announcing() -> None:
    if "__init__" in vars(Accelerator):
        del Accelerator.__init__


def _holders(wanted: dict[int, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any], Any]]:
    """All places, as module and name, that hold one of these objects; not in this package, which needs both kinds."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == __package__ or not issubclass(type(module), types.ModuleType):
            continue
        # Modules that are loaded lazily would load on any ordinary access to an attribute, `__dict__` included.
        namespace = object.__getattribute__(module, "__dict__")
        for name, value in list(namespace.items()):
            if id(value) in wanted:
                yield (module_name, name), namespace, value


def _imports_us(module_name: str, _: str, namespace: dict[str, Any]) -> bool:
    """Whether a module's own code, outside of functions, imports from this package."""
    try:
        code = namespace["__loader__"].get_code(module_name)
        return any(name.partition(".")[0] == __package__ for name in code.co_names)
    except (KeyError, AttributeError, ImportError, SyntaxError, OSError):
        return False  # a notebook, or a module without code
