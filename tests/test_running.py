# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`python -m accelerate_presharded run`: a script notices nothing, and has this package's names."""

import os
import re
import subprocess
import sys

import accelerate
import pytest
from shared import needs_an_end_of_groups


def python(*arguments, folder, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        text=True,
        capture_output=True,
        timeout=240,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


RUN = ("-m", "accelerate_presharded", "run")

# It does not import accelerate, so it takes no time.
ENDS = """
'''What it is for.'''
import os, signal, sys, time
print(sys.argv, __name__, __file__, __package__, __doc__, sys.path[0], type(__loader__).__name__)
print(__spec__ and __spec__.name, __builtins__, vars(sys.modules["__main__"]) is globals(), __cached__)
print("torch" in sys.modules)


def end(how):
    if how == "error":
        raise ValueError("wrong")
    if how == "chained":
        try:
            end("error")
        except ValueError:
            raise KeyError("more")
    if how == "number":
        sys.exit(3)
    if how == "words":
        sys.exit("It is over.")
    if how == "nothing":
        sys.exit()
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if how == "base":
        raise BaseException("no Exception")
    if how == "hook":
        sys.excepthook = lambda kind, value, trace: print("mine:", kind, value, trace.tb_frame.f_code.co_name)
        raise ValueError("wrong")


end(sys.argv[1])
"""


def plain(text: str) -> str:
    # Before Python 3.11 the lines of `runpy` are shown.
    text = re.sub(r'  File "[^"]*runpy(\.py"|>").*\n(    .*\n)*', "", text)
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize(
    "how", ["error", "chained", "number", "words", "nothing", "interrupt", "base", "hook", "--help", "-m", "--"]
)
def test_a_script_runs_and_ends_as_with_python(tmp_path, how):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "ends.py").write_text(ENDS)
    script = os.path.join("scripts", "ends.py")
    expected = python(script, how, "run", "--version", folder=tmp_path)
    process = python(*RUN, script, how, "run", "--version", folder=tmp_path)
    assert process.returncode == expected.returncode
    assert process.stdout == expected.stdout and process.stdout.startswith(
        f"['{script}', '{how}', 'run', '--version']"
    )
    assert process.stderr == expected.stderr


@pytest.mark.parametrize("module", ["ends", "package.ends", "package"])
def test_a_module_runs_and_ends_as_with_python(tmp_path, module):
    (tmp_path / "package").mkdir()
    for name in ("ends.py", "package/__init__.py", "package/ends.py", "package/__main__.py"):
        (tmp_path / name).write_text("" if "__init__" in name else ENDS)
    expected = python("-m", module, "error", "-m", folder=tmp_path)
    process = python(*RUN, "-m", module, "error", "-m", folder=tmp_path)
    assert process.returncode == expected.returncode == 1
    assert process.stdout == expected.stdout and "'error', '-m'] __main__" in process.stdout
    assert process.stderr == plain(expected.stderr) and "ValueError: wrong" in process.stderr


def test_what_cannot_be_run(tmp_path):
    (tmp_path / "wrong.py").write_text("a = (\n")
    expected = python("wrong.py", folder=tmp_path)
    process = python(*RUN, "wrong.py", folder=tmp_path)
    assert (process.returncode, process.stderr) == (expected.returncode, expected.stderr)
    process = python(*RUN, "missing.py", folder=tmp_path)
    assert process.returncode and process.stderr.endswith("can't open file 'missing.py': No such file or directory\n")
    for name in ("missing", "missing.part"):
        process = python(*RUN, "-m", name, folder=tmp_path)
        assert process.returncode == 1 and "No module named 'missing'" in process.stderr
        assert "Traceback" not in process.stderr
    for arguments in ((), ("-m",), ("--unknown", "wrong.py")):
        process = python(*RUN, *arguments, folder=tmp_path)
        assert process.returncode == 2 and process.stderr.startswith("usage: accelerate-presharded")


def test_help_is_quick(tmp_path):
    program = (
        "import contextlib, sys\n"
        "from accelerate_presharded.cli import main\n"
        "for arguments in (['--help'], ['run', '--help'], ['--version']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "main(['status'])\n"
        "assert not {'torch', 'accelerate'} & set(sys.modules)\n"
    )
    process = python("-c", program, folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "accelerate launch -m accelerate_presharded run train.py" in process.stdout


CHILDREN = """
import multiprocessing
import os
import pickle
import sys

assert not {"torch", "accelerate"} & set(sys.modules)
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Modules(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Accelerator.__module__


def answer(queue):
    queue.put((Accelerator.__module__, __name__))


if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Modules)) is Modules
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=answer, args=(queue,))
        child.start()
        print(method, *queue.get())
        child.join()
    [[name]] = DataLoader(Modules(), num_workers=1, multiprocessing_context="spawn")
    print("worker", name)
"""


def test_children_have_the_patch_too(tmp_path):
    (tmp_path / "children.py").write_text(CHILDREN)
    process = python(*RUN, "children.py", folder=tmp_path)
    ours = "accelerate_presharded.accelerator"
    expected = [f"spawn {ours} __mp_main__", f"forkserver {ours} __mp_main__", f"worker {ours}"]
    assert process.stdout.splitlines() == expected, process.stderr


TRAIN = """
import os
import sys
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, DistributedSampler

accelerator = Accelerator(cpu=True)
Accelerator(cpu=True)
sampler = DistributedSampler(range(16), accelerator.num_processes, accelerator.process_index)
loader = accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=sampler))
seen = gather_object([sample for batch in loader for sample in batch.tolist()])
accelerator.print("seen", sorted(seen), sys.argv[1:])
# Without the end that torch makes of a process group: now and then that aborts, or with older versions hangs.
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc_per_node=2"],
        ["accelerate.commands.launch", "--cpu", "--num_processes=1"],
    ],
)
def test_launchers(tmp_path, launcher):
    (tmp_path / "train.py").write_text(TRAIN)
    process = python("-m", *launcher, *RUN, "train.py", "--option", folder=tmp_path)
    assert f"seen {list(range(16))} ['--option']" in process.stdout, process.stdout + process.stderr
    announced = [line for line in process.stderr.splitlines() if "is in the place of accelerate" in line]
    assert len(announced) == 1 and "`accelerate-presharded run`" in announced[0]


LEFT_OPEN = """
from accelerate_presharded import Accelerator
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(9))


accelerator = Accelerator(cpu=True)
batches = iter(accelerator.prepare(DataLoader(Numbers()), already_sharded=True))
accelerator.print("first", next(batches).tolist())
accelerator.end_training()
"""


def test_a_loop_that_is_open_when_the_interpreter_ends(tmp_path):
    needs_an_end_of_groups()
    (tmp_path / "train.py").write_text(LEFT_OPEN)
    process = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", folder=tmp_path)
    assert process.stdout == "first [0]\n"
    assert "Exception ignored" not in process.stderr, process.stderr


@pytest.mark.parametrize("name", ["test_script", "test_sync"])
def test_the_scripts_that_accelerate_ships_pass_unchanged(tmp_path, name):
    needs_an_end_of_groups()
    script = os.path.join(os.path.dirname(accelerate.__file__), "test_utils", "scripts", f"{name}.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process = python(*launcher, *RUN, script, folder=tmp_path, ACCELERATE_USE_CPU="true")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stderr.count("is in the place of accelerate") == 1
