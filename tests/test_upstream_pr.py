# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The tool that writes the feature into a checkout of Accelerate, run on the sources of the installed one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import libcst as cst
import pytest


TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from upstream.fold import Override, fold, fold_accelerator  # noqa: E402
from upstream.package import Package  # noqa: E402
from upstream.toctree import with_page  # noqa: E402
from upstream.trees import MissingAnchor  # noqa: E402


EDITED = ("__init__.py", "accelerator.py", "data_loader.py", "utils/dataclasses.py")
RUFF = """
[tool.ruff]
line-length = 119
[tool.ruff.lint.per-file-ignores]
"__init__.py" = ["F401"]
[tool.ruff.lint.isort]
known-first-party = ["accelerate"]
lines-after-imports = 2
"""
TOCTREE = """- sections:
  - local: index
    title: Home
  - isExpanded: true
    sections:
    - local: usage_guides/gradient_accumulation
      title: Gradient accumulation
    - local: usage_guides/local_sgd
      title: Local SGD
    title: Training
"""


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(TOOLS / "upstream_pr.py"), str(folder), *arguments], capture_output=True, text=True
    )


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Base")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> Path:
    """The installed sources, as they lie in a checkout."""
    folder = tmp_path_factory.mktemp("accelerate")
    shutil.copytree(
        Path(accelerate.__file__).parent,
        folder / "src" / "accelerate",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (folder / "pyproject.toml").write_text(RUFF)
    (folder / "setup.py").write_text('extras = {}\nextras["test_prod"] = ["pytest>=7", "parameterized"]\n')
    (folder / "docs" / "source" / "usage_guides").mkdir(parents=True)
    (folder / "docs" / "source" / "_toctree.yml").write_text(TOCTREE)
    (folder / "docs" / "source" / "usage_guides" / "gradient_accumulation.md").write_text(
        "<!--A licence\n-->\n\n# X\n"
    )
    git(folder, "init", "--quiet")
    git(folder, "config", "user.name", "Someone")
    git(folder, "config", "user.email", "someone@localhost")
    commit(folder)
    return folder


@pytest.fixture
def checkout(untouched, tmp_path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "accelerate"))


@pytest.fixture(scope="module")
def changed(untouched, tmp_path_factory) -> Path:
    folder = Path(shutil.copytree(untouched, tmp_path_factory.mktemp("changed") / "accelerate"))
    result = tool(folder)
    assert result.returncode == 0, result.stderr
    return folder


def in_changed(changed: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python where `accelerate` is the one with the feature, and this package is not to be had."""
    environment = {**os.environ, "PYTHONPATH": str(changed / "src"), "ACCELERATE_USE_CPU": "true"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def test_it_leaves_one_commit_on_a_branch_of_its_own(changed, untouched):
    assert git(changed, "rev-parse", "HEAD^") == git(untouched, "rev-parse", "HEAD")
    assert git(changed, "branch", "--show-current") == "already-sharded-dataloaders"
    assert git(changed, "status", "--porcelain") == ""


def test_almost_nothing_of_accelerate_is_removed(changed):
    rows = [line.split("\t") for line in git(changed, "diff", "--numstat", "HEAD^").splitlines()]
    present = {
        name for _, _, name in rows if not git(changed, "diff", "--diff-filter=A", "--name-only", "HEAD^", name)
    }
    assert present == {f"src/accelerate/{name}" for name in EDITED} | {
        "docs/source/_toctree.yml",
        "setup.py",
    }
    # Two lines of signatures, which have one parameter more.
    assert sum(int(removed) for _, removed, _ in rows) == 2
    # One screen in each module, docstrings included.
    assert all(int(added) <= 60 for added, _, name in rows if name in present)


def test_no_file_names_this_package(changed):
    for path in changed.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            assert not re.search(r"\baccelerate_presharded\b", path.read_text(encoding="utf-8", errors="replace")), (
                path
            )


# What has no counterpart in Accelerate: the commands, the patch, the audit, this repository itself.
STAY = set(
    "audit audit_command benchmarks cuda docs environment examples layout patching ranks running trainer upstream_pr".split()
)


def test_no_tests_stay_behind_unnoticed(changed):
    moved = {path.stem[len("test_presharded_") :] for path in (changed / "tests" / "presharded").glob("test_*.py")}
    assert {path.stem[len("test_") :] for path in Path(__file__).parent.glob("test_*.py")} - moved == STAY


def test_accelerate_has_the_feature_of_its_own(changed):
    code = """
import inspect, sys
sys.modules["accelerate_presharded"] = None
import accelerate, accelerate.data_loader
from accelerate import PreshardedDataLoader, Sharding, find_sharding, is_already_sharded, register_sharding
from accelerate.utils import DataLoaderConfiguration
print(accelerate.__file__)
for function in (accelerate.Accelerator.prepare, accelerate.Accelerator.prepare_data_loader,
                 accelerate.data_loader.prepare_data_loader):
    assert list(inspect.signature(function).parameters)[-1] == "already_sharded", function
    assert function.__doc__.count("already_sharded (") == 1
assert DataLoaderConfiguration(already_sharded=True).already_sharded is True
assert DataLoaderConfiguration().already_sharded is None
assert DataLoaderConfiguration.__doc__.count("already_sharded (") == 1
assert not any(name.startswith("accelerate_presharded.") for name in sys.modules)
"""
    result = in_changed(changed, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().startswith(str(changed))


def test_the_shipped_script_passes_on_two_ranks(changed):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = in_changed(changed, *launch, "-m", "accelerate.test_utils.scripts.test_presharded")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All checks passed." in result.stdout


def test_the_moved_files_are_formatted_as_accelerate_formats(changed):
    files = git(changed, "diff", "--name-only", "--diff-filter=A", "HEAD^", "--", "*.py").splitlines()
    assert len(files) > 20
    config = str(changed / "pyproject.toml")
    for arguments in (["check", "--select", "E,F,I,UP,W", "--ignore", "E501"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--config", config, *files]
        result = subprocess.run(command, cwd=changed, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_the_moved_files_have_the_licence_of_accelerates_files(changed):
    for name in ("src/accelerate/presharded/data_loader.py", "tests/presharded/ranks.py"):
        lines = (changed / name).read_text().splitlines()
        theirs = (changed / "src" / "accelerate" / "data_loader.py").read_text().splitlines()
        length = next(number for number, line in enumerate(theirs) if not line.startswith("#"))
        assert lines[0].startswith("# Copyright 20")
        assert lines[1:length] == theirs[1:length]
        assert "LICENSE file" not in "\n".join(lines[length : length + 5])


def test_the_page_is_in_the_contents_and_nothing_else_moves(changed):
    contents = (changed / "docs" / "source" / "_toctree.yml").read_text().splitlines()
    added = ["    - local: usage_guides/presharded", "      title: Dataloaders that are already sharded"]
    assert [line for line in contents if line not in added] == TOCTREE.splitlines()
    assert contents[7:9] == added
    page = (changed / "docs" / "source" / "usage_guides" / "presharded.md").read_text()
    assert page.startswith("<!--A licence\n-->\n\n# ")


def test_what_the_tests_need_is_required(changed):
    lines = (changed / "setup.py").read_text().splitlines()
    assert lines[:2] == ["extras = {}", 'extras["test_prod"] = ["pytest>=7", "parameterized"]']
    assert lines[2:] == ['extras["test_prod"] += ["cloudpickle", "hypothesis"]']


def test_a_second_run_changes_nothing(changed):
    head = git(changed, "rev-parse", "HEAD")
    result = tool(changed)
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    assert git(changed, "rev-parse", "HEAD") == head
    assert git(changed, "status", "--porcelain") == ""


def test_an_earlier_version_of_the_change_is_refused(changed, tmp_path):
    folder = Path(shutil.copytree(changed, tmp_path / "accelerate"))
    with (folder / "src" / "accelerate" / "presharded" / "metrics.py").open("a") as file:
        file.write("# earlier\n")
    git(folder, "commit", "--quiet", "--all", "--amend", "--no-edit")
    head = git(folder, "rev-parse", "HEAD")
    result = tool(folder)
    assert result.returncode != 0
    assert "presharded/metrics.py" in result.stderr and "already-sharded-dataloaders" in result.stderr
    assert git(folder, "rev-parse", "HEAD") == head


def test_check_says_what_would_be_done_and_does_nothing(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    result = tool(checkout, "--check")
    assert result.returncode == 0, result.stderr
    for name in ("prepare", "prepare_data_loader", "gather_for_metrics", "join_uneven_inputs", "save_state"):
        assert f"src/accelerate/accelerator.py: Accelerator.{name}\n" in result.stdout
    assert re.search(r"^\d+ files, \d+ lines added, \d+ removed$", result.stdout, re.MULTILINE)
    assert git(checkout, "rev-parse", "HEAD") == head
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "branch", "--list", "already-sharded-dataloaders") == ""


def test_without_a_commit_the_files_are_written(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert tool(checkout, "--no-commit").returncode == 0
    assert git(checkout, "rev-parse", "HEAD") == head
    assert "already_sharded" in (checkout / "src" / "accelerate" / "accelerator.py").read_text()
    status = git(checkout, "status", "--porcelain")
    again = tool(checkout, "--no-commit")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert git(checkout, "status", "--porcelain") == status


@pytest.mark.parametrize(
    "file, old, new, named",
    [
        ("accelerator.py", "def gather_for_metrics(", "def gather_metrics(", "Accelerator.gather_for_metrics"),
        (
            "accelerator.py",
            "prepared_data_loader = prepare_data_loader(",
            "x = other(",
            "its call of prepare_data_loader",
        ),
        ("data_loader.py", "    torch_device_mesh=None,\n", "    mesh=None,\n", "its parameters torch_device_mesh"),
        ("utils/dataclasses.py", "class DataLoaderConfiguration", "class Other", "class DataLoaderConfiguration"),
        ("utils/random.py", "synchronize_rng_states", "synchronize", "synchronize_rng_states"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_touched(checkout, file, old, new, named):
    path = checkout / "src" / "accelerate" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    if named == "synchronize_rng_states":
        utils = checkout / "src" / "accelerate" / "utils" / "__init__.py"
        utils.write_text(utils.read_text().replace(old, new))
    commit(checkout)
    head = git(checkout, "rev-parse", "HEAD")
    result = tool(checkout)
    assert result.returncode != 0
    assert named in result.stderr and "was not touched" in result.stderr
    assert git(checkout, "rev-parse", "HEAD") == head
    assert git(checkout, "status", "--porcelain") == ""


def test_a_checkout_with_changes_is_left_alone(checkout):
    (checkout / "src" / "accelerate" / "logging.py").write_text("")
    result = tool(checkout)
    assert result.returncode != 0
    assert "src/accelerate/logging.py" in result.stderr and "Commit or stash" in result.stderr
    assert git(checkout, "status", "--porcelain") == "M src/accelerate/logging.py"


@pytest.mark.parametrize("kind", ["no folder", "no git", "inside", "no accelerate"])
def test_what_is_no_checkout_of_accelerate_is_refused(kind, tmp_path, checkout):
    folder, expected = {
        "no folder": (tmp_path / "nowhere", "no folder"),
        "no git": (tmp_path / "plain", "git init"),
        "inside": (checkout / "src", "no git checkout"),
        "no accelerate": (tmp_path / "other", "no src/accelerate"),
    }[kind]
    if kind in ("no git", "no accelerate"):
        folder.mkdir()
        (folder / "file").write_text("")
    if kind == "no accelerate":
        git(folder, "init", "--quiet")
        git(folder, "config", "user.name", "Someone")
        git(folder, "config", "user.email", "someone@localhost")
        commit(folder)
    result = tool(folder)
    assert result.returncode != 0
    assert expected in result.stderr


# Folding, on small functions


def folded(ours: str, theirs: str) -> str:
    override = Override.read(cst.parse_module(ours).body[0])
    return cst.Module([fold(override, cst.parse_module(theirs).body[0])]).code


def test_a_parameter_its_description_and_the_guards_are_added():
    ours = '''
def work(self, a, b=None):
    """
    Args:
        a (`int`): One.
        b (`int`, *optional*):
            Two,
            and more.

    Returns: nothing.
    """
    # why
    if b:
        return b
    prepare(self)
    return super().work(a)
'''
    theirs = '''
def work(self, a):
    """
    Do it.

    Args:
        a (`int`):
            Theirs.

    Example: none.
    """
    return a
'''
    expected = '''
def work(self, a, b=None):
    """
    Do it.

    Args:
        a (`int`):
            Theirs.
        b (`int`, *optional*):
            Two,
            and more.

    Example: none.
    """
    # why
    if b:
        return b
    prepare(self)
    return a
'''
    assert folded(ours, theirs).strip() == expected.strip()


def test_a_guard_enters_a_context_where_the_method_is_one():
    ours = '''
def join(self, a):
    """Join."""
    if special(self):
        return joined(self, super().join, a)
    return super().join(a)
'''
    theirs = '''
@contextmanager
def join(self, a):
    """Join."""
    yield a
'''
    expected = '''
@contextmanager
def join(self, a):
    """Join."""
    if special(self):
        with joined(self, self.join, a):
            yield
        return
    yield a
'''
    assert folded(ours, theirs).strip() == expected.strip()


def test_hints_pass_an_argument_to_a_call_and_go_on_behind_it():
    ours = '''
def work(self, a, b=None):
    """
    Args:
        a: A.
        b (`int`): B.
    """
    b = looked_up(self, b)
    # upstream: in helper(b=b)
    # upstream: then note(self, a)
    a = prepared(a, b)
    return super().work(a)
'''
    theirs = '''
def work(self, a):
    """
    Args:
        a: A.
    """
    result = helper(a, c=1)
    return result
'''
    expected = '''
def work(self, a, b=None):
    """
    Args:
        a: A.
        b (`int`): B.
    """
    b = looked_up(self, b)
    result = helper(a, c=1, b=b)
    note(self, result)
    return result
'''
    assert folded(ours, theirs).strip() == expected.strip()


def test_a_hint_leaves_a_method_as_it_is():
    ours = """
def work(self, a):
    # upstream: nothing, since something else does it
    if a:
        return a
    return super().work(a)
"""
    assert Override.read(cst.parse_module(ours).body[0]) is None


def test_an_unknown_hint_is_an_error():
    ours = "def work(self, a):\n    # upstream: perhaps\n    use(a)\n    return super().work(a)\n"
    with pytest.raises(ValueError, match="perhaps"):
        Override.read(cst.parse_module(ours).body[0])


def test_what_belongs_to_this_package_alone_stays_here():
    package = Package.read(TOOLS.parent / "src" / "accelerate_presharded")
    code = package.modules["accelerator"].code
    code = code.replace("from .joining", "from .extra import Extra\nfrom .joining", 1)
    package.modules["accelerator"] = cst.parse_module(f"{code}\n    def extra(self):\n        return Extra(self)\n")
    package.modules["extra"] = cst.parse_module("class Extra:\n    pass\n")
    package.public["Extra"] = "extra"
    assert "extra" not in package.moved and "data_loader" in package.moved
    assert "Extra" not in package.exported and "Sharding" in package.exported
    with pytest.raises(LookupError, match="Extra"):
        package.home("", "Extra")
    theirs = (Path(accelerate.__file__).parent / "accelerator.py").read_text()
    folded = fold_accelerator(theirs, package).code
    assert "gather_real" in folded and "Extra" not in folded


def test_a_page_needs_the_one_that_it_follows():
    with pytest.raises(MissingAnchor, match="usage_guides/nowhere"):
        with_page(TOCTREE, "usage_guides/new", "New", "usage_guides/nowhere")
