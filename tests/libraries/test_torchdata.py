# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""torchdata: stateful loaders over a stream and with the stateful sampler, and `nodes.Loader`."""

import pytest
from reading import (
    WORKERS,
    WORLD_SIZES,
    assert_every_sample_once,
    assert_goes_on,
    read_on_ranks,
    types_of_prepared,
    write_datasets,
)
from recipes import recipe


SAMPLES = list(range(21))
NUM_FILES = 6

STREAM = "torchdata: `StatefulDataLoader` over a stream"
SAMPLER = "torchdata: `StatefulDistributedSampler`"
NODES = "torchdata: `nodes.Loader`"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    streamed, saved = write_datasets(tmp_path_factory, SAMPLES, NUM_FILES)
    return {STREAM: streamed, SAMPLER: saved, NODES: saved}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", [STREAM, SAMPLER, NODES])
def test_every_sample_once(folders, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folders[heading], workers, "datasets", "torchdata.nodes")
    assert_every_sample_once(ranks, SAMPLES, padding=-len(SAMPLES) % world_size if heading == SAMPLER else 0)


def test_nodes_are_prepared_with_the_flag_only(folders):
    modules = ("datasets", "torchdata.nodes")
    assert types_of_prepared(recipe(NODES, flag=False), folders[NODES], *modules) == ["Loader"] * 2
    assert types_of_prepared(recipe(NODES), folders[NODES], *modules) == ["PreshardedDataLoader"] * 2


@pytest.mark.parametrize(("heading", "workers"), [(STREAM, 0), (STREAM, 2), (SAMPLER, 2), (NODES, 0)])
def test_goes_on_from_its_own_state(folders, tmp_path, heading, workers):
    assert_goes_on(recipe(heading), folders[heading], workers, tmp_path, "datasets", "torchdata.nodes")
