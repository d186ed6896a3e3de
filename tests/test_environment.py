# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`accelerate-presharded enable`, `disable` and `status` in environments of their own, and the hook in real programs."""

import ctypes
import json
import os
import shutil
from pathlib import Path

import pytest
from environments import Environment, copy_of_sources, pip


HOOK = "_accelerate_presharded_hook"
IS_PATCHED = "import accelerate, accelerate_presharded as ours; assert accelerate.Accelerator is ours.Accelerator; "


@pytest.fixture(scope="module")
def enabled(tmp_path_factory):
    """An environment that is enabled, and that no test changes."""
    environment = Environment(tmp_path_factory.mktemp("enabled"))
    environment.command("enable")
    return environment


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


# ---------------------------------------------------------------------------------------------- what the commands do


def test_disable_removes_all_that_enable_has_written(environment):
    before = environment.files()
    output = environment.command("enable").stdout
    during = environment.files()
    assert {Path(name).parts[0] for name in during.keys() - before.keys()} == {
        f"{HOOK}.pth",
        f"{HOOK}.py",
        "__pycache__",
    }
    assert str(environment.packages / f"{HOOK}.pth") in output and str(environment.packages / f"{HOOK}.py") in output
    environment.command("enable")
    assert environment.files().keys() == during.keys()
    environment.run("-c", IS_PATCHED)
    assert f"{HOOK}.pth" in environment.command("disable").stdout
    assert environment.files() == before
    environment.run("-c", "import accelerate; assert accelerate.Accelerator.__module__ == 'accelerate.accelerator'")
    assert "not enabled" in environment.command("disable").stdout
    assert environment.files() == before


def test_status(environment):
    import accelerate

    output = environment.command("status", status=1).stdout
    assert "enabled      no" in output and "in effect    no. It is not enabled." in output
    environment.command("enable")
    output = environment.command("status").stdout
    assert "enabled      yes" in output and "in effect    yes" in output
    assert f"accelerate   {accelerate.__version__}" in output and "supported    accelerate<1.16,>=1.8" in output
    assert str(environment.packages / f"{HOOK}.pth") in output
    (environment.packages / f"{HOOK}.py").unlink()
    output = environment.command("status", status=1).stdout
    assert f"{HOOK}.py is missing" in output and "`accelerate-presharded enable`" in output
    environment.run("-c", "import accelerate")  # and nothing is broken
    environment.command("disable")
    assert not [name for name in environment.files() if HOOK in name]


def test_a_hook_that_does_not_run_is_noticed(environment):
    environment.command("enable")
    (environment.packages / f"{HOOK}.pth").write_text("# emptied\n")
    assert "does not read" in environment.command("status", status=1).stdout


def without_override():
    """Lets root be refused what the permissions do not give."""
    if os.geteuid() == 0:
        PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


def test_a_read_only_environment_is_a_clear_error(environment):
    before = environment.files()
    environment.packages.chmod(0o555)
    process = environment.command("enable", status=1, preexec_fn=without_override)
    assert process.stderr.startswith("accelerate-presharded: error: ")
    assert "Permission denied" in process.stderr and str(environment.packages) in process.stderr
    assert "`python -m accelerate_presharded run`" in process.stderr and "Traceback" not in process.stderr
    assert environment.files() == before
    environment.packages.chmod(0o755)
    environment.command("enable")
    environment.packages.chmod(0o555)
    process = environment.command("disable", status=1, preexec_fn=without_override)
    assert "Permission denied" in process.stderr and "Traceback" not in process.stderr
    environment.packages.chmod(0o755)


# ------------------------------------------------------------------------------------------------ programs and hook


@pytest.mark.parametrize(
    "first",
    [
        "from accelerate import Accelerator",
        "import accelerate.utils",
        "import accelerate_presharded.patching",
        "from accelerate_presharded import is_already_sharded",
        "import threading; thread = threading.Thread(target=__import__, args=['accelerate']); thread.start(); thread.join()",
    ],
)
def test_whatever_is_imported_first(enabled, first):
    rest = (
        "import accelerate.accelerator, accelerate.utils, accelerate.data_loader, inspect, sys; "
        "assert accelerate.accelerator.Accelerator is ours.Accelerator; "
        "assert accelerate.utils.DataLoaderConfiguration is ours.DataLoaderConfiguration; "
        "assert accelerate.data_loader.prepare_data_loader is ours.prepare_data_loader; "
        # The hook is gone, and the module is as it would be without it.
        "assert type(accelerate.__loader__) is type(accelerate.__spec__.loader) is type(inspect.__loader__); "
        "assert '__version__' in inspect.getsource(accelerate); "
        "left = [finder for finder in sys.meta_path if 'presharded' in type(finder).__module__]; assert not left, left"
    )
    process = enabled.run("-c", f"{first}; {IS_PATCHED}{rest}")
    assert process.stderr == ""


def test_an_interpreter_that_does_not_import_accelerate_imports_nothing(enabled, environment):
    modules = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    without, with_hook = (set(json.loads(each.run("-c", modules).stdout)) for each in (environment, enabled))
    assert with_hook - without == {HOOK}


def test_isolated_and_without_site(enabled):
    enabled.run("-I", "-c", IS_PATCHED)
    assert enabled.run("-S", "-c", f"import sys; print({HOOK!r} in sys.modules)").stdout == "False\n"


def test_accelerate_was_imported_before_the_hook(environment):
    environment.command("enable")
    (environment.packages / "A.pth").write_text("import accelerate\n")  # read before ours
    assert environment.run("-c", IS_PATCHED).stderr == ""


SCRIPT = """
import os
import sys
from accelerate import Accelerator
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index, Accelerator.__module__


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    sampler = DistributedSampler(range(16), size, rank)
    settings = {"num_workers": 1, "multiprocessing_context": sys.argv[1]}
    seen, modules = [], set()
    for numbers, names in accelerator.prepare(DataLoader(Numbers(), batch_size=2, sampler=sampler, **settings)):
        seen += numbers.tolist()
        modules.update(names)
    lists = [None] * size
    dist.all_gather_object(lists, (seen, sorted(modules))) if size > 1 else lists.__setitem__(0, (seen, sorted(modules)))
    if accelerator.is_main_process:
        print("seen", sorted(sum((numbers for numbers, _ in lists), [])), [names for _, names in lists])
    # Without the end that torch makes of a process group: now and then that aborts, or with older versions hangs.
    sys.stdout.flush()
    os._exit(0)
"""
SEEN = f"seen {list(range(16))} "
OURS = ["accelerate_presharded.accelerator"]


def test_launched_ranks_and_workers(enabled, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    process = enabled.run(*launcher, tmp_path / "train.py", "spawn")
    assert SEEN + str([OURS, OURS]) in process.stdout, process.stdout + process.stderr
    announced = [line for line in process.stderr.splitlines() if "is in the place of accelerate" in line]
    assert len(announced) == 1 and "`accelerate-presharded enable`" in announced[0]


def test_accelerates_own_launcher(enabled, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    process = enabled.run("-m", "accelerate.commands.launch", "--cpu", tmp_path / "train.py", "fork")
    assert SEEN + str([OURS]) in process.stdout, process.stdout + process.stderr
    assert process.stderr.count("is in the place of accelerate") == 1


# ------------------------------------------------------------------------------------------------ what can be wrong


def test_an_accelerate_that_is_not_supported_is_not_patched(environment):
    environment.command("enable")
    environment.add_accelerate("9.9.0")
    process = environment.run("-c", "import accelerate, sys; print(accelerate.__version__, 'torch' in sys.modules)")
    assert process.stdout == "9.9.0 False\n"
    [line] = process.stderr.splitlines()
    assert "accelerate 9.9.0 is not supported" in line and "accelerate<1.16,>=1.8" in line
    for silent in ({"RANK": "1"}, {"RANK": "3"}):
        assert environment.run("-c", "import accelerate", env=silent).stderr == ""
    output = environment.command("status", status=1).stdout
    assert "in effect    no. accelerate 9.9.0 is not supported" in output
    environment.command("disable")
    process = environment.command("enable", status=1)
    assert "accelerate 9.9.0 is not supported" in process.stderr
    assert not [name for name in environment.files() if HOOK in name]
    process = environment.command("run", "train.py", status=1)
    assert "accelerate 9.9.0 is not supported" in process.stderr and "python train.py" in process.stderr


def test_without_accelerate_there_is_nothing_to_enable(tmp_path):
    environment = Environment(tmp_path / "empty", shares_packages=False)
    shutil.copytree(Path(copy_of_sources(tmp_path / "sources")) / "src", environment.packages, dirs_exist_ok=True)
    assert "accelerate is not installed here" in environment.command("enable", status=1).stderr
    environment.command("--help")
    assert "not installed" in environment.command("status", status=1).stdout


def test_a_package_that_is_gone_is_one_line(environment, tmp_path):
    environment.command("enable")
    bare = Environment(tmp_path / "bare", shares_packages=False)
    bare.add_accelerate("1.15.0")
    for name in (f"{HOOK}.pth", f"{HOOK}.py"):
        shutil.copy(environment.packages / name, bare.packages)
    process = bare.run("-c", "import accelerate; print(accelerate.__version__)")
    assert process.stdout == "1.15.0\n"
    [line] = process.stderr.splitlines()
    assert f"delete {bare.packages / HOOK}.py and {bare.packages / HOOK}.pth" in line
    assert bare.run("-c", "pass").stderr == ""
    (bare.packages / f"{HOOK}.py").unlink()
    assert bare.run("-c", "import accelerate").stderr == ""


def test_a_package_that_fails_is_one_line(enabled):
    broken = "import sys; sys.modules['accelerate_presharded.accelerator'] = None; import accelerate; "
    process = enabled.run("-c", f"{broken} print(accelerate.Accelerator.__module__)")
    assert process.stdout == "accelerate.accelerator\n"
    [line] = process.stderr.splitlines()
    assert "accelerate is used as it is" in line and "ModuleNotFoundError" in line


def test_an_import_of_accelerate_that_fails_can_be_tried_again(environment):
    environment.command("enable")
    environment.add_accelerate("9.9.0", "import os\nassert 'READY' in os.environ\n")
    program = "import os\ntry:\n    import accelerate\nexcept AssertionError:\n    os.environ['READY'] = '1'\nimport accelerate"
    process = environment.run("-c", program)
    assert len(process.stderr.splitlines()) == 1  # the refusal, when the import has succeeded


# --------------------------------------------------------------------------------------------------- pip's own files


@pytest.mark.parametrize("editable", [False, True])
def test_pip_removes_the_hook_with_the_package(tmp_path, editable):
    environment = Environment(tmp_path / "environment", shares_sources=False)
    before = environment.files()
    sources = copy_of_sources(tmp_path / "sources")
    pip(environment, "install", "--no-deps", "--no-build-isolation", *(["-e"] if editable else []), sources)
    installed = environment.files()
    output = environment.command("enable").stdout
    assert "pip will not remove" not in output
    environment.command("enable")
    environment.run("-c", f"{IS_PATCHED} assert ours.__file__.startswith(({str(tmp_path)!r},))")
    environment.command("disable")
    assert {name: content for name, content in environment.files().items() if name in installed} == installed

    environment.command("enable")
    pip(environment, "uninstall", "-y", "accelerate-presharded")
    assert environment.files() == before
    assert environment.run("-c", "import accelerate").stderr == ""


def test_what_pip_does_not_know_of_is_said(environment):
    # This package is installed in another environment, which the files are not for.
    assert "run `accelerate-presharded disable` before" in environment.command("enable").stdout
