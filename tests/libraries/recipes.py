# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The recipes of docs/recipes.md, found by their headings and run as they stand there.

A recipe is the Python block below a heading of the third level. It is given `path`, `accelerator` and `workers`, and
leaves the prepared `loader`.
"""

import re
from pathlib import Path
from typing import Any


PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

FLAG = ", already_sharded=True"


def recipes() -> dict[str, str]:
    """Every recipe of the page, by its heading."""
    found = {}
    for section in re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        assert len(blocks) == 1, f"{heading!r} should have one Python block"
        found[heading] = blocks[0]
    return found


def recipe(heading: str, flag: bool = True) -> str:
    """The code of one recipe; with `flag=False` without the `already_sharded=True` that it must have."""
    code = recipes()[heading]
    if flag:
        return code
    assert code.count(FLAG) == 1, f"the recipe {heading!r} has no flag to leave out"
    return code.replace(FLAG, "")


def load(code: str, path: str, accelerator: Any, workers: int) -> Any:
    """The prepared loader that a recipe makes."""
    names = {"path": Path(path), "accelerator": accelerator, "workers": workers}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["loader"]
