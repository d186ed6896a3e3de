# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Runs a script as Python itself would, with a hook that patches accelerate when the script imports it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from multiprocessing import spawn
from types import CodeType, ModuleType
from typing import Any

from . import hook


_COMMAND = "accelerate-presharded run"


def run(script: str | None, module: str | None, arguments: list[str]) -> None:
    """
    Run a file or a module as `__main__`, in this process and for its lifetime.

    Args:
        script (`str`, *optional*): The path of a file.
        module (`str`, *optional*): The name of a module, or of a package that has a `__main__`.
        arguments (`list[str]`): What the program is given.
    """
    hook.install(_COMMAND)
    _patch_children()
    # Where Python has put the folder of the program: this package's own, which nobody wants.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.getcwd() if script is None else os.path.dirname(os.path.realpath(script))
    try:
        main, code = _open_module(module) if script is None else _open_script(script)
        sys.argv[:] = [main.__file__ if script is None else script, *arguments]
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_us(error)
        raise


def _open_script(path: str) -> tuple[ModuleType, CodeType]:
    shown, path = path, os.path.abspath(path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"{sys.executable}: can't open file {shown!r}: {error.strerror}")
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __builtins__=sys.modules["builtins"], __loader__=loader)
    return main, compile(source, path, "exec", dont_inherit=True)


def _open_module(name: str) -> tuple[ModuleType, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = None if spec is None else spec.loader.get_code(spec.name)
    except ModuleNotFoundError as error:
        sys.exit(f"{sys.executable}: {error}")
    if code is None:
        sys.exit(f"{sys.executable}: No module named {name!r} that can be run")
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    vars(main)["__builtins__"] = sys.modules["builtins"]
    return main, code


def _show_without_us(error: BaseException) -> None:
    """Show the traceback that Python would, from the program's first line on."""
    traceback = error.__traceback__.tb_next
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == __name__:
        traceback = traceback.tb_next
    show = sys.excepthook
    sys.excepthook = lambda kind, value, _: show(kind, value.with_traceback(traceback), traceback)


class _Installer:
    """Patches in the process that receives it."""

    def __reduce__(self) -> tuple:
        return hook.install, (_COMMAND,)


def _patch_children() -> None:
    """
    Have processes that `multiprocessing` starts anew patch too. They are sent what they need to become like this one,
    and import the script only afterwards.
    """
    prepare = spawn.get_preparation_data

    def prepare_and_patch(name: str) -> dict[str, Any]:
        return {_COMMAND: _Installer(), **prepare(name)}

    spawn.get_preparation_data = prepare_and_patch
