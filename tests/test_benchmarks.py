# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""A small run of every benchmark, so that none rots. What is counted has to be right; no time is looked at."""

import math
import re

import pytest

from benchmarks import ranks
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness import Figure, Row, alternate, ratio, slowest
from benchmarks.sections import sections


COUNTED = {"iteration": 1, "reading": 3, "skipping": 1, "agreeing": 2}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_small_run(name):
    rows = BENCHMARKS[name](quick=True)
    assert rows
    for row in rows:
        values = (row.figure.median, row.figure.low, row.figure.high)
        assert all(math.isfinite(value) for value in values), row
        assert row.unit != "x" or min(values) > 0, row
    counted = [row for row in rows if row.bound == "exactly"]
    assert len(counted) == COUNTED.get(name, 0)
    for row in counted:
        assert row.kept, row


def test_what_is_written(tmp_path, capsys):
    main(["--quick", "--only", "detection", "--output", str(tmp_path)])
    page = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert re.search(
        r"^\| detection, wrapped ten deep \| measured \| \S+ ms \|.* at most 0.2 ms \|", page, re.MULTILINE
    )
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "detection, wrapped ten deep" in capsys.readouterr().out


def test_the_sections_of_a_step(fresh_state):
    found = sections()
    assert min(found.values()) > 0


def test_a_ratio_is_taken_round_by_round():
    # Twice as slow in each round, while the machine gets slower and slower.
    times = {"slow": [2.0, 20.0, 200.0], "fast": [1.0, 10.0, 100.0]}
    assert ratio(times, "slow", "fast") == Figure(2.0, 2.0, 2.0)


def test_the_slowest_rank_counts():
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 5.0]}


def test_each_variant_is_called_once_in_a_round():
    called = []
    variants = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    times = alternate(variants, rounds=3, warmup=1)
    assert [len(times["a"]), len(times["b"])] == [3, 3]
    assert [sorted(called[start : start + 2]) for start in range(0, 8, 2)] == [["a", "b"]] * 4


@pytest.mark.parametrize(
    "bound, values, kept",
    [
        ("at most", (1.049, 1.0, 1.2), True),
        ("at most", (1.056, 1.0, 1.2), False),
        ("at least", (1.05, 1.0, 1.2), True),
        ("at least", (1.04, 1.0, 1.2), False),
        ("exactly", (1.05, 1.05, 1.05), True),
        ("exactly", (0.0, 0.0, 0.0), False),
    ],
)
def test_a_target_is_kept_or_missed(bound, values, kept):
    assert Row("what", "against", Figure(*values), 1.05, bound).kept is kept


def fail_on_the_second():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("lost")
    return "first"


def test_a_failing_rank_is_named():
    with pytest.raises(RuntimeError, match="rank 1: (?s:.*)KeyError: 'lost'") as error:
        ranks.launch(2, fail_on_the_second, timeout=60)
    assert "fail_on_the_second" in str(error.value)
