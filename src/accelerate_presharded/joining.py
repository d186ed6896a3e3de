# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`join_uneven_inputs` for presharded loaders, which have no batch sampler of Accelerate's to switch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import accelerate

from .data_loader import PreshardedDataLoader


@contextlib.contextmanager
def join_with_presharded(
    accelerator: accelerate.Accelerator,
    join: Callable[..., AbstractContextManager],
    joinables: list[Any],
    even_batches: bool | None,
) -> Iterator[None]:
    """
    Join uneven inputs as Accelerate does, with presharded loaders among those that were prepared.

    Args:
        accelerator ([`~accelerate.Accelerator`]): With which the loaders were prepared.
        join (`Callable`): Accelerate's own `join_uneven_inputs`, which is left to all other loaders and to the models.
        joinables (`list[torch.distributed.algorithms.Joinable]`): The models or optimizers to join.
        even_batches (`bool`, *optional*): For this time, whether all ranks make the same number of steps.

    Yields:
        `None`
    """
    loaders = accelerator._dataloaders
    others = [loader for loader in loaders if not isinstance(loader, PreshardedDataLoader)]

    @contextlib.contextmanager
    def without_presharded() -> Iterator[None]:
        accelerator._dataloaders = others
        try:
            yield
        finally:
            accelerator._dataloaders = loaders

    joined = join(joinables, even_batches=even_batches)
    changed = (
        []
        if even_batches is None or not _joins(accelerator)
        else [(loader, loader.even_batches) for loader in loaders if isinstance(loader, PreshardedDataLoader)]
    )
    with contextlib.ExitStack() as stack:
        with without_presharded():
            joined.__enter__()

        def leave(*error: Any) -> bool | None:
            with without_presharded():
                return joined.__exit__(*error)

        stack.push(leave)
        for loader, before in changed:
            stack.callback(setattr, loader, "even_batches", before)
            loader.even_batches = even_batches
        yield


def _joins(accelerator: accelerate.Accelerator) -> bool:
    kind = accelerator.distributed_type.value
    # Accelerate has a property for it since version 1.10.
    return getattr(accelerator, "multi_device", kind.startswith("MULTI_") and kind != "MULTI_CPU")
