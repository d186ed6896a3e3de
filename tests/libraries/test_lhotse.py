# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Lhotse: batches of a number of recordings, and of a total duration from buckets, over sound files."""

import lhotse
import numpy
import pytest
import soundfile
from reading import WORKERS, WORLD_SIZES, assert_every_sample_once, read_on_ranks
from recipes import recipe


SAMPLES = list(range(22))
RATE = 8000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    cuts = []
    for sample in SAMPLES:
        file = folder / f"{sample}.wav"
        seconds = 0.2 + 0.02 * sample
        soundfile.write(file, numpy.full(int(RATE * seconds), 0.01 * sample), RATE)
        cuts.append(lhotse.Recording.from_file(file, recording_id=str(sample)).to_cut())
    cuts = lhotse.CutSet.from_cuts([cut.with_id(str(sample)) for sample, cut in zip(SAMPLES, cuts)])
    cuts.to_file(folder / "cuts.jsonl.gz")
    return folder


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("heading", ["Lhotse: simple batches", "Lhotse: buckets"])
def test_every_sample_once(folder, heading, world_size, workers):
    ranks = read_on_ranks(world_size, recipe(heading), folder, workers, "lhotse", "lhotse.dataset")
    assert_every_sample_once(ranks, SAMPLES)
