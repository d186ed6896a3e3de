# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Waits for the first import of accelerate, and patches it when it is done.

`accelerate-presharded enable` writes a copy of this file into site-packages, and every interpreter runs it when it
starts. So it imports nothing, and whatever goes wrong later is one line and never an error.
"""

import sys


_PACKAGE = "accelerate_presharded"


def install(command="accelerate-presharded enable"):
    """
    Patch accelerate as soon as it is imported, or now if it is already.

    Args:
        command (`str`, *optional*, defaults to `"accelerate-presharded enable"`):
            The command by which the user has asked for it, for messages.
    """
    if "accelerate" in sys.modules:
        _patch(command)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(command))


class _Finder:
    """
    Lets the other finders find the modules, and watches two kinds being executed: accelerate, and this package's own.

    This package imports accelerate, so if a program imports it first, accelerate is complete at a time when this
    package is not. It is patched when the outermost of them is complete.
    """

    def __init__(self, command):
        self.command = command
        self.depth = 0

    def find_spec(self, name, path=None, target=None):
        if name != "accelerate" and not name.startswith(_PACKAGE + "."):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is self else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def executed(self):
        if self.depth == 0 and "accelerate" in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _patch(self.command)


class _Loader:
    """Executes a module with its own loader, and tells the finder."""

    def __init__(self, loader, finder):
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        # From here on the module is as it would be without us.
        module.__spec__.loader = module.__loader__ = self.loader
        self.finder.depth += 1
        try:
            self.loader.exec_module(module)
        finally:
            self.finder.depth -= 1
        self.finder.executed()


def _patch(command):
    try:
        from accelerate_presharded.environment import patch_imported
    except ImportError as error:
        line = f"accelerate_presharded cannot be imported ({error}), so accelerate is used as it is."
        if __name__ != _PACKAGE + ".hook":
            line += f" If you have uninstalled it, delete {__file__} and {__file__[:-3]}.pth."
        print(line, file=sys.stderr)
        return
    patch_imported(command)
