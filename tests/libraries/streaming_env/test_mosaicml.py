# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""MosaicML Streaming, over shards that it has written: torch's loader, and its own."""

import tempfile
from pathlib import Path

import mosaicml  # noqa: F401 first, see there
import pytest
from reading import WORKERS, WORLD_SIZES, assert_every_sample_once, assert_goes_on, read_on_ranks
from recipes import recipe
from streaming import MDSWriter


# On two ranks and on three one sample is missing, and its rank repeats one of its own.
SAMPLES = list(range(23))

TORCH_LOADER = "MosaicML Streaming: `StreamingDataset`"
OWN_LOADER = "MosaicML Streaming: `StreamingDataLoader`"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mds")
    with MDSWriter(out=str(folder), columns={"id": "int", "x": "float64"}, size_limit=300) as writer:
        for sample in SAMPLES:
            writer.write({"id": sample, "x": 0.5 * sample})
    return folder


def shared_files() -> set[Path]:
    """What Streaming shares between ranks, and the locks for it."""
    return {file for folder in ("/dev/shm", tempfile.gettempdir()) for file in Path(folder).glob("[0-9]" * 6 + "_*")}


@pytest.fixture(autouse=True)
def clean_up():
    """Ranks of the pool end without a chance to clean up what they share."""
    before = shared_files()
    yield
    for file in shared_files() - before:
        file.unlink()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", [TORCH_LOADER, OWN_LOADER])
def test_every_sample_once(folder, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folder, workers, "mosaicml")
    assert_every_sample_once(ranks, SAMPLES)
    assert sum(len(step) for epochs in ranks for step in epochs[0].steps) == 24


@pytest.mark.parametrize("workers", WORKERS)
def test_goes_on_from_its_own_state(folder, tmp_path, workers):
    assert_goes_on(recipe(OWN_LOADER), folder, workers, tmp_path, "mosaicml")
