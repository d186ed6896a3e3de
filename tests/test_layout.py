# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The list of modules in CONTRIBUTING.md is that of the package, and imports go down it."""

import ast
import re
from pathlib import Path

import pytest


REPOSITORY = Path(__file__).parents[1]
SOURCES = {path.stem: path for path in (REPOSITORY / "src" / "accelerate_presharded").glob("*.py")}


def listed() -> list[str]:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("| module | what is there |\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \| .+ \|$", table, re.MULTILINE)


def imported(code: str, known: set[str]) -> set[str]:
    """The modules of the package that a module of it imports, wherever in its code."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").startswith("accelerate_presharded")
        ):
            module = re.sub(r"^accelerate_presharded\.?", "", node.module or "")
            found.update([module.partition(".")[0]] if module else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            found.update(re.sub(r"^accelerate_presharded\.?", "", alias.name) for alias in node.names)
    return found & known


@pytest.mark.parametrize(
    "code, found",
    [
        ("from . import hook, __version__", {"hook"}),
        ("def f():\n    from .agreement import Plan, hook", {"agreement"}),
        ("import os, accelerate_presharded.hook", {"hook"}),
        ("from accelerate_presharded.agreement import Plan", {"agreement"}),
        ("from accelerate_presharded import hook", {"hook"}),
        ("from accelerate.hook import Plan\nfrom torch import agreement", set()),
    ],
)
def test_imports_are_found(code, found):
    assert imported(code, {"hook", "agreement"}) == found


def test_every_module_is_listed_once():
    assert sorted(listed()) == sorted(SOURCES)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_imports_only_those_below_it(module):
    below = listed()[listed().index(module) + 1 :]
    above = imported(SOURCES[module].read_text(encoding="utf-8"), set(SOURCES)) - set(below)
    # `environment` writes `hook` into an environment as a file of its own, which comes back when accelerate is imported.
    assert above == ({"environment"} if module == "hook" else set())
