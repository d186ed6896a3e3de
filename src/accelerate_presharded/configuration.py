# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The default for every loader that an `Accelerator` prepares."""

from __future__ import annotations

import dataclasses

from accelerate.utils import DataLoaderConfiguration as _DataLoaderConfiguration


@dataclasses.dataclass
class DataLoaderConfiguration(_DataLoaderConfiguration):
    """
    Accelerate's [`~utils.DataLoaderConfiguration`] with one setting more; all others are its own.

    Args:
        already_sharded (`bool`, *optional*):
            Whether the loaders given to [`Accelerator.prepare`] are already sharded across ranks: `True` leaves them
            alone, `False` shards them as Accelerate always did, `None` detects it for each. What is said in a call of
            `prepare` goes before it.

    Example:

    ```python
    >>> from accelerate_presharded import Accelerator, DataLoaderConfiguration

    >>> accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(already_sharded=True))
    ```
    """

    already_sharded: bool | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Whether the loaders are already sharded across ranks: `True` leaves them alone, `False` shards "
            "them, `None` detects it for each."
        },
    )
