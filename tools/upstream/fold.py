# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Folds this package's overrides into the methods, functions and classes of Accelerate that they override.

An override is made of new parameters, guards, and `return super().name(...)` as the last line. Inside Accelerate the
parameters are added to the method itself and the guards go before everything that it does. Where that is not all, a
comment beside the override says so:

    # upstream: nothing               the method needs no change inside Accelerate
    # upstream: in f(x=y)             instead of the next statement, the method's own call of f gets this argument
    # upstream: then f(self, x)       and this follows that call; x is what the next statement assigns
"""

from __future__ import annotations

import dataclasses

import libcst as cst
import libcst.matchers as m

from .package import FOLDED_CLASSES, SUBPACKAGE, Package, docstring_entry
from .trees import (
    MissingAnchor,
    definitions,
    docstring_of,
    dotted,
    import_lines,
    imports,
    insert_import,
    names_in,
    replaced,
    with_docstring,
)


HINT = "# upstream:"

# Accelerate's.
LINE_LENGTH = 119


@dataclasses.dataclass
class Override:
    """
    What an override adds to the method that it overrides.

    Args:
        node (`libcst.FunctionDef`): The override.
        passed_on (`set[str]`): The parameters of the overridden method that it knows.
        guards (`list[libcst.BaseStatement]`): What goes before everything else.
        arguments (`list[libcst.Arg]`): What is added to a call inside the overridden method.
        called (`str`): The name of the function that is called there.
        then (`libcst.BaseStatement`, *optional*): What follows that call.
        result (`str`): The name that the result of the call has in `then`.
    """

    node: cst.FunctionDef
    passed_on: set[str]
    guards: list[cst.BaseStatement]
    arguments: list[cst.Arg] = dataclasses.field(default_factory=list)
    called: str = ""
    then: cst.BaseStatement | None = None
    result: str = ""

    @classmethod
    def read(cls, node: cst.FunctionDef) -> Override | None:
        """Read an override; `None` if a hint says that Accelerate needs nothing of it."""
        body = node.body.body[1:] if docstring_of(node) is not None else node.body.body
        override = cls(node, _passed_on(body[-1]), [])
        for statement in body[:-1]:
            hints = [line.comment.value[len(HINT) :].strip() for line in statement.leading_lines if _is_hint(line)]
            if not hints:
                override.guards.append(statement)
            for hint in hints:
                word, _, rest = hint.partition(" ")
                if word.rstrip(",") == "nothing":
                    return None
                if word == "in":
                    call = cst.parse_expression(rest)
                    override.called, override.arguments = call.func.value, list(call.args)
                    override.result = statement.body[0].targets[0].target.value
                elif word == "then":
                    override.then = cst.parse_statement(rest)
                else:
                    raise ValueError(f"{node.name.value}: there is no such hint as {hint!r}")
        return override

    def names(self) -> set[str]:
        """The names that are mentioned by what it adds."""
        return names_in(*self.guards, *self.arguments, *([self.then] if self.then else []))


def _is_hint(line: cst.EmptyLine) -> bool:
    return line.comment is not None and line.comment.value.startswith(HINT)


def _passed_on(statement: cst.BaseStatement) -> set[str]:
    call = statement.body[-1].value
    return {arg.keyword.value if arg.keyword else dotted(arg.value) for arg in call.args if not arg.star}


@dataclasses.dataclass
class Folded:
    """
    A module of Accelerate with everything folded in.

    Args:
        code (`str`): The module.
        anchors (`list[str]`): What was found in it and changed.
        used (`set[str]`): The names of this package that it uses now.
    """

    code: str
    anchors: list[str]
    used: set[str]


def fold_accelerator(code: str, package: Package) -> Folded:
    """
    Fold the `Accelerator` of this package into Accelerate's.

    Args:
        code (`str`): Accelerate's module.
        package ([`Package`]): This package.

    Returns:
        [`Folded`]: The module with the feature.

    Raises:
        [`MissingAnchor`]: It lacks some method or parameter.
    """
    module_name, class_name = FOLDED_CLASSES["accelerator"]
    module = cst.parse_module(code)
    theirs = _class(module, class_name)
    own_module = package.modules["accelerator"]
    sources = {here: source.lstrip(".") for source, _, here in imports(own_module) if source.startswith(".")}
    anchors, missing, used = [], [], {}
    body = list(theirs.body.body)
    for name, node in definitions(_class(own_module, class_name).body.body).items():
        overridden = definitions(body).get(name)
        if isinstance(node, cst.FunctionDef) and any(dotted(each.decorator) == "property" for each in node.decorators):
            try:
                body = _with_property(body, node)
                anchors.append(f"{class_name}: properties of `dataloader_config`")
            except MissingAnchor as problem:
                missing.append(f"{class_name}: {problem}")
            continue
        if "super" not in names_in(node):
            continue  # it belongs to this package alone
        override = Override.read(node)
        if override is None:
            continue
        try:
            if overridden is None:
                raise MissingAnchor("the method")
            new = fold(override, overridden)
        except MissingAnchor as problem:
            missing.append(f"{class_name}.{name}: {problem}")
            continue
        body = replaced(body, name, new)
        anchors.append(f"{class_name}.{name}")
        for each in override.names():
            if each in sources:
                used.setdefault(f".{SUBPACKAGE}.{sources[each]}", set()).add(each)
            elif override.then is not None and each in names_in(override.then.body[0].value.func):
                used.setdefault(f".{SUBPACKAGE}.{package.definition(each)}", set()).add(each)
    if missing:
        raise MissingAnchor("\n".join(missing))
    module = module.with_changes(
        body=replaced(module.body, class_name, theirs.with_changes(body=theirs.body.with_changes(body=body)))
    )
    for line in import_lines(used):
        module = insert_import(module, line)
    return Folded(module.code, anchors, set().union(*used.values()))


def fold_functions(code: str, module_name: str, package: Package) -> Folded:
    """
    Fold the functions of this package that end in a call of a function of an Accelerate module into that.

    Args:
        code (`str`): Accelerate's module.
        module_name (`str`): Its name in Accelerate.
        package ([`Package`]): This package.

    Returns:
        [`Folded`]: The module with the feature.

    Raises:
        [`MissingAnchor`]: It lacks some function or parameter.
    """
    module = cst.parse_module(code)
    anchors, missing, used = [], [], set()
    for (here, name), there in package.folded_functions.items():
        if there != module_name:
            continue
        own_module = package.modules[here]
        override = Override.read(definitions(own_module.body)[name])
        sources = {name: source.lstrip(".") for source, _, name in imports(own_module) if source.startswith(".")}
        sources |= {name: here for name in definitions(own_module.body)}
        needed: dict[str, set[str]] = {}
        for each in override.names():
            if each in sources:
                needed.setdefault(f".{SUBPACKAGE}.{sources[each]}", set()).add(each)
        try:
            if name not in definitions(module.body):
                raise MissingAnchor("the function")
            inside = _WithinModule(f"accelerate.{module_name}")
            override.guards = [guard.visit(inside) for guard in override.guards]
            # Imported here and not at the top, where it would be a circle.
            first = override.guards[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            override.guards = [*import_lines(needed), first, *override.guards[1:]]
            new = fold(override, definitions(module.body)[name])
        except MissingAnchor as problem:
            missing.append(f"{name}: {problem}")
            continue
        module = module.with_changes(body=replaced(module.body, name, new))
        anchors.append(name)
        used |= set().union(*needed.values())
    if missing:
        raise MissingAnchor("\n".join(missing))
    return Folded(module.code, anchors, used)


def fold_fields(code: str, package: Package) -> Folded:
    """
    Add the fields of this package's `DataLoaderConfiguration` to Accelerate's.

    Args:
        code (`str`): Accelerate's module.
        package ([`Package`]): This package.

    Returns:
        [`Folded`]: The module with the feature.

    Raises:
        [`MissingAnchor`]: It has no such class.
    """
    _, class_name = FOLDED_CLASSES["configuration"]
    module = cst.parse_module(code)
    theirs, own = _class(module, class_name), _class(package.modules["configuration"], class_name)
    fields = [line for line in own.body.body if m.matches(line, m.SimpleStatementLine(body=[m.AnnAssign()]))]
    for line in fields:
        entry = docstring_entry(own, line.body[0].target.value)
        theirs = with_docstring(theirs, _with_entry(docstring_of(theirs) or "", entry))
    new = [line.visit(_WithinModule("dataclasses")).with_changes(leading_lines=[]) for line in fields]
    theirs = theirs.with_changes(body=theirs.body.with_changes(body=[*theirs.body.body, *new]))
    module = module.with_changes(body=replaced(module.body, class_name, theirs))
    return Folded(module.code, [class_name], set())


def export(code: str, package: Package) -> Folded:
    """
    Offer the public names in Accelerate's `__init__`.

    Args:
        code (`str`): The module.
        package ([`Package`]): This package.

    Returns:
        [`Folded`]: The module with the names.

    Raises:
        [`MissingAnchor`]: It imports nothing.
    """
    module = cst.parse_module(code)
    for line in import_lines({f".{SUBPACKAGE}": package.exported}):
        module = insert_import(module, line)
    return Folded(module.code, ["the imports"], set(package.exported))


def require(code: str, requirements: tuple[str, ...]) -> Folded:
    """
    Add what the tests need to Accelerate's `extras["test_prod"]`.

    Args:
        code (`str`): Accelerate's `setup.py`.
        requirements (`tuple[str, ...]`): The names of the packages.

    Returns:
        [`Folded`]: The module with the requirements.

    Raises:
        [`MissingAnchor`]: There is no such list.
    """
    target = m.Subscript(m.Name("extras"), [m.SubscriptElement(m.Index(m.SimpleString('"test_prod"')))])
    wanted = m.SimpleStatementLine([m.Assign([m.AssignTarget(target)])])
    module = cst.parse_module(code)
    position = next((number for number, line in enumerate(module.body) if m.matches(line, wanted)), None)
    if position is None:
        raise MissingAnchor('extras["test_prod"]')
    names = ", ".join(f'"{name}"' for name in requirements)
    added = cst.parse_statement(f'extras["test_prod"] += [{names}]')
    body = [*module.body[: position + 1], added, *module.body[position + 1 :]]
    return Folded(module.with_changes(body=body).code, ['extras["test_prod"]'], set())


def fold(override: Override, theirs: cst.FunctionDef) -> cst.FunctionDef:
    """
    Fold an override into what it overrides.

    Args:
        override ([`Override`]): The override.
        theirs (`libcst.FunctionDef`): The function or method of Accelerate.

    Returns:
        `libcst.FunctionDef`: It, with what the override adds.

    Raises:
        [`MissingAnchor`]: It has no docstring, lacks a parameter, or a call that a hint names.
    """
    docstring = docstring_of(theirs)
    if docstring is None:
        raise MissingAnchor("its docstring")
    known = {param.name.value for param in _params(theirs.params)}
    lacking = sorted(name for name in override.passed_on - known)
    if lacking:
        raise MissingAnchor(f"its parameters {', '.join(lacking)}")
    added = [param for param in _params(override.node.params) if param.name.value not in known]
    for param in added:
        docstring = _with_entry(docstring, docstring_entry(override.node, param.name.value))
    theirs = with_docstring(theirs, docstring).with_changes(params=_with_params(theirs, added))
    guards = override.guards
    if any(dotted(each.decorator).endswith("contextmanager") for each in theirs.decorators):
        # There the method is a generator, which does not return a context but is one.
        guards = [guard.visit(_Entering()) for guard in guards]
    guards = [guard.visit(_OnSelf()) for guard in guards]
    first, *others = theirs.body.body
    theirs = theirs.with_changes(body=theirs.body.with_changes(body=[first, *guards, *others]))
    return _with_argument(theirs, override) if override.called else theirs


def _params(params: cst.Parameters) -> list[cst.Param]:
    return [*params.params, *params.kwonly_params]


def _with_params(theirs: cst.FunctionDef, added: list[cst.Param]) -> cst.Parameters:
    name = "kwonly_params" if isinstance(theirs.params.star_arg, cst.Param) else "params"
    present = list(getattr(theirs.params, name))
    for param in added:
        # As the one before it: on a line of its own, or on the same line.
        before = present[-1]
        comma = present[-2].comma if len(present) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        present[-1] = before.with_changes(comma=comma, whitespace_after_param=cst.SimpleWhitespace(""))
        present.append(param.with_changes(comma=before.comma, whitespace_after_param=before.whitespace_after_param))
    params = theirs.params.with_changes(**{name: present})
    lines = cst.Module([theirs.with_changes(params=params, body=cst.parse_statement("def f():\n    pass").body)]).code
    if not added or max(map(len, lines.splitlines())) + 4 <= LINE_LENGTH:
        return params
    # One parameter a line, as formatters have it.
    between = cst.Comma(whitespace_after=_new_line("    "))
    apart = [param.with_changes(comma=between, whitespace_after_param=cst.SimpleWhitespace("")) for param in present]
    apart[-1] = apart[-1].with_changes(comma=cst.Comma(whitespace_after=_new_line("")))
    return params.with_changes(**{name: apart})


def _new_line(indentation: str) -> cst.ParenthesizedWhitespace:
    return cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indentation))


def _with_entry(docstring: str, entry: list[str]) -> str:
    """Add an entry at the end of the arguments of a docstring."""
    lines = docstring.split("\n")
    start = next((number for number, line in enumerate(lines) if line.strip() == "Args:"), None)
    if start is None:
        raise MissingAnchor("the `Args:` of its docstring")
    indentation = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    for number, line in enumerate(lines[start + 1 :], start + 1):
        if line.strip() and len(line) - len(line.lstrip()) <= indentation:
            break
        if line.strip():
            end = number + 1
    written = [" " * (indentation + 4) + line for line in entry]
    return "\n".join([*lines[:end], *written, *lines[end:]])


class _OnSelf(cst.CSTTransformer):
    """`super().name` is `self.name` inside the class itself: the guard does not hold a second time."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        return cst.Name("self") if m.matches(updated_node, m.Call(func=m.Name("super"), args=[])) else updated_node


class _Entering(cst.CSTTransformer):
    """`return context` becomes `with context: yield` and `return`."""

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        last = updated_node.body[-1]
        if not m.matches(last, m.SimpleStatementLine(body=[m.Return(value=m.Call())])):
            return updated_node
        entered = cst.parse_statement("with context:\n    yield\n")
        item = cst.WithItem(last.body[0].value)
        entered = entered.with_changes(items=[item], leading_lines=last.leading_lines)
        return updated_node.with_changes(body=[*updated_node.body[:-1], entered, cst.parse_statement("return")])


class _WithinModule(cst.CSTTransformer):
    """Shortens the names of a module for use inside it."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        return updated_node.attr if dotted(updated_node.value) == self.name else updated_node


def _with_argument(theirs: cst.FunctionDef, override: Override) -> cst.FunctionDef:
    body, found = [], False
    for statement in theirs.body.body:
        call = m.Call(func=m.Name(override.called))
        if m.matches(statement, m.SimpleStatementLine(body=[m.Assign(value=call)])):
            found = True
            assign = statement.body[0]
            args = list(assign.value.args)
            for arg in override.arguments:
                last = args[-1]
                separator = args[-2].comma if len(args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
                args[-1] = last.with_changes(comma=separator)
                args.append(arg.with_changes(comma=last.comma, equal=last.equal))
            statement = statement.with_changes(body=[assign.with_changes(value=assign.value.with_changes(args=args))])
            body.append(statement)
            if override.then is not None:
                result = dotted(assign.targets[0].target)
                body.append(override.then.visit(_Renamed(override.result, result)))
        else:
            body.append(statement)
    if not found:
        raise MissingAnchor(f"its call of {override.called}")
    return theirs.with_changes(body=theirs.body.with_changes(body=body))


class _Renamed(cst.CSTTransformer):
    def __init__(self, old: str, new: str):
        super().__init__()
        self.old, self.new = old, new

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return cst.Name(self.new) if updated_node.value == self.old else updated_node


def _with_property(body: list[cst.CSTNode], node: cst.FunctionDef) -> list[cst.CSTNode]:
    """Put a property behind the last one that reads the configuration of the loaders."""
    positions = [
        number
        for number, other in enumerate(body)
        if isinstance(other, cst.FunctionDef) and other.decorators and "dataloader_config" in names_in(other.body)
    ]
    if not positions:
        raise MissingAnchor("the properties that read `dataloader_config`")
    position = positions[-1] + 1
    return [*body[:position], node.with_changes(leading_lines=[cst.EmptyLine(indent=False)]), *body[position:]]


def _class(module: cst.Module, name: str) -> cst.ClassDef:
    found = definitions(module.body).get(name)
    if not isinstance(found, cst.ClassDef):
        raise MissingAnchor(f"class {name}")
    return found
