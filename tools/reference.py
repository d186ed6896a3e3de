# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The pages of the documentation that are not in docs/: the reference, made from the docstrings, and the benchmarks.

MkDocs calls `on_files` and `on_page_markdown`, see mkdocs.yml. The sources are parsed and not imported, so that building
the documentation needs neither torch nor Accelerate.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "accelerate_presharded"

# Not imported from the package by users, but returned to them.
_RETURNED = {"Patch": "patching"}

_INTRODUCTION = """# Reference

Everything that `accelerate_presharded` exports, from the docstrings. Of classes that are derived from Accelerate's only
what is different is here: all else is as in Accelerate's own documentation.
"""

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example|\*\*Available attributes:\*\*):?$", re.MULTILINE)
_ENTRY = re.compile(r"^([*\w]+) \((.*?)\):\s*(.*)$", re.DOTALL)
_LINK = re.compile(r"\[`~?([\w.]+)`\]")
_WIDTH = 88


def on_files(files, config):
    """Add the pages."""
    from mkdocs.structure.files import File

    benchmarks = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name, content in (("reference.md", reference()), ("benchmarks.md", benchmarks)):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links that hold in the repository to the pages of the documentation."""
    return markdown.replace("](../benchmarks/README.md)", "](benchmarks.md)")


def reference() -> str:
    """
    Make the page of everything that is public.

    Returns:
        `str`: The page, in Markdown.
    """
    documented = {}
    for name, module in sorted({**_public(), **_RETURNED}.items()):
        body = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")).body
        [node] = [each for each in body if getattr(each, "name", None) == name]
        documented[name] = node
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            public = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
            if public and ast.get_docstring(method):
                documented[f"{name}.{method.name}"] = method
    names = [f"[`{name}`](#{name})" for name in documented if "." not in name]
    sections = [_section(name, node, set(documented)) for name, node in documented.items()]
    return "\n\n".join([_INTRODUCTION, " · ".join(names), *sections]) + "\n"


def _public() -> dict[str, str]:
    """The exported names, and the module of each."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_MODULES":
            return ast.literal_eval(node.value)
    raise ValueError("`__init__.py` has no `_MODULES`.")


def _section(name: str, node: ast.ClassDef | ast.FunctionDef, linked: set[str]) -> str:
    level = "###" if "." in name else "##"
    parts = [f"{level} `{name}` {{ #{name} }}", f"```python\n{_signature(name, node)}\n```"]
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    text, *sections = _SECTION.split(docstring)
    parts.append(text.strip())
    for title, body in zip(sections[::2], sections[1::2]):
        parts.append(_render(title, textwrap.dedent(body.strip("\n"))))

    def link(found: re.Match) -> str:
        return f"[`{found[1]}`](#{found[1]})" if found[1] in linked else f"`{found[1]}`"

    return _LINK.sub(link, "\n\n".join(parts))


def _render(title: str, body: str) -> str:
    if title == "Example":
        return body.replace("```python", "```pycon").strip()
    if title == "Args":
        title, body = "Parameters", "\n".join(map(_parameter, _entries(body)))
    elif title.startswith("**"):
        title, body = "Attributes", body.strip().replace(" -- ", " — ")
    elif title == "Raises":
        body = "\n".join(f"- {_unwrapped(entry)}" for entry in _entries(body))
    else:
        return f"**{title}:** {_unwrapped(body)}"
    return f"**{title}:**\n\n{body}"


def _entries(body: str) -> Iterator[str]:
    """Part a section at the lines that are not indented; a sentence that goes on there is no entry of its own."""
    entry = []
    for line in body.splitlines():
        begins = re.match(r"[*\w]+ \(|`\w+`:", line)
        if begins and entry:
            yield "\n".join(entry)
            entry = []
        entry.append(line)
    yield "\n".join(entry)


def _parameter(entry: str) -> str:
    name, kind, description = _ENTRY.match(entry).groups()
    return f"- **{name.replace('*', chr(92) + '*')}** ({_unwrapped(kind)}) — {_unwrapped(description)}"


def _unwrapped(text: str) -> str:
    return " ".join(text.split())


def _signature(name: str, node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.FunctionDef):
        if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
            return f"{name}: {ast.unparse(node.returns)}"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return _call(name, _arguments(node.args), returns)
    init = next((each for each in node.body if getattr(each, "name", None) == "__init__"), None)
    if init is not None:
        return _call(f"class {name}", _arguments(init.args), "")
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {name}({bases.lstrip('_')})" if bases else f"class {name}"


def _arguments(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parts = [_argument(argument, default) for argument, default in zip(positional, defaults)]
    if arguments.vararg:
        parts.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_argument(argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        parts.append(f"**{ast.unparse(arguments.kwarg)}")
    return [part for part in parts if part != "self"]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    return f"{ast.unparse(argument)}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def _call(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= _WIDTH:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inner}){returns}"
