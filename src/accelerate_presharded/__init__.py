# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Train with Accelerate on data that is already sharded across ranks."""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .auditing import RankReport, ShardingReport, audit
    from .configuration import DataLoaderConfiguration
    from .data_loader import PreshardedDataLoader, prepare_data_loader, skip_first_batches
    from .patching import patch_accelerate
    from .sharding import Sharding, find_sharding, is_already_sharded, register_sharding


__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "DataLoaderConfiguration",
    "PreshardedDataLoader",
    "RankReport",
    "Sharding",
    "ShardingReport",
    "audit",
    "find_sharding",
    "is_already_sharded",
    "patch_accelerate",
    "prepare_data_loader",
    "register_sharding",
    "skip_first_batches",
]

# The names are imported when they are asked for: the command line has to be quick, and a script that it runs may still
# set environment variables that torch and Accelerate read when they are imported.
_MODULES = {
    "Accelerator": "accelerator",
    "DataLoaderConfiguration": "configuration",
    "PreshardedDataLoader": "data_loader",
    "RankReport": "auditing",
    "Sharding": "sharding",
    "ShardingReport": "auditing",
    "audit": "auditing",
    "find_sharding": "sharding",
    "is_already_sharded": "sharding",
    "patch_accelerate": "patching",
    "prepare_data_loader": "data_loader",
    "register_sharding": "sharding",
    "skip_first_batches": "data_loader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
