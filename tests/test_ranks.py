"""Tests of tests/ranks.py, on which every test with more than one rank relies."""

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from ranks import Failure, RankError, run
from torch.utils.data import DataLoader, Dataset


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def total(value: float) -> float:
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor)
    return tensor.item()


def rank() -> int:
    return dist.get_rank()


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index**2


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# What a call gives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_ranks_are_joined(world_size):
    assert run(world_size, lambda: total(rank() + 1)) == [world_size * (world_size + 1) / 2] * world_size


def test_a_world_needs_a_rank():
    with pytest.raises(ValueError, match="world_size"):
        run(0, rank)


def test_arguments_closures_and_functions_of_this_module():
    offset = torch.tensor([10.0])

    def function(factor, *, shift):
        return factor * rank() + shift + offset

    assert torch.equal(torch.cat(run(2, function, 3, shift=0.5)), torch.tensor([10.5, 13.5]))


def test_results_keep_the_classes_of_this_module():
    results = run(2, lambda dataset: (dataset, Squares()), Squares())
    assert all(type(dataset) is Squares for result in results for dataset in result)
    assert results[0][0][3] == 9


def test_accelerate_finds_its_launcher():
    def function():
        accelerator = Accelerator(cpu=True)
        state = accelerator.state
        return (
            str(accelerator.distributed_type),
            state.num_processes,
            state.process_index,
            state.local_process_index,
            str(accelerator.device),
            accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
        )

    assert run(3, function) == [
        ("DistributedType.MULTI_CPU", 3, index, index, "cpu:0", [0, 1, 2]) for index in range(3)
    ]
    assert run(2, lambda: str(PartialState(cpu=True).distributed_type)) == ["DistributedType.MULTI_CPU"] * 2


def test_prepared_model_trains():
    def function():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.full((1, 1), rank() + 1.0)).sum())
        optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()]

    first, second = run(2, function)
    assert first == second


def test_environment_of_a_launcher():
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR ACCELERATE_USE_CPU OMP_NUM_THREADS".split()
    results = run(2, lambda: [os.environ[name] for name in names])
    assert results == [[index, index, "2", "2", "127.0.0.1", "true", "1"] for index in ("0", "1")]
    assert run(2, lambda: (torch.get_num_threads(), int(os.environ["MASTER_PORT"]) > 0)) == [(1, True)] * 2


def test_environment_of_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_PYTEST", "yes")
    monkeypatch.chdir(tmp_path)

    def function():
        names = ("OF_PYTEST", "OF_CALL", "ACCELERATE_USE_CPU", "PYTHONMALLOC", "GLIBC_TUNABLES")
        return [os.environ.get(name) for name in names], os.getcwd()

    env = {"OF_CALL": "1", "ACCELERATE_USE_CPU": None}
    own = [os.environ.get(name) for name in ("PYTHONMALLOC", "GLIBC_TUNABLES")]
    assert run(1, function, env=env) == [(["yes", "1", None, *own], str(tmp_path))]
    assert run(1, function) == [(["yes", None, "true", *own], str(tmp_path))]
    assert "OF_CALL" not in os.environ


def test_random_numbers_repeat_but_differ_between_ranks():
    def function():
        return torch.rand(1).item(), random.random()

    first, second = run(2, function), run(2, function)
    assert first == second
    assert first[0][0] != first[1][0] and first[0][1] != first[1][1]


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_data_loader_workers(context):
    def function():
        # Persistent workers are still there when the function returns.
        loader = DataLoader(
            Squares(), batch_size=2, num_workers=2, multiprocessing_context=context, persistent_workers=True
        )
        return [batch.tolist() for _ in range(2) for batch in loader]

    # Workers that are not forked import torch, which takes seconds.
    world_size = 2 if context == "fork" else 1
    assert run(world_size, function) == [[[0, 1], [4, 9], [16]] * 2] * world_size


# What fails ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises():
    def function():
        print("about to fail", flush=True)
        if rank() == 1:
            raise KeyError("no such thing")
        return total(1)  # waits for rank 1 in vain

    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(3, function, grace=0.5)
    assert time.monotonic() - started < 10
    message = str(caught.value)
    assert message.startswith("3 of 3 ranks failed: [1, 0, 2]\n--- rank 1: KeyError: 'no such thing'")
    assert 'raise KeyError("no such thing")' in message and "test_ranks.py" in message
    assert "about to fail" in message
    failure = caught.value.errors[1]
    assert (failure.type_name, failure.message) == ("KeyError", "'no such thing'")
    assert failure.traceback.rstrip().endswith("KeyError: 'no such thing'")
    assert "ranks.py" not in failure.traceback.replace("test_ranks.py", "")
    assert caught.value.errors[0].type_name == "Hung"
    assert "0.5 s after rank 1 failed" in caught.value.errors[0].message
    assert "in total" in caught.value.errors[0].traceback
    assert run(3, lambda: total(1)) == [3.0] * 3


def test_others_may_finish_within_the_grace():
    def function():
        if rank() == 1:
            sys.exit("leaving")
        time.sleep(0.3)
        return "finished"

    finished, failure = run(2, function, outcomes=True)
    assert finished == "finished"
    assert (failure.type_name, failure.message) == ("SystemExit", "leaving")


@pytest.mark.parametrize(
    "die, message",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os._exit(0), "exited with code 0"),
    ],
)
def test_a_rank_that_dies(die, message):
    def function():
        if rank() == 0:
            print("last words", flush=True)
            die()
        time.sleep(60)

    first, second = run(2, function, grace=0.1, outcomes=True)
    assert first.type_name == "Died" and first.message.startswith(message)
    assert "last words" in first.output
    assert second.type_name == "Hung"
    with pytest.raises(RankError, match=message):
        run(2, function, grace=0.1)
    assert run(2, lambda: total(1)) == [2.0, 2.0]


@linux
def test_what_a_dead_rank_leaves_behind_dies_too():
    def function():
        loader = DataLoader(Squares(), num_workers=2, persistent_workers=True)
        iter(loader)
        escaped = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [escaped.pid, *(worker.pid for worker in loader._iterator._workers)]

    started = time.monotonic()
    _, pids = run(2, function, outcomes=True)
    assert len(pids) == 3 and gone(pids, seconds=0)
    assert len(children(ranks._Pool.current.process.pid)) == 1  # the store
    assert time.monotonic() - started < 20


def test_a_rank_that_hangs():
    def wait_for_ever():
        while True:
            time.sleep(1)

    def function():
        if rank() == 1:
            wait_for_ever()
        return rank()

    with pytest.raises(RankError) as caught:
        run(2, function, timeout=1)
    assert list(caught.value.errors) == [1]
    failure = caught.value.errors[1]
    assert (failure.type_name, failure.message) == ("Hung", "no result after 1 s")
    assert "in wait_for_ever" in str(caught.value) and "_be_a_rank" not in str(caught.value)
    assert run(2, lambda: total(1)) == [2.0, 2.0]


def test_a_rank_that_stops_cannot_say_where():
    started = time.monotonic()
    (failure,) = run(1, lambda: os.kill(os.getpid(), signal.SIGSTOP), timeout=0.5, outcomes=True)
    assert failure.type_name == "Hung" and "did not say" in failure.traceback
    assert time.monotonic() - started < 10
    assert run(1, rank) == [0]


def test_outcomes():
    def function():
        if rank() == 1:
            raise ValueError("one")
        if rank() == 2:
            os._exit(2)
        return "result"

    result, raised, died = run(3, function, outcomes=True)
    assert result == "result"
    assert isinstance(raised, Failure) and (raised.type_name, raised.message) == ("ValueError", "one")
    assert isinstance(died, Failure) and died.type_name == "Died"


def test_results_that_cannot_be_sent():
    with pytest.raises(RankError, match="pickle"):
        run(2, lambda: (value for value in range(3)))
    with pytest.raises(TypeError, match="pickle"):
        run(2, lambda value: value, (value for value in range(3)))
    assert run(2, rank) == [0, 1]


def test_long_output_is_cut():
    def function():
        print("x" * 100_000)
        raise ValueError("end")

    (failure,) = run(1, function, outcomes=True)
    assert len(failure.output) < 5_000 and failure.output.startswith("[...]xxx")


def test_output_does_not_reach_pytest(capfd):
    def function():
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.system("echo from a child")

    run(2, function)
    assert capfd.readouterr() == ("", "")


# What one call leaves to the next ------------------------------------------------------------------------------------


def test_unmatched_collectives_do_not_reach_the_next_call():
    def function():
        group = dist.new_group([0, 1])
        # Each rank waits for the other one in another group.
        dist.all_reduce(torch.ones(1), group=group if rank() else None, async_op=True)
        return rank()

    for _ in range(3):
        assert run(2, function) == [0, 1]
        assert run(2, lambda: total(1)) == [2.0, 2.0]


def test_keys_in_the_store_do_not_reach_the_next_call():
    def function():
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        return store.add("how often", 1), dist.distributed_c10d._get_default_store().add("how often", 1)

    assert run(1, function) == run(1, function) == [(1, 1)]


def test_changes_to_a_process_do_not_reach_the_next_call():
    def function():
        found = (
            PartialState._shared_state != {},
            hasattr(torch, "left_behind"),
            logging.getLogger().level == logging.DEBUG,
            os.environ.get("LEFT_BEHIND"),
            len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0,
        )
        Accelerator(cpu=True)
        torch.left_behind = True
        logging.getLogger().setLevel(logging.DEBUG)
        os.environ["LEFT_BEHIND"] = "1"
        return found

    assert run(2, function) == run(2, function)


# What the pool is made of --------------------------------------------------------------------------------------------


@linux
def test_the_fork_server_has_one_thread():
    run(1, lambda: pytest.__version__)
    server = ranks._Pool.current.process.pid
    tasks = [Path(f"/proc/{server}/task/{task}") for task in os.listdir(f"/proc/{server}/task")]
    # The allocator of pyarrow has one of its own, which sees to forks itself.
    assert len([task for task in tasks if "jemalloc" not in (task / "comm").read_text()]) == 1


@linux
def test_what_pytest_has_imported_is_imported_once():
    def function():
        return pytest.__name__ in sys.modules, os.getppid()

    run(1, function)
    assert run(1, lambda: (("py" + "test") in sys.modules, os.getppid())) == [(True, ranks._Pool.current.process.pid)]


@linux
def test_a_call_leaves_no_process():
    run(3, rank)
    server = ranks._Pool.current.process.pid
    assert len(children(server)) == 1  # the store
    assert not [entry for entry in ranks._Pool.current.directory.iterdir() if entry.is_dir()]


@linux
def test_recovers_from_the_loss_of_its_own_processes(monkeypatch):
    monkeypatch.setattr(ranks, "PRELOAD", ("torch",))  # starts faster
    for victim in ("server", "store"):
        run(1, rank)
        server = ranks._Pool.current.process.pid
        (store,) = children(server)
        before = ranks._Pool.current.directory

        def function(pid):
            os.kill(pid, signal.SIGKILL)
            time.sleep(60)

        with pytest.raises(RuntimeError, match="died"):
            run(2, function, {"server": server, "store": store}[victim])
        assert gone([server, store])
        assert not before.exists()
    run(1, rank)
    os.kill(ranks._Pool.current.process.pid, signal.SIGKILL)  # and between two calls
    time.sleep(0.2)
    assert run(2, lambda: total(1)) == [2.0, 2.0]
    ranks.shutdown()  # the next test has the usual one


def test_an_interrupted_call(monkeypatch):
    # What ctrl-C does: an exception at any place, here while waiting for the ranks.
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranks._Pool, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(2, time.sleep, 60)
    with monkeypatch.context() as patch:
        patch.setattr(ranks._Pool, "_wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(2, time.sleep, 60)
    assert run(2, lambda: total(1)) == [2.0, 2.0]


SCRIPT = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import ranks
from torch.utils.data import DataLoader

ranks.PRELOAD = ("torch",)

def function():
    loader = DataLoader(range(4), num_workers=2, persistent_workers=True)
    iter(loader)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(sys.path[-1] + "/" + os.environ["RANK"], "w").close()
    time.sleep(1000)

sys.path.append(sys.argv[2])
if sys.argv[3] == "idle":
    ranks.run(2, len, "")
    open(sys.argv[2] + "/0", "w").close()
    time.sleep(1000)
ranks.run(2, function, timeout=1000)
"""


@linux
@pytest.mark.parametrize(
    "state, signal_number", [("idle", signal.SIGKILL), ("busy", signal.SIGKILL), ("busy", signal.SIGINT)]
)
def test_no_process_survives_pytest(state, signal_number, tmp_path):
    directory = tmp_path / "started"
    directory.mkdir()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, script, os.path.dirname(ranks.__file__), directory, state],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    expected = {"idle": ["0"], "busy": ["0", "1"]}[state]
    pids = []
    try:
        deadline = time.monotonic() + 60
        while sorted(os.listdir(directory)) != expected:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        pids = children(process.pid)
        # The server and the store; two ranks, each with two workers and a process that has left its group.
        assert len(pids) == {"idle": 2, "busy": 10}[state]
        os.killpg(process.pid, signal_number)
        process.wait(20)
        assert gone(pids)
        assert not list(tmp_path.glob("ranks-*"))
    finally:
        for pid in [process.pid, *pids]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait(20)


def test_two_sessions_at_once():
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv[1]); import ranks; ranks.PRELOAD = ('torch',)\n"
        "for _ in range(5): print(ranks.run(2, lambda: __import__('torch').distributed.get_rank()))",
        os.path.dirname(ranks.__file__),
    ]
    sessions = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [session.communicate(timeout=120)[0] for session in sessions] == ["[0, 1]\n" * 5] * 2
