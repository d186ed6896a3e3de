# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The examples, started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from shared import needs_an_end_of_groups


EXAMPLES = Path(__file__).parent.parent / "examples"


def launch(script: str, *options: str, ranks: int = 2) -> str:
    needs_an_end_of_groups()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    process = subprocess.run(
        [*command, str(EXAMPLES / script), "--cpu", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_digits(tmp_path):
    launch("digits.py", "--epochs", "1", "--report", str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    seen = [sample for rank in ranks for batch in rank["trained_on"] for sample in batch]
    # 1,797 images, of which every fifth is for evaluation; the sampler repeats one to make the ranks even.
    assert len(seen) == 1438 and len(set(seen)) == 1437
    assert sorted(ranks[0]["evaluated_on"]) == list(range(0, 1797, 5))


def test_resume(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch("resume.py", "--folder", str(whole))
    launch("resume.py", "--folder", str(parts), "--stop-at", "9")
    output = launch("resume.py", "--folder", str(parts))
    # Rank 1 has 7 batches, so every epoch has 7 steps.
    assert "Going on in epoch 1 behind batch 2." in output and "12 steps." in output
    for rank in range(2):
        before, after = (json.loads((parts / f"{part}_rank{rank}.json").read_text()) for part in ("before", "after"))
        assert before + after == json.loads((whole / f"after_rank{rank}.json").read_text())
        assert len(before) == 9
