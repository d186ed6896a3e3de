# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Train with Accelerate on data that is already sharded across ranks."""

from .accelerator import Accelerator
from .audit import RankReport, ShardingReport, audit
from .configuration import DataLoaderConfiguration
from .data_loader import PreshardedDataLoader, prepare_data_loader, skip_first_batches
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
    "prepare_data_loader",
    "register_sharding",
    "skip_first_batches",
]
