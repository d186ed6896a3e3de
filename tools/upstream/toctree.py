# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Adds a page to the table of contents of Accelerate's documentation."""

from __future__ import annotations

from .trees import MissingAnchor


def with_page(contents: str, page: str, title: str, after: str) -> str:
    """
    Add a page behind another one. All other lines stay as they are.

    Args:
        contents (`str`): The table of contents, a list of `- local: page` and `title: ...` in YAML.
        page (`str`): The page that is added.
        title (`str`): Its title.
        after (`str`): The page that it follows.

    Returns:
        `str`: The table with the page.

    Raises:
        [`MissingAnchor`]: The page that it has to follow is not there.
    """
    lines = contents.split("\n")
    for number, line in enumerate(lines[:-1]):
        if line.strip() == f"- local: {after}" and lines[number + 1].strip().startswith("title:"):
            indentation = line[: len(line) - len(line.lstrip())]
            entry = [f"{indentation}- local: {page}", f"{indentation}  title: {title}"]
            return "\n".join([*lines[: number + 2], *entry, *lines[number + 2 :]])
    raise MissingAnchor(f"the page {after}")
