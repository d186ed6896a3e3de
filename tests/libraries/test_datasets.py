# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Hugging Face Datasets: streams and map-style datasets, cut by `split_dataset_by_node` and by `shard`."""

import pytest
from reading import (
    WORKERS,
    WORLD_SIZES,
    assert_every_sample_once,
    assert_goes_on,
    assert_loses_samples,
    read_on_ranks,
    write_datasets,
)
from recipes import recipe


# Over two ranks the files divide evenly and the samples do not, over three it is the other way about.
SAMPLES = list(range(21))
NUM_FILES = 4

STREAM = "Datasets: a stream, split by node"
CUT_STREAM = "Datasets: a stream, cut with `shard`"
MAP_STYLE = "Datasets: a map-style dataset, split by node"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    streamed, saved = write_datasets(tmp_path_factory, SAMPLES, NUM_FILES)
    return {STREAM: streamed, CUT_STREAM: streamed, MAP_STYLE: saved}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", [STREAM, CUT_STREAM, MAP_STYLE])
def test_every_sample_once(folders, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folders[heading], workers, "datasets")
    assert_every_sample_once(ranks, SAMPLES)


def test_a_cut_stream_needs_the_flag(folders):
    assert_loses_samples(recipe(CUT_STREAM, flag=False), folders[CUT_STREAM], SAMPLES, "datasets")


def test_a_map_style_split_needs_the_flag_and_is_warned_of(folders):
    log = assert_loses_samples(recipe(MAP_STYLE, flag=False), folders[MAP_STYLE], SAMPLES, "datasets")
    warnings = [message for message in log if "already_sharded=True" in message]
    assert len(warnings) == 1 and "rank 0" in warnings[0] and "rank 1" in warnings[0]


def test_a_stream_goes_on_from_its_own_state(folders, tmp_path):
    assert_goes_on(recipe(STREAM), folders[STREAM], 0, tmp_path, "datasets")
