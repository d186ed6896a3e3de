# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What the other modules ask of syntax trees."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import libcst as cst


class MissingAnchor(Exception):
    """The sources to be changed lack something that the change is fastened to. The message names it."""


def dotted(node: cst.BaseExpression | None) -> str:
    """
    Write a name with dots, such as `accelerate.data_loader`.

    Args:
        node (`libcst.BaseExpression`, *optional*): A tree of attributes of names.

    Returns:
        `str`: The name, empty for anything else.
    """
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        parent = dotted(node.value)
        return f"{parent}.{node.attr.value}" if parent else ""
    return ""


def definitions(body: Iterable[cst.CSTNode]) -> dict[str, cst.FunctionDef | cst.ClassDef]:
    """
    Find the functions and classes that a body defines directly.

    Args:
        body (`Iterable[libcst.CSTNode]`): The statements of a module or a class.

    Returns:
        `dict[str, libcst.FunctionDef | libcst.ClassDef]`: They, by name.
    """
    return {node.name.value: node for node in body if isinstance(node, (cst.FunctionDef, cst.ClassDef))}


def names_in(*nodes: cst.CSTNode) -> set[str]:
    """
    Find the names that nodes mention, as names or as attributes; not those in strings.

    Args:
        *nodes (`libcst.CSTNode`): The nodes.

    Returns:
        `set[str]`: The names.
    """
    return set().union(*map(_names_in, nodes))


@functools.cache  # trees are never changed, and a visit takes long
def _names_in(node: cst.CSTNode) -> frozenset[str]:
    found: set[str] = set()

    class Names(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:
            found.add(node.value)

    node.visit(Names())
    return frozenset(found)


def imports(module: cst.Module) -> Iterator[tuple[str, str, str]]:
    """
    List what a module imports with `from ... import ...` at its top.

    Args:
        module (`libcst.Module`): The module.

    Yields:
        `tuple[str, str, str]`: The module as it is written there, dots included, the name in it, and the name here.
    """
    for line in module.body:
        if not isinstance(line, cst.SimpleStatementLine):
            continue
        for statement in line.body:
            if isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
                for alias in statement.names:
                    name = alias.evaluated_name
                    yield source_of(statement), name, alias.evaluated_alias or name


def source_of(statement: cst.ImportFrom) -> str:
    """Write the module that a statement imports from, dots included."""
    return "." * len(statement.relative) + dotted(statement.module)


def import_lines(names: dict[str, Iterable[str]]) -> list[cst.SimpleStatementLine]:
    """
    Write statements that import names.

    Args:
        names (`dict[str, Iterable[str]]`): The names, by the module that they are imported from.

    Returns:
        `list[libcst.SimpleStatementLine]`: One statement for each module.
    """
    return [
        cst.parse_statement(f"from {module} import {', '.join(sorted(set(found), key=_import_order))}")
        for module, found in sorted(names.items())
        if found
    ]


def _import_order(name: str) -> tuple[int, str]:
    # Constants, classes and then functions, as ruff sorts them.
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name


def insert_import(module: cst.Module, line: cst.SimpleStatementLine) -> cst.Module:
    """
    Put a relative import where it belongs among the sorted ones of a module.

    Args:
        module (`libcst.Module`): The module.
        line (`libcst.SimpleStatementLine`): A statement `from .x import ...`.

    Returns:
        `libcst.Module`: The module with the statement.

    Raises:
        [`MissingAnchor`]: The module has no relative import.
    """
    source = source_of(line.body[0])
    relative = [
        number
        for number, other in enumerate(module.body)
        if isinstance(other, cst.SimpleStatementLine)
        and isinstance(other.body[0], cst.ImportFrom)
        and other.body[0].relative
    ]
    if not relative:
        raise MissingAnchor("the relative imports at its top")
    later = [number for number in relative if source_of(module.body[number].body[0]) > source]
    position = later[0] if later else relative[-1] + 1
    return module.with_changes(body=[*module.body[:position], line, *module.body[position:]])


def docstring_of(node: cst.FunctionDef | cst.ClassDef) -> str | None:
    """Return the docstring of a function or class as it is written, quotes included, or `None`."""
    first = node.body.body[0] if isinstance(node.body, cst.IndentedBlock) else None
    if isinstance(first, cst.SimpleStatementLine) and isinstance(first.body[0], cst.Expr):
        value = first.body[0].value
        if isinstance(value, cst.SimpleString):
            return value.value
    return None


def with_docstring(node: cst.FunctionDef, docstring: str) -> cst.FunctionDef:
    """Return the function, or the class, with another docstring in the place of the one it has."""
    first = node.body.body[0]
    line = first.with_changes(body=[first.body[0].with_changes(value=cst.SimpleString(docstring))])
    return node.with_changes(body=node.body.with_changes(body=[line, *node.body.body[1:]]))


def replaced(body: Sequence[cst.CSTNode], name: str, new: cst.CSTNode) -> list[cst.CSTNode]:
    """Return a body in which the function or class of a name is another."""
    return [
        new if isinstance(node, (cst.FunctionDef, cst.ClassDef)) and node.name.value == name else node for node in body
    ]
