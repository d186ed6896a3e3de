# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""LitData, over chunks that it has written: its own loader, and torch's."""

import litdata
import pytest
from reading import WORKERS, WORLD_SIZES, assert_every_sample_once, assert_goes_on, read_on_ranks
from recipes import recipe


# One rank has half as many samples as the other, so it repeats them, and the next epoch is another one for both.
SAMPLES = list(range(23))

OWN_LOADER = "LitData: `StreamingDataLoader`"
TORCH_LOADER = "LitData: `DataLoader`"


def sample(number: int) -> dict:
    return {"id": number, "x": 0.5 * number}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("litdata")
    litdata.optimize(sample, SAMPLES, str(folder), chunk_size=3, num_workers=1, verbose=False)
    return folder


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", [OWN_LOADER, TORCH_LOADER])
def test_every_sample_once(folder, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folder, workers, "litdata")
    assert_every_sample_once(ranks, SAMPLES)


@pytest.mark.parametrize("workers", WORKERS)
def test_goes_on_from_its_own_state(folder, tmp_path, workers):
    assert_goes_on(recipe(OWN_LOADER), folder, workers, tmp_path, "litdata", stops=(1, 2, 3, 4, 6))
