# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""transformers: the samplers of its Trainer, and those that came with earlier ones."""

import math

import datasets
import pytest
import transformers
from reading import WORKERS, WORLD_SIZES, assert_every_sample_once, read_on_ranks
from recipes import recipe


if not transformers.is_torch_available():
    pytest.skip("this version of transformers needs a newer torch", allow_module_level=True)

SAMPLES = list(range(22))
STREAMED = list(range(24))  # what a stream pads nobody can count beforehand, so this divides into batches

GROUPED = "transformers: `DistributedLengthGroupedSampler`"
LOOP = "transformers: `DistributedSamplerWithLoop`"
SHARD = "transformers: `ShardSampler`"
REBALANCE = "transformers: `BatchRebalanceSampler`"
STREAM = "transformers: `IterableDatasetShard`"

MODULES = ("datasets", "transformers.trainer_pt_utils")


def columns(samples):
    return {"id": samples, "length": [1 + sample % 7 for sample in samples]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    saved, streamed = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("parquet")
    datasets.Dataset.from_dict(columns(SAMPLES)).save_to_disk(saved)
    datasets.Dataset.from_dict(columns(STREAMED)).to_parquet(streamed / "0.parquet")
    return saved, streamed


def repeated(heading: str, world_size: int) -> dict[str, int]:
    """What the samplers repeat by their documentation, in batches of 4."""
    length = len(SAMPLES)
    if heading == SHARD:  # up to a full batch for all ranks
        return {"padding": -length % (4 * world_size)}
    if heading == GROUPED:  # up to the same number of samples for all ranks
        return {"padding": -length % world_size}
    if heading == LOOP:  # the same, and then each rank its own up to a full batch
        return {"padding": -length % world_size, "repeats": -math.ceil(length / world_size) % 4}
    return {}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", [GROUPED, LOOP, SHARD, REBALANCE])
def test_every_sample_once(folders, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folders[0], workers, *MODULES)
    assert_every_sample_once(ranks, SAMPLES, **repeated(heading, world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_sample_of_a_stream_once(folders, world_size):
    ranks = read_on_ranks(world_size, recipe(STREAM), folders[1], 0, *MODULES)
    assert_every_sample_once(ranks, STREAMED)
