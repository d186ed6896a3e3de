# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Writes this feature into a checkout of Accelerate, and leaves it as one commit on a branch of its own.

    python tools/upstream_pr.py path/to/accelerate            # or: make upstream-pr CHECKOUT=path/to/accelerate
    python tools/upstream_pr.py path/to/accelerate --check    # say what would be done, and do nothing

The package is the only source: its modules are moved into a subpackage of Accelerate, its overrides are folded into
the methods that they override, and its tests are moved along.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from upstream.fold import export, fold_accelerator, fold_fields, fold_functions, require
from upstream.package import FOLDED_CLASSES, PACKAGE, SUBPACKAGE, Package, in_accelerate, moved_modules
from upstream.toctree import with_page
from upstream.trees import MissingAnchor


REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = Path(__file__).resolve().parent / "upstream"

BRANCH = "already-sharded-dataloaders"
MESSAGE = """Prepare dataloaders that are already sharded across ranks

`Accelerator.prepare` shards every dataloader. One that is already sharded, by a `DistributedSampler`, a node splitter
or files of its own on each rank, was sharded again, and most of its samples were never read. Such a loader is now
detected, or declared with `already_sharded=True`, and left as it is: wrapped and not rebuilt, with the same number of
steps on every rank, each sample once in `gather_for_metrics`, and a state for each rank in checkpoints. Loaders that
are not sharded are prepared as before.
"""

SOURCES = "src/accelerate"
TESTS = f"tests/{SUBPACKAGE}"
SCRIPT = f"{SOURCES}/test_utils/scripts/test_{SUBPACKAGE}.py"
DOCS = "docs/source"
PAGE, TITLE, AFTER = (
    f"usage_guides/{SUBPACKAGE}",
    "Dataloaders that are already sharded",
    "usage_guides/gradient_accumulation",
)

# What the tests need beside what Accelerate's tests need.
TEST_REQUIREMENTS = ("cloudpickle", "hypothesis")


class CannotServe(Exception):
    """The checkout cannot be changed, and was not. The message says why."""


class Checkout:
    """
    A git checkout of Accelerate, read at one commit.

    Args:
        path (`Path`): Its folder.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise CannotServe(f"{path} is no folder. Name a git checkout of Accelerate.")
        top = self._try("rev-parse", "--show-toplevel")
        if top is None or Path(top.strip()).resolve() != path.resolve():
            raise CannotServe(
                f"{path} is no git checkout. In the folder of a source distribution, make it one: `git init`, "
                "`git add --all`, `git commit`."
            )
        if self._try("rev-parse", "HEAD") is None:
            raise CannotServe(f"{path} has no commit yet.")
        if not self.files(SOURCES, "HEAD"):
            raise CannotServe(f"{path} is no checkout of Accelerate: it has no {SOURCES}.")
        self.base = "HEAD"
        # The commit that brought the feature, where the checkout has it.
        self.applied = None
        added = self.git("log", "--diff-filter=A", "--format=%H", "-1", "--", f"{SOURCES}/{SUBPACKAGE}/__init__.py")
        if added.strip() and f"{SOURCES}/{SUBPACKAGE}/__init__.py" in self.files(SOURCES, "HEAD"):
            self.applied = added.strip()
            self.base = f"{self.applied}^"

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(self.path), *arguments], check=True, capture_output=True, text=True
        ).stdout

    def _try(self, *arguments: str) -> str | None:
        try:
            return self.git(*arguments)
        except subprocess.CalledProcessError:
            return None

    def files(self, folder: str, commit: str) -> list[str]:
        return self.git("ls-tree", "-r", "--name-only", commit, "--", folder).splitlines()

    def read(self, name: str, commit: str | None = None) -> str | None:
        return self._try("show", f"{commit or self.base}:{name}")

    def changes(self) -> list[str]:
        return self.git("status", "--porcelain").splitlines()


class Change:
    """
    All files that the change writes, worked out before any is written.

    Args:
        checkout ([`Checkout`]): What is changed.
        package ([`Package`]): This package.

    **Available attributes:**

        - **files** (`dict[str, str]`) -- The text of each file that is new or different.
        - **anchors** (`list[str]`) -- What the change is fastened to.
        - **notes** (`list[str]`) -- What the checkout has no place for.
    """

    def __init__(self, checkout: Checkout, package: Package):
        self.checkout, self.package = checkout, package
        self.files: dict[str, str] = {}
        self.anchors: list[str] = []
        self.notes: list[str] = []
        self._missing: list[str] = []
        self._used: set[str] = set()
        self._header = self._licence()
        self._edit_modules()
        self._write_docs()
        self._refuse_what_lacks()
        self._move_modules()
        self._refuse_what_lacks()
        self._move_tests()

    def _refuse_what_lacks(self) -> None:
        if self._missing:
            lines = "\n".join(f"  {line}" for line in self._missing)
            raise CannotServe(f"This checkout lacks what the change is fastened to, and was not touched:\n{lines}")

    def _licence(self) -> str:
        """The licence at the top of a file of Accelerate, as its own files have it, with this year."""
        lines = (self.checkout.read(f"{SOURCES}/data_loader.py") or "").split("\n")
        header = []
        for line in lines:
            if not line.startswith("#"):
                break
            header.append(line)
        year = self._year()
        return re.sub(r"Copyright \d{4}", f"Copyright {year}", "\n".join(header)) + "\n"

    def _year(self) -> str:
        # That of the commit, so that what was written last year is still the same.
        if self.checkout.applied:
            return self.checkout.git("log", "-1", "--format=%ad", "--date=format:%Y", self.checkout.applied).strip()
        return str(datetime.date.today().year)

    def _edit(self, name: str, edit) -> None:
        code = self.checkout.read(name)
        if code is None:
            self._missing.append(f"{name}: the file")
            return
        try:
            folded = edit(code)
        except MissingAnchor as problem:
            self._missing += [f"{name}: {line}" for line in str(problem).split("\n")]
            return
        self.files[name] = folded.code
        self.anchors += [f"{name}: {anchor}" for anchor in folded.anchors]
        self._used |= folded.used

    def _edit_modules(self) -> None:
        package = self.package
        for module in sorted(set(package.folded_functions.values())):
            self._edit(_path(module), lambda code, module=module: fold_functions(code, module, package))
        self._edit(_path(FOLDED_CLASSES["accelerator"][0]), lambda code: fold_accelerator(code, package))
        self._edit(_path(FOLDED_CLASSES["configuration"][0]), lambda code: fold_fields(code, package))
        self._edit(f"{SOURCES}/__init__.py", lambda code: export(code, package))
        self._edit("setup.py", lambda code: require(code, TEST_REQUIREMENTS))

    def _move_modules(self) -> None:
        def needs(module: str, name: str) -> None:
            there = f"{SOURCES}/{module.replace('.', '/')}" if module else SOURCES
            if not module:
                there, found = f"{SOURCES}/{name}", True
            code = self.checkout.read(f"{there}.py") or self.checkout.read(f"{there}/__init__.py")
            found = code is not None and (not module or re.search(rf"\b{name}\b", code))
            if not found:
                self._missing.append(f"{there}: {name}")

        for name, code in moved_modules(self.package, self._used, needs).items():
            self._write(f"{SOURCES}/{SUBPACKAGE}/{name}.py", code)

    def _move_tests(self) -> None:
        folder = REPOSITORY / "tests"
        moved: dict[str, str] = {}
        for path in sorted(folder.glob("test_*.py")):
            code = path.read_text(encoding="utf-8")
            if not _imports_package(code):
                continue  # it runs commands of this package, or looks at its files
            try:
                moved[f"test_{SUBPACKAGE}_{path.stem[len('test_') :]}"] = in_accelerate(code, self.package)
            except LookupError:
                continue  # a test of something that stays here
        helpers = {"conftest"}
        waiting = list(moved.values()) + [(folder / "conftest.py").read_text(encoding="utf-8")]
        while waiting:
            code = waiting.pop()
            for path in folder.glob("*.py"):
                imported = re.search(rf"^\s*(from {path.stem} import|import {path.stem}$)", code, re.MULTILINE)
                if imported and path.stem not in helpers:
                    helpers.add(path.stem)
                    waiting.append(path.read_text(encoding="utf-8"))
        for name in helpers:
            moved[name] = in_accelerate((folder / f"{name}.py").read_text(encoding="utf-8"), self.package)
        for name, code in moved.items():
            self._write(f"{TESTS}/{name}.py", _without_licence(code))
        self._write(
            SCRIPT, _without_licence(in_accelerate((PARTS / "script.py").read_text(encoding="utf-8"), self.package))
        )

    def _write_docs(self) -> None:
        contents = self.checkout.read(f"{DOCS}/_toctree.yml")
        if contents is None:
            self.notes.append(f"there is no {DOCS}, so the page about the feature is left out")
            return
        try:
            self.files[f"{DOCS}/_toctree.yml"] = with_page(contents, PAGE, TITLE, AFTER)
        except MissingAnchor as problem:
            self._missing.append(f"{DOCS}/_toctree.yml: {problem}")
            return
        self.anchors.append(f"{DOCS}/_toctree.yml: {AFTER}")
        licence = (self.checkout.read(f"{DOCS}/{AFTER}.md") or "").partition("-->")[0] + "-->"
        licence = re.sub(r"Copyright \d{4}", f"Copyright {self._year()}", licence)
        self.files[f"{DOCS}/{PAGE}.md"] = f"{licence}\n\n{(PARTS / 'page.md').read_text(encoding='utf-8')}"

    def _write(self, name: str, code: str) -> None:
        self.files[name] = self._formatted(name, self._header + "\n" + code.lstrip("\n"))

    def _formatted(self, name: str, code: str) -> str:
        config = self.checkout.path / "pyproject.toml"
        for arguments in (["check", "--quiet", "--fix", "--exit-zero", "--select", "I,UP"], ["format", "--quiet"]):
            code = subprocess.run(
                [sys.executable, "-m", "ruff", *arguments, "--config", str(config), "--stdin-filename", name, "-"],
                input=code,
                cwd=self.checkout.path,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        return code

    def statistics(self) -> Iterator[tuple[str, int, int]]:
        """The lines added to and removed from each file."""
        for name, text in sorted(self.files.items()):
            before = (self.checkout.read(name) or "").splitlines()
            lines = list(difflib.unified_diff(before, text.splitlines(), n=0, lineterm=""))[2:]
            yield name, sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def _path(module: str) -> str:
    return f"{SOURCES}/{module.replace('.', '/')}.py"


def _imports_package(code: str) -> bool:
    names = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    return any((name or "").split(".")[0] == PACKAGE for name in names)


def _without_licence(code: str) -> str:
    first, _, others = code.partition("\n")
    return others if first.startswith("# Licensed") else code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a git checkout of Accelerate")
    parser.add_argument("--check", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--no-commit", action="store_true", help="write the files, and leave the commit to you")
    options = parser.parse_args()
    try:
        apply(options.checkout, options.check, options.no_commit)
    except CannotServe as problem:
        sys.exit(f"upstream-pr: {problem}")


def apply(path: Path, check: bool = False, no_commit: bool = False) -> None:
    """
    Write the change into a checkout.

    Args:
        path (`Path`): The checkout.
        check (`bool`, *optional*, defaults to `False`): Whether to say what would be done, and to do nothing.
        no_commit (`bool`, *optional*, defaults to `False`): Whether to write the files and not commit them.

    Raises:
        [`CannotServe`]: The checkout cannot be changed.
    """
    checkout = Checkout(path)
    change = Change(checkout, Package.read(REPOSITORY / "src" / PACKAGE))
    if checkout.applied:
        different = [name for name, text in change.files.items() if checkout.read(name, checkout.applied) != text]
        if different:
            raise CannotServe(
                f"commit {checkout.applied[:10]} holds an earlier version of the change ({', '.join(different[:3])}"
                f"{' and more' if len(different) > 3 else ''}). Go back to the commit before it, delete the branch "
                f"{BRANCH}, and run this again."
            )
        print(f"Commit {checkout.applied[:10]} holds this change already. There is nothing to do.")
        return
    if all(
        (path / name).is_file() and (path / name).read_text(encoding="utf-8") == text
        for name, text in change.files.items()
    ):
        print("The files hold this change already. There is nothing to do.")
        return
    print("Fastened to")
    for anchor in change.anchors:
        print(f"  {anchor}")
    statistics = list(change.statistics())
    print("Files")
    for name, added, removed in statistics:
        print(f"  {name}  +{added} -{removed}")
    print(
        f"{len(statistics)} files, {sum(row[1] for row in statistics)} lines added, {sum(row[2] for row in statistics)} removed"
    )
    for note in change.notes:
        print(f"Note: {note}.")
    if check:
        print("Nothing was written.")
        return
    changes = checkout.changes()
    if changes:
        raise CannotServe(
            f"{path} has changes that are not committed ({changes[0].strip()}{' and more' if len(changes) > 1 else ''}). "
            "Commit or stash them."
        )
    if not no_commit:
        if checkout._try("var", "GIT_AUTHOR_IDENT") is None:
            raise CannotServe("git does not know who commits. Set user.name and user.email, or pass --no-commit.")
        if checkout._try("rev-parse", "--verify", "--quiet", f"refs/heads/{BRANCH}") is not None:
            raise CannotServe(f"there is a branch {BRANCH} already. Check it out, or delete it.")
        checkout.git("checkout", "--quiet", "-b", BRANCH)
    for name, text in change.files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    if no_commit:
        print("Written, not committed.")
        return
    checkout.git("add", "--", *change.files)
    checkout.git("commit", "--quiet", "--message", MESSAGE)
    print(f"Committed as {checkout.git('rev-parse', '--short', 'HEAD').strip()} on branch {BRANCH}.")


if __name__ == "__main__":
    main()
