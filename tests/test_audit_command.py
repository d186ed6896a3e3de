# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The command `audit` as a user runs it: its output, its exit status, its errors and its picture."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from accelerate_presharded.audit_command import add_parser, overview
from accelerate_presharded.audit_ranks import Outcome, UsageError, _make_loader


FACTORIES = r"""
import os
import time

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accelerate_presharded import PreshardedDataLoader


def sampled():
    print("a word of the factory's own")
    return DataLoader(range(16), batch_size=2, sampler=DistributedSampler(range(16), shuffle=False))


def own(accelerator):
    first = 8 * accelerator.process_index
    rows = [{"id": number, "x": 1.0} for number in range(first, first + 8)]
    return DataLoader(rows, batch_size=2)


def broken(accelerator):
    if accelerator.process_index == 1:
        raise KeyError("no such shard")
    return DataLoader(range(4))


def refused():
    sampler = DistributedSampler(range(12), num_replicas=3, rank=int(os.environ["RANK"]), shuffle=False)
    return DataLoader(range(12), batch_size=2, sampler=sampler)


class Slow(IterableDataset):
    def __iter__(self):
        yield 0
        os.write(2, f"slow {os.getpid()}\n".encode())  # in one piece
        time.sleep(600)


def slow():
    return DataLoader(Slow(), batch_size=1)


def asks(batch_size):
    return DataLoader(range(4), batch_size)


def pair():
    return DataLoader(range(4)), DataLoader(range(4))


def prepared():
    return PreshardedDataLoader(DataLoader(range(4)))


value = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    (folder / "factories.py").write_text(FACTORIES)
    return folder


def start(folder, *arguments):
    command = [sys.executable, "-m", "accelerate_presharded", "audit", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def audited(folder, *arguments):
    process = start(folder, *arguments)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def test_a_sampler_that_is_found(folder):
    status, output, errors = audited(folder, "factories.py:sampled", "--num-processes", "2", "--plot", "seen.png")
    assert status == 0, errors
    lines = {line.split("  ")[0]: line.split()[-3:] for line in output.splitlines()}
    assert lines["rank 0: steps"] == ["4", "2", "4"]
    assert lines["rank 1: samples"] == ["8", "4", "8"]
    assert lines["distinct samples, all ranks"] == ["16", "8", "16"]
    assert lines["missed"] == ["0", "8", "0"]
    assert "Before prepare: Every sample once: 16 samples on 2 ranks.\n" in output
    assert "After accelerate: Sharded twice: each epoch covers 50 % of the data (8 of 16 samples).\n" in output
    assert "After accelerate_presharded: Every sample once: 16 samples on 2 ranks.\n" in output
    # No colours and no bars in a pipe, and what the factory prints is apart.
    assert "\x1b" not in output and "a word of the factory's own" not in output
    assert "a word of the factory's own" in errors and "Reading" not in errors

    from matplotlib.image import imread

    picture = imread(folder / "seen.png")
    assert picture.shape[0] > 500 and picture.shape[1] > 1000
    colours = {tuple(colour) for colour in np.round(picture[..., :3] * 255).astype(int).reshape(-1, 3)}
    # Seen once, and seen by no rank.
    assert (0x00, 0x72, 0xB2) in colours and (0, 0, 0) in colours


def test_own_data_as_json_by_key_from_a_module(folder):
    arguments = ("factories:own", "--num-processes", "3", "--key", "id", "--json")
    status, output, _ = audited(folder, *arguments)
    report = json.loads(output)
    assert status == 1 and report["complete"] is False
    assert (report["factory"], report["num_processes"]) == ("factories:own", 3)
    stages = report["stages"]
    assert list(stages) == ["before", "accelerate", "accelerate_presharded"]
    assert stages["before"]["complete"] and stages["before"]["distinct"] == 24
    for stage in ("accelerate", "accelerate_presharded"):
        # Of each rank's four batches every third: two on rank 0, and one more on rank 1, each with those of rank 0's.
        assert not stages[stage]["complete"] and stages[stage]["missed"] == 24 - stages[stage]["distinct"] > 12
        assert "`already_sharded=True`" in stages[stage]["advice"]
        assert stages[stage]["told_apart_by"] == "the key 'id'"
    status, output, _ = audited(folder, *arguments, "--already-sharded", "true", "--max-batches", "2")
    last = json.loads(output)["stages"]["accelerate_presharded"]
    assert status == 0 and last["distinct"] == 12 and last["max_batches"] == 2


def test_an_error_in_one_rank_is_shown_once(folder):
    status, output, errors = audited(folder, "factories.py:broken")
    assert (status, output) == (1, "")
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.count("KeyError: 'no such shard'\n") == 2  # in the first line, and below the traceback
    assert "Rank 1 failed" in errors and "in broken" in errors
    assert "_make_loader" not in errors


def test_an_error_in_a_stage_is_its_result(folder):
    status, output, _ = audited(folder, "factories.py:refused", "--json")
    stages = json.loads(output)["stages"]
    assert status == 1
    assert stages["before"]["distinct"] == 8
    assert "distinct" in stages["accelerate"]
    assert list(stages["accelerate_presharded"]) == ["error"]
    assert "ValueError" in stages["accelerate_presharded"]["error"]


def test_ranks_that_hang_are_given_up(folder):
    status, output, errors = audited(folder, "factories.py:slow", "--timeout", "2", "--json")
    assert status == 1
    error = json.loads(output)["stages"]["before"]["error"]
    assert "It hangs: ranks 0, 1" in error and "2 seconds" in error
    assert no_process_of(errors)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks(folder, number):
    process = start(folder, "factories.py:slow")
    lines = []
    while sum(line.startswith("slow ") for line in lines) < 2:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode in (130, 143) and output == ""
    assert "Traceback" not in errors
    assert no_process_of("".join(lines))


def no_process_of(errors):
    """Whether the processes that the factory has named are gone."""
    numbers = [int(line.split()[1]) for line in errors.splitlines() if line.startswith("slow ")]
    assert len(numbers) == 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{number}").exists() for number in numbers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    return True


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("factories.py:nothing", "no function 'nothing'"),
        ("factories.py:value", "is no function"),
        ("factories.py:asks", "asks for batch_size"),
        ("factories.py:pair", "returns a tuple"),
        ("factories.py:prepared", "prepared"),
        ("nowhere:sampled", "no module 'nowhere'"),
    ],
)
def test_what_is_no_factory(folder, factory, words, monkeypatch, fresh_state):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError, match=re.escape(words)):
        _make_loader(factory, accelerator=None)


def test_no_factory_is_a_usage_error(folder):
    status, output, errors = audited(folder, "factories.py:nothing", "--num-processes", "1", "--json")
    assert (status, output) == (2, "")
    assert "no function 'nothing'" in errors and "Traceback" not in errors


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["audit", *arguments])


@pytest.mark.parametrize("factory", ["factories.py", "factories.py:", ":sampled", "nowhere.py:sampled"])
def test_a_wrong_name_is_a_usage_error(factory, capsys):
    parsed = parse(factory)
    assert parsed.handler(parsed) == 2
    assert factory.split(":")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a:b", "--num-processes", "0"],
        ["a:b", "--max-batches", "-1"],
        ["a:b", "--plot", "seen.txt"],
        ["a:b", "--plot", "nowhere/seen.png"],
        ["a:b", "--already-sharded", "perhaps"],
        ["a:b", "--unknown"],
    ],
)
def test_wrong_options_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        parse(*arguments)
    assert error.value.code == 2 and "usage:" in capsys.readouterr().err


def test_keys_are_names_or_indices():
    assert [parse("a:b", "--key", text).key for text in ("id", "0", "-1")] == ["id", 0, -1]


def test_many_ranks_share_a_line():
    rank = {"batches": 3, "samples": 6, "distinct": 6, "repeats": 0}
    report = {"distinct": 6, "seen_by_several_ranks": 0, "seen_twice_by_one_rank": 0, "missed": None}
    ranks = [{**rank, "rank": number, "batches": 3 + number % 2} for number in range(64)]
    rows = overview({"before": Outcome(report={**report, "ranks": ranks}), "accelerate": Outcome(error="hangs")})
    assert len(rows) < 10
    assert ["steps, all ranks", "3 to 4", "-"] in rows
    assert ["missed", "?", "-"] in rows
