# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""WebDataset: a node splitter, a pipeline, and `WebLoader`, over tar files."""

import pytest
import torch
import webdataset
from reading import WORKERS, WORLD_SIZES, assert_every_sample_once, read_on_ranks, types_of_prepared
from recipes import recipe


# Seven files, at least one for each of two workers on three ranks, and not equally many for all.
SAMPLES = list(range(25))
NUM_FILES = 7

NODE_SPLITTER = "WebDataset: a node splitter"
PIPELINE = "WebDataset: a pipeline"
WEB_LOADER = "WebDataset: `WebLoader`"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tar")
    for number in range(NUM_FILES):
        with webdataset.TarWriter(str(folder / f"{number}.tar")) as writer:
            for sample in SAMPLES[number::NUM_FILES]:
                writer.write({"__key__": f"{sample:03}", "id": sample, "x.pth": torch.full((2,), 0.5 * sample)})
    return folder


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", [NODE_SPLITTER, PIPELINE, WEB_LOADER])
def test_every_sample_once(folder, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folder, workers, "webdataset")
    assert_every_sample_once(ranks, SAMPLES)


def test_web_loader_is_prepared_with_the_flag_only(folder):
    assert types_of_prepared(recipe(WEB_LOADER, flag=False), folder, "webdataset") == ["WebLoader"] * 2
    assert types_of_prepared(recipe(WEB_LOADER), folder, "webdataset") == ["PreshardedDataLoader"] * 2
