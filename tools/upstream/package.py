# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""This package as it is read from its sources, and the place that each of its names has inside Accelerate."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import libcst as cst

from .trees import definitions, docstring_of, dotted, import_lines, imports, names_in, source_of


PACKAGE = "accelerate_presharded"

# The subpackage of Accelerate that the modules become.
SUBPACKAGE = "presharded"

# The modules whose classes are folded into Accelerate's own, and where these are.
FOLDED_CLASSES = {
    "accelerator": ("accelerator", "Accelerator"),
    "configuration": ("utils.dataclasses", "DataLoaderConfiguration"),
}


@dataclasses.dataclass
class Package:
    """
    The sources of this package.

    Args:
        modules (`dict[str, libcst.Module]`): Its modules by name, without the `__init__`.
        public (`dict[str, str]`): The modules of the names that the `__init__` offers.
    """

    modules: dict[str, cst.Module]
    public: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Package:
        modules = {path.stem: cst.parse_module(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")}
        init = modules.pop("__init__")
        # They may stand below `if TYPE_CHECKING:`, where the names are imported when they are asked for.
        nested = [line for node in init.body if isinstance(node, cst.If) for line in node.body.body]
        init = init.with_changes(body=[*init.body, *nested])
        public = {name: source[1:] for source, name, _ in imports(init) if source.startswith(".")}
        return cls(modules, public)

    @functools.cached_property
    def folded_functions(self) -> dict[tuple[str, str], str]:
        """Which functions end in a call of one of Accelerate's with the same name, and in which module that is."""
        found = {}
        for module, tree in self.modules.items():
            aliases = {name: value for name, value in map(_alias, tree.body) if value}
            for name, node in definitions(tree.body).items():
                called = _last_call(node)
                called = aliases.get(called, called)
                if called.startswith("accelerate.") and called.endswith(f".{name}"):
                    found[module, name] = called[len("accelerate.") : -len(name) - 1]
        return found

    @functools.cached_property
    def moved(self) -> list[str]:
        """The modules that the overrides need, in alphabetical order."""
        module, class_name = "accelerator", FOLDED_CLASSES["accelerator"][1]
        tree = self.modules[module]
        # A method that overrides nothing belongs to this package alone, and so does what only it needs.
        methods = definitions(definitions(tree.body)[class_name].body.body).values()
        used = names_in(*(method for method in methods if "super" in names_in(method)))
        found: set[str] = set()
        waiting = [source.lstrip(".") for source, _, here in imports(tree) if source[0] == "." and here in used]
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting += [source.lstrip(".") for source, _, _ in imports(self.modules[module]) if source[0] == "."]
        return sorted(found)

    @functools.cached_property
    def exported(self) -> dict[str, str]:
        """The public names that Accelerate does not have yet, and their modules."""
        folded = {name for _, name in self.folded_functions} | {name for _, name in FOLDED_CLASSES.values()}
        return {name: module for name, module in self.public.items() if name not in folded and module in self.moved}

    def home(self, module: str, name: str) -> str:
        """
        Tell from which module of Accelerate a name of this package is imported.

        Args:
            module (`str`): The module here, empty for the package itself.
            name (`str`): The name.

        Returns:
            `str`: The module there.

        Raises:
            `LookupError`: It has no place in Accelerate.
        """
        at_top = not module
        module = module or self.public.get(name, "")
        if (module, name) in self.folded_functions:
            # Of those, only this one is offered by `accelerate` itself.
            return (
                "accelerate"
                if at_top and name == "skip_first_batches"
                else f"accelerate.{self.folded_functions[module, name]}"
            )
        if module in FOLDED_CLASSES and name == FOLDED_CLASSES[module][1]:
            return "accelerate" if at_top else f"accelerate.{FOLDED_CLASSES[module][0]}"
        if module in self.moved:
            return "accelerate" if at_top else f"accelerate.{SUBPACKAGE}.{module}"
        raise LookupError(f"{name} of {module or 'the package'}")

    def definition(self, name: str) -> str:
        """
        Find the module that defines a function or class.

        Raises:
            `LookupError`: None of those that are moved does, or several do.
        """
        (module,) = [module for module in self.moved if name in definitions(self.modules[module].body)]
        return module

    def text_in_accelerate(self, text: str) -> str:
        """
        Rewrite what a text, such as a docstring, says about imports of this package.

        Args:
            text (`str`): The text.

        Returns:
            `str`: The text with Accelerate's names.
        """

        def statement(match: re.Match) -> str:
            names: dict[str, list[str]] = {}
            for name in match["names"].split(","):
                names.setdefault(self.home((match["module"] or "").lstrip("."), name.strip()), []).append(name.strip())
            lines = [cst.Module([line]).code.strip() for line in import_lines(names)]
            return "\n".join(match["before"] + line for line in lines)

        text = re.sub(
            rf"^(?P<before>[^\S\n]*(?:>>> )?)from {PACKAGE}(?P<module>\.\w+)? import (?P<names>[\w, ]+)$",
            statement,
            text,
            flags=re.MULTILINE,
        )
        return text.replace(f"{PACKAGE}.", f"accelerate.{SUBPACKAGE}.").replace(PACKAGE, "accelerate")


def _alias(line: cst.CSTNode) -> tuple[str, str]:
    """The name and the value of a statement such as `ordinary = accelerate.data_loader.prepare_data_loader`."""
    if isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.Assign):
        value = dotted(line.body[0].value)
        return dotted(line.body[0].targets[0].target), value if value.startswith("accelerate.") else ""
    return "", ""


def _last_call(node: cst.CSTNode) -> str:
    if not isinstance(node, cst.FunctionDef) or not isinstance(node.body, cst.IndentedBlock):
        return ""
    last = node.body.body[-1]
    if not isinstance(last, cst.SimpleStatementLine) or not isinstance(last.body[-1], cst.Return):
        return ""
    call = last.body[-1].value
    return dotted(call.func) if isinstance(call, cst.Call) else ""


class _Texts(cst.CSTTransformer):
    """Rewrites strings and comments."""

    def __init__(self, package: Package):
        super().__init__()
        self.package = package

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        return updated_node.with_changes(value=self.package.text_in_accelerate(updated_node.value))

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        return updated_node.with_changes(value=self.package.text_in_accelerate(updated_node.value))

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        return updated_node.with_changes(value=self.package.text_in_accelerate(updated_node.value))


class _Absolute(_Texts):
    """Rewrites imports of this package, and names with dots that begin with it, to Accelerate's."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel:
        statement = updated_node.body[0]
        if not isinstance(statement, cst.ImportFrom) or not source_of(statement).startswith(PACKAGE):
            return updated_node
        names: dict[str, list[str]] = {}
        for alias in statement.names:
            module = source_of(statement)[len(PACKAGE) + 1 :]
            names.setdefault(self.package.home(module, alias.evaluated_name), []).append(alias.evaluated_name)
        first, *others = import_lines(names)
        return cst.FlattenSentinel([first.with_changes(leading_lines=updated_node.leading_lines), *others])

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if isinstance(original_node.value, cst.Name) and original_node.value.value == PACKAGE:
            name = updated_node.attr.value
            module = f"accelerate.{SUBPACKAGE}" if name in self.package.moved else self.package.home("", name)
            return cst.parse_expression(f"{module}.{name}")
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return cst.Name("accelerate") if updated_node.value == PACKAGE else updated_node


def in_accelerate(source: str, package: Package) -> str:
    """
    Rewrite code that uses this package to code that uses Accelerate.

    Args:
        source (`str`): The code.
        package ([`Package`]): This package.

    Returns:
        `str`: The code with absolute imports, not formatted.

    Raises:
        `LookupError`: It uses something that has no place in Accelerate.
    """
    return cst.parse_module(source).visit(_Absolute(package)).code


class _Inside(_Texts):
    """Makes the imports of a module that becomes part of Accelerate relative."""

    def __init__(self, package: Package):
        super().__init__(package)
        self.for_types: set[str] = set()
        self.modules: set[str] = set()
        self._annotations = 0

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._annotations += 1

    def leave_Annotation(self, original_node: cst.Annotation, updated_node: cst.Annotation) -> cst.Annotation:
        self._annotations -= 1
        return updated_node

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        source = source_of(updated_node)
        if not source.startswith("accelerate"):
            return updated_node
        module = cst.parse_expression(source[len("accelerate.") :]) if "." in source else None
        return updated_node.with_changes(
            module=module, relative=[cst.Dot(), cst.Dot()], whitespace_after_from=cst.SimpleWhitespace(" ")
        )

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        named = dotted(updated_node.names[0].name)
        return cst.RemoveFromParent() if named.split(".")[0] == "accelerate" else updated_node

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return not dotted(node).startswith("accelerate.")

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        name = dotted(original_node)
        if not name.startswith("accelerate."):
            return updated_node
        if name.count(".") == 1:
            if not self._annotations:
                raise LookupError(f"{name} is used outside of annotations, which is a circular import in Accelerate")
            self.for_types.add(name.split(".")[1])
        else:
            self.modules.add(name.split(".")[1])
        return cst.parse_expression(name[len("accelerate.") :])


def moved_modules(
    package: Package, roots: set[str], imports_of_checkout: Callable[[str, str], None]
) -> dict[str, str]:
    """
    Write the modules of the subpackage.

    Args:
        package ([`Package`]): This package.
        roots (`set[str]`): The names that Accelerate's own modules use of them.
        imports_of_checkout (`Callable`): Called with the module and the name of each thing they need of Accelerate.

    Returns:
        `dict[str, str]`: Their code by name, `__init__` included, without a licence and not formatted.
    """
    trees = {name: package.modules[name] for name in package.moved}
    for (module, name), _ in package.folded_functions.items():
        if module in trees:
            trees[module] = _without(trees[module], {name})
            # A name for Accelerate's own function served the one that is folded.
            kept = [line for line in trees[module].body if not _alias(line)[1].endswith(f".{name}")]
            trees[module] = trees[module].with_changes(body=kept)
    trees = _without_unused(trees, roots | set(package.exported))
    return {
        "__init__": _init(package),
        **{name: _module(tree, package, imports_of_checkout) for name, tree in trees.items()},
    }


def _init(package: Package) -> str:
    names: dict[str, list[str]] = {}
    for name, module in package.exported.items():
        names.setdefault(f".{module}", []).append(name)
    return cst.Module(import_lines(names)).code


def _module(tree: cst.Module, package: Package, imports_of_checkout: Callable[[str, str], None]) -> str:
    inside = _Inside(package)
    # The licence is written anew, in Accelerate's manner.
    tree = tree.with_changes(header=[line for line in tree.header if line.comment is None])
    tree = tree.visit(inside)
    names = {"..": sorted(inside.modules), "typing": ["TYPE_CHECKING"] if inside.for_types else []}
    first = next(n for n, line in enumerate(tree.body) if _is_import(line) and not _is_future(line))
    last = max(n for n, line in enumerate(tree.body) if _is_import(line))
    types = (
        [
            cst.parse_statement(
                f"if TYPE_CHECKING:\n    from ..accelerator import {', '.join(sorted(inside.for_types))}\n"
            )
        ]
        if inside.for_types
        else []
    )
    body = [*tree.body[:first], *import_lines(names), *tree.body[first : last + 1], *types, *tree.body[last + 1 :]]
    tree = tree.with_changes(body=body)
    for source, name, _ in imports(tree):
        if source.startswith(".."):
            imports_of_checkout(source[2:], name)
    return tree.code


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom))


def _is_future(line: cst.SimpleStatementLine) -> bool:
    return isinstance(line.body[0], cst.ImportFrom) and source_of(line.body[0]) == "__future__"


def _without_unused(trees: dict[str, cst.Module], roots: set[str]) -> dict[str, cst.Module]:
    """Leave out functions, classes and imports that nothing uses any more, and what only they used."""
    while True:
        changed = False
        for module, tree in trees.items():
            unused = {
                name
                for name, node in definitions(tree.body).items()
                if name not in roots
                and not any(
                    name in names_in(other) for others in trees.values() for other in others.body if other is not node
                )
            }
            if unused:
                tree = _without(tree, unused)
                changed = True
            used = names_in(*(line for line in tree.body if not _is_import(line)))
            pruned = tree.visit(_Imports(used))
            changed = changed or not pruned.deep_equals(tree)
            trees[module] = pruned
        if not changed:
            return trees


def _without(tree: cst.Module, names: set[str]) -> cst.Module:
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, (cst.FunctionDef, cst.ClassDef)) and node.name.value in names)
    ]
    return tree.with_changes(body=kept)


class _Imports(cst.CSTTransformer):
    """Leaves out imports of names that are not used."""

    def __init__(self, used: set[str]):
        super().__init__()
        self.used = used

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        return self._pruned(updated_node)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        return updated_node if source_of(updated_node) == "__future__" else self._pruned(updated_node)

    def _pruned(self, statement: cst.Import | cst.ImportFrom) -> cst.Import | cst.ImportFrom | cst.RemovalSentinel:
        kept = [
            alias
            for alias in statement.names
            if (alias.evaluated_alias or alias.evaluated_name.split(".")[0]) in self.used
        ]
        if not kept:
            return cst.RemoveFromParent()
        if len(kept) == len(statement.names):
            return statement
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return statement.with_changes(names=kept)


def docstring_entry(node: cst.FunctionDef | cst.ClassDef, name: str) -> list[str]:
    """
    Return what a docstring says about an argument.

    Args:
        node (`libcst.FunctionDef` or `libcst.ClassDef`): Whose docstring.
        name (`str`): The argument.

    Returns:
        `list[str]`: The lines, the first without indentation.

    Raises:
        `LookupError`: It says nothing.
    """
    lines = (docstring_of(node) or "").splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith(f"{name} ("):
            indentation = len(line) - len(line.lstrip())
            entry = [line]
            for following in lines[number + 1 :]:
                if not following.strip() or len(following) - len(following.lstrip()) <= indentation:
                    break
                entry.append(following)
            return [line[indentation:] for line in entry]
    raise LookupError(f"the docstring of {node.name.value} says nothing about {name}")
