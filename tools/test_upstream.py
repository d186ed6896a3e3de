# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Writes the feature into Accelerate and runs, on that: Accelerate's own tests, before and after, its shipped scripts
on two ranks, its format and lint, and the tests of this package, which is not installed there. And Accelerate's own tests
on unchanged sources with this package in Accelerate's place, as `python -m accelerate_presharded run` puts it there.

    python tools/test_upstream.py                       # the released sources that the constraints name
    python tools/test_upstream.py path/to/accelerate    # a git checkout, which is cloned and left as it is
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from xml.etree import ElementTree

from upstream_pr import BRANCH, SCRIPT, SUBPACKAGE, TESTS


REPOSITORY = Path(__file__).resolve().parent.parent
WORK = REPOSITORY / "build" / "upstream"

UNIT_TESTS = "data_loader accelerator grad_sync metrics state_checkpointing scheduler dataclasses cpu utils".split()
# Those of the shipped scripts that pass on two CPU ranks on unchanged sources. The others start ranks of their own, need a
# download or a GPU; test_distributed_data_loop waits for ever without one, where `join_uneven_inputs` has no effect.
SCRIPTS = ("test_script", "test_sync", "test_ops")

# What the tests need, beside torch and what Accelerate itself needs. Accelerate names its version of ruff itself.
NEEDED = (
    "pytest pytest-xdist pytest-subtests pytest-order parameterized hypothesis cloudpickle torchdata scikit-learn "
    "scipy tqdm"
).split()
# What Accelerate's unit tests need besides. `prepare` imports `datasets` where it is installed, which takes seconds on
# every rank, so the tests of the feature and the scripts, which can do without, do so.
NEEDED_BY_ACCELERATE = "transformers datasets evaluate".split()


# Runs behind Accelerate's tests, in the same process.
IN_PLACE = """
import accelerate


def test_in_place():
    assert accelerate.Accelerator.__module__ == "accelerate_presharded.accelerator"
"""


class Sources:
    """A git checkout of Accelerate in the work folder, at the commit before the change and at the one behind it."""

    def __init__(self, checkout: Path | None):
        self.path = WORK / "accelerate"
        shutil.rmtree(self.path, ignore_errors=True)
        if checkout is not None:
            self._run("git", "clone", "--quiet", checkout.resolve(), self.path, cwd=WORK)
        else:
            self._unpack()
        self.git("config", "user.name", "Test")
        self.git("config", "user.email", "test@localhost")
        self.base = self.git("rev-parse", "HEAD")

    def _unpack(self) -> None:
        constraints = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
        requirement = re.search(r"^accelerate==\S+", constraints, re.MULTILINE).group()
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", "accelerate", requirement]
        self._run(*pip, cwd=WORK)
        archive = WORK / f"{requirement.replace('==', '-')}.tar.gz"
        with tarfile.open(archive) as file:
            file.extractall(WORK, filter="data")
        (WORK / archive.name[: -len(".tar.gz")]).rename(self.path)
        for arguments in (["init", "--quiet"], ["add", "--all"]):
            self.git(*arguments)
        self.git("-c", "user.name=Test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message", "Base")

    def git(self, *arguments: str) -> str:
        return self._run("git", *arguments, cwd=self.path).strip()

    def _run(self, *command, cwd: Path) -> str:
        return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


class Environment:
    """An environment with everything but Accelerate, which is taken from the sources, and this package."""

    def __init__(self, sources: Sources):
        self.sources = sources
        self.folder = WORK / "venv"
        self.python = self.folder / "bin" / "python"
        self.extra = WORK / "extra"
        self.variables = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PYTHONPATH": str(sources.path / "src"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        setup = (sources.path / "setup.py").read_text(encoding="utf-8")
        ruff = re.search(r"\"(ruff\s*[=~<>]+[^\"]*)\"", setup)
        self._install([*_requirements(setup), *NEEDED, ruff.group(1).replace(" ", "") if ruff else "ruff"])

    def _install(self, requirements: list[str]) -> None:
        done = self.folder / "done"
        if done.exists() and done.read_text() == "\n".join(requirements):
            return
        shutil.rmtree(self.extra, ignore_errors=True)
        venv.create(self.folder, with_pip=True, clear=True)
        # The constraints name another ruff, and nothing of what only Accelerate's tests need.
        constraints = WORK / "constraints.txt"
        lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints.write_text("\n".join(line for line in lines if not line.startswith(("ruff=", "accelerate="))))
        pip = [self.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", constraints]
        # torch comes first: it brings most of the others with it.
        for part in (["setuptools"], ["torch"], requirements):
            subprocess.run([*pip, *part], check=True)
        subprocess.run([*pip, "--target", self.extra, *NEEDED_BY_ACCELERATE], check=True)
        done.write_text("\n".join(requirements))

    def run(
        self, *command: str, on_cpu: bool = False, extra: bool = False, ours: bool = False
    ) -> subprocess.CompletedProcess:
        variables = dict(self.variables)
        if on_cpu:
            variables["ACCELERATE_USE_CPU"] = "true"
        if extra:
            variables["PYTHONPATH"] += f"{os.pathsep}{self.extra}"
        if ours:
            variables["PYTHONPATH"] += f"{os.pathsep}{self._package()}"
        return subprocess.run(
            [str(self.python), *command],
            cwd=self.sources.path,
            env=variables,
            timeout=3600,
            capture_output=True,
            text=True,
        )

    def _package(self) -> Path:
        """This package by itself, for the processes that are to find it and no others."""
        folder = WORK / "package"
        shutil.rmtree(folder, ignore_errors=True)
        pip = [self.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", folder, REPOSITORY], check=True)
        return folder

    def on_two_ranks(self, script: str) -> bool:
        """Run a script that Accelerate ships on two ranks, and tell whether it has passed."""
        launch = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "-m",
            f"accelerate.test_utils.scripts.{script}",
        ]
        result = self.run(*launch, on_cpu=True)
        (WORK / f"{script}.log").write_text(result.stdout + result.stderr)
        return result.returncode == 0

    def outcomes(self, name: str, *arguments: str, extra: bool = False, patched: bool = False) -> dict[str, str]:
        """Run tests, with this package in Accelerate's place if they are to be `patched`, and tell of each how it went."""
        report = WORK / f"{name}.xml"
        report.unlink(missing_ok=True)
        # The patch does not reach the processes that pytest would start.
        start = (
            ["-m", "accelerate_presharded", "run", "-m", "pytest", "-n", "0"]
            if patched
            else ["-m", "pytest", "-n", "2"]
        )
        command = [*start, "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        result = self.run(*command, extra=extra, ours=patched)
        (WORK / f"{name}.log").write_text(result.stdout + result.stderr)
        if not report.exists():
            sys.exit(f"{name}: pytest did not run.\n{(result.stdout + result.stderr)[-4000:]}")
        return {
            f"{case.get('classname')}.{case.get('name')}": _outcome(case)
            for case in ElementTree.parse(report).iter("testcase")
        }


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")


def _requirements(setup: str) -> list[str]:
    found = re.search(r"install_requires=\[(.*?)\]", setup, re.DOTALL)
    return re.findall(r"\"([^\"]+)\"", found.group(1)) if found else []


def counted(outcomes: dict[str, str]) -> str:
    kinds = sorted(set(outcomes.values()), key=lambda kind: kind != "passed")
    return ", ".join(f"{list(outcomes.values()).count(kind)} {kind}" for kind in kinds) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "checkout", type=Path, nargs="?", help="a git checkout of Accelerate; the released sources without"
    )
    parser.add_argument("--only", choices=("ours", "unit", "patched", "scripts", "quality"), help="one part of it")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    sources = Sources(options.checkout)
    environment = Environment(sources)
    problems: list[str] = []

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    unit_tests = [f"tests/test_{name}.py" for name in UNIT_TESTS]
    needs_before = wanted("unit") or wanted("patched")
    before = environment.outcomes("unit-before", *unit_tests, extra=True) if needs_before else {}

    def compare(after: dict[str, str], what: str) -> None:
        print(f"{what}: before {counted(before)}; after {counted(after)}", flush=True)
        different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        problems.extend(f"{what}: {name}: {before.get(name)} before, {after.get(name)} after" for name in different)

    if wanted("patched"):
        check = WORK / "test_in_place.py"
        check.write_text(IN_PLACE, encoding="utf-8")
        patched = environment.outcomes("unit-patched", *unit_tests, str(check), extra=True, patched=True)
        checked = [patched.pop(name) for name in list(patched) if name.endswith(".test_in_place")]
        if checked != ["passed"]:
            problems.append(f"This package was not in Accelerate's place, see {WORK / 'unit-patched.log'}.")
        compare(patched, "Accelerate's unit tests under `run`")
    scripts = {name: environment.on_two_ranks(name) for name in SCRIPTS} if wanted("scripts") else {}
    apply = [sys.executable, REPOSITORY / "tools" / "upstream_pr.py", sources.path]
    subprocess.run(apply, check=True)
    print(sources.git("diff", "--shortstat", sources.base, BRANCH), flush=True)

    if wanted("quality"):
        for arguments in (["check", "."], ["format", "--check", "."]):
            result = environment.run("-m", "ruff", *arguments)
            print(f"ruff {' '.join(arguments)}: {'passed' if result.returncode == 0 else 'failed'}", flush=True)
            if result.returncode:
                problems.append(result.stdout[-2000:])
        named = subprocess.run(
            ["git", "grep", "-I", "-l", "-w", "accelerate_presharded"],
            cwd=sources.path,
            capture_output=True,
            text=True,
        )
        if named.stdout:
            problems.append(f"These files name this package:\n{named.stdout}")
    if wanted("unit"):
        compare(environment.outcomes("unit-after", *unit_tests, extra=True), "Accelerate's unit tests")
    if wanted("scripts"):
        after = {name: environment.on_two_ranks(name) for name in (*SCRIPTS, Path(SCRIPT).stem)}
        for name, passed in after.items():
            words = ("failed", "passed")
            was = f" (before: {words[scripts[name]]})" if name in scripts else ""
            print(f"{name} on two ranks: {words[passed]}{was}", flush=True)
            if not passed and scripts.get(name, True):
                problems.append(f"{name} has failed, see {WORK / name}.log")
    if wanted("ours"):
        installed = environment.run("-c", "import accelerate_presharded")
        if "ModuleNotFoundError" not in installed.stderr:
            problems.append("This package is installed in the environment.")
        ours = environment.outcomes(SUBPACKAGE, TESTS)
        print(f"The tests of the feature: {counted(ours)}", flush=True)
        problems += [f"{name}: {outcome}" for name, outcome in ours.items() if outcome in ("failure", "error")]
        if not any(outcome == "passed" for outcome in ours.values()):
            problems.append("No test of the feature has passed.")
    if problems:
        sys.exit("\n".join(["", "What is wrong:", *problems, f"The logs are in {WORK}."]))


if __name__ == "__main__":
    main()
