# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""One state of each presharded loader a rank, beside what Accelerate saves."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
from accelerate.logging import get_logger
from accelerate.state import PartialState

from .agreement import agree_on_loading, can_speak
from .data_loader import PreshardedDataLoader
from .progress import reason_of


logger = get_logger(__name__)


def save_with_loaders(accelerator: accelerate.Accelerator) -> None:
    """
    Have the next `save_state`, and every one after it, save the states of presharded loaders too.

    Args:
        accelerator ([`~accelerate.Accelerator`]): Whose loaders are meant.
    """
    _register_once(
        _SaveHook(accelerator), accelerator._save_model_state_pre_hook, accelerator.register_save_state_pre_hook
    )


def load_with_loaders(accelerator: accelerate.Accelerator) -> None:
    """
    Have the next `load_state`, and every one after it, load the states of presharded loaders too.

    Args:
        accelerator ([`~accelerate.Accelerator`]): Whose loaders are meant.
    """
    _register_once(
        _LoadHook(accelerator), accelerator._load_model_state_pre_hook, accelerator.register_load_state_pre_hook
    )


def _register_once(hook: _Hook, registered: dict[Any, Any], register: Callable[[Any], Any]) -> None:
    if not any(type(other) is type(hook) for other in registered.values()):
        register(hook)


class _Hook:
    """Accelerate calls its hooks with the folder, which only it knows, and before it saves or loads anything."""

    def __init__(self, accelerator: accelerate.Accelerator):
        # Not itself, which holds its hooks: workers of a loader that was left end late when a cycle has to be found.
        self._accelerator = weakref.ref(accelerator)

    def files(self, folder: str | os.PathLike) -> dict[Path, PreshardedDataLoader]:
        accelerator = self._accelerator()
        rank = accelerator.process_index
        return {
            Path(folder) / f"presharded_loader_{number}_rank_{rank}.bin": loader
            for number, loader in enumerate(accelerator._dataloaders)
            if isinstance(loader, PreshardedDataLoader)
        }


class _SaveHook(_Hook):
    def __call__(self, models: list, weights: list, output_dir: str) -> None:
        files = self.files(output_dir)
        for path, loader in files.items():
            _write(_to_bytes(loader.state_dict()), path)
        if files:
            # When `save_state` has returned on one rank, what it has saved is there for all.
            PartialState().wait_for_everyone()


class _LoadHook(_Hook):
    def __call__(self, models: list, input_dir: str) -> None:
        files = self.files(input_dir)
        if not files:
            return
        found, problem = {}, None
        for path, loader in files.items():
            if not path.exists():
                continue
            try:
                found[loader] = loader.check_state_dict(_from_bytes(path.read_bytes()))
            except Exception as error:  # whatever a broken or foreign file brings up
                problem = f"{path.name}: {reason_of(error)}."
                break
        if problem is None and len(found) < len(files):
            missing = ", ".join(path.name for path, loader in files.items() if loader not in found)
            problem = f"{missing} is missing." if found else ""
        if _every_rank_has_found(problem, input_dir):
            for loader, checked in found.items():
                loader.go_on(checked)
        else:
            logger.warning(
                f"{input_dir} holds no state of the already sharded loaders, so they begin with epoch 0. Call their "
                "`set_epoch` and `skip_first_batches` to go on elsewhere."
            )


def _every_rank_has_found(problem: str | None, folder: str) -> bool:
    what = f"The state of the already sharded loaders in {folder}"
    state = PartialState()
    if can_speak(state.num_processes, state.process_index):
        return agree_on_loading(what, problem)
    if problem:
        raise ValueError(f"{what} cannot be loaded, and nothing was. {problem}")
    return problem is None


# A file is a line of JSON, and behind it the bytes that the entry "loader" holds.


def _to_bytes(state: dict[str, Any]) -> bytes:
    packed = b"".join(part["loader"] for part in state.values() if isinstance(part, dict))
    line = {key: {**part, "loader": None} if isinstance(part, dict) else part for key, part in state.items()}
    return json.dumps(line).encode() + b"\n" + packed


def _from_bytes(data: bytes) -> Any:
    line, _, packed = data.partition(b"\n")
    try:
        state = json.loads(line)
    except ValueError as error:
        raise ValueError("what was found is not the state of an already sharded loader") from error
    for part in state.values() if isinstance(state, dict) else ():
        if isinstance(part, dict):
            part["loader"] = packed
    return state


def _write(data: bytes, path: Path) -> None:
    # In one piece or not at all: a rank may be stopped at any moment. It does not wait for the disk, since nothing else
    # in the folder does: after a crash of the whole machine the model might be missing as well.
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
