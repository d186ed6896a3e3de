# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""One Python environment in which every program's accelerate is patched: the files for it, and whether they work.

Neither torch nor Accelerate is imported here.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import os
import py_compile
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from . import hook


_DISTRIBUTION = __package__.replace("_", "-")
_MODULE = "_accelerate_presharded_hook"

# A line that begins with `import` is executed when the interpreter starts. Without the module nothing happens.
_PTH = f"""\
import sys; exec("try:\\n    import {_MODULE}\\nexcept ImportError:\\n    pass\\nelse:\\n    {_MODULE}.install()")
""".encode()


class EnvironmentProblem(Exception):
    """Why something cannot be done in this environment, and what to do about it."""


def refuse_accelerate(version: str | None = None) -> str | None:
    """
    Say why a version of Accelerate cannot be patched.

    Args:
        version (`str`, *optional*): The version. Defaults to the one that is installed.

    Returns:
        `str` or `None`: What was found and what was expected; `None` if all is well.
    """
    if version is None:
        try:
            version = metadata.version("accelerate")
        except metadata.PackageNotFoundError:
            return "accelerate is not installed here."
    supported = supported_accelerate()
    if supported is None or supported.contains(version, prereleases=True):
        return None
    return (
        f"accelerate {version} is not supported by {_DISTRIBUTION} {metadata.version(_DISTRIBUTION)}, which needs "
        f"accelerate{supported}."
    )


def supported_accelerate():
    """
    Read the versions of Accelerate that this package supports from what it requires.

    Returns:
        `packaging.specifiers.SpecifierSet` or `None`: `None` if this package is not installed, only importable.
    """
    from packaging.requirements import Requirement  # which Accelerate depends on; slow to import

    try:
        requirements = map(Requirement, metadata.requires(_DISTRIBUTION) or ())
    except metadata.PackageNotFoundError:
        return None
    return next((entry.specifier for entry in requirements if entry.name == "accelerate"), None)


def patch_imported(command: str) -> None:
    """
    Patch the accelerate that has just been imported. Whatever is wrong is one line on the main process.

    Args:
        command (`str`): The command by which the user has asked for it.
    """
    try:
        problem = refuse_accelerate(sys.modules["accelerate"].__version__)
        if problem is None:
            from .patching import patch_and_announce

            patch_and_announce(command)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None and _is_main_process():
        print(f"{_DISTRIBUTION} (by `{command}`): accelerate is used as it is. {problem}", file=sys.stderr)


def _is_main_process() -> bool:
    processes = sys.modules.get("multiprocessing.process")
    return os.environ.get("RANK", "0") == "0" and (processes is None or processes.parent_process() is None)


@dataclasses.dataclass(frozen=True)
class Status:
    """
    What `accelerate-presharded status` tells.

    Args:
        folder (`Path`): The environment's site-packages.
        files (`list[Path]`): The files of the hook that exist.
        accelerate (`str`, *optional*): The installed version.
        supported (`str`, *optional*): The supported versions.
        problem (`str`, *optional*): Why programs do not get the patch; `None` if they do.
    """

    folder: Path
    files: list[Path]
    accelerate: str | None
    supported: str | None
    problem: str | None


def status() -> Status:
    """
    Find out whether programs in this environment get the patch. A new interpreter is asked.

    Returns:
        [`Status`]: What was found.
    """
    files = [file for file in _files() if file.exists()]
    problem = refuse_accelerate()
    if not files:
        problem = "It is not enabled."
    elif len(files) < len(_files()):
        missing = [str(file) for file in _files() if file not in files]
        problem = f"{', '.join(missing)} is missing. Run `accelerate-presharded enable` again."
    elif problem is None and not _starts_with_hook():
        problem = f"{sys.executable} does not read {files[0]} when it starts."
    installed = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version("accelerate")
    supported = None if installed is None else supported_accelerate()
    return Status(_folder(), files, installed, None if supported is None else str(supported), problem)


def enable() -> list[Path]:
    """
    Have every interpreter of this environment wait for accelerate and patch it.

    Returns:
        `list[Path]`: The files that were written.

    Raises:
        [`EnvironmentProblem`]: Accelerate is missing or not supported, or the files cannot be written. None is left.
    """
    problem = refuse_accelerate()
    if problem is not None:
        raise EnvironmentProblem(problem)
    pth, module = _files()
    try:
        _write(module, Path(hook.__file__).read_bytes())
        py_compile.compile(str(module))
        _record([pth, module])
        _write(pth, _PTH)  # last: from here on it works
    except OSError as error:
        with contextlib.suppress(OSError):
            disable()
        raise EnvironmentProblem(
            f"{error.strerror}: {error.filename}. Enabling writes into {pth.parent}, so it takes someone who may "
            "write there. For one program, use `python -m accelerate_presharded run`, or call `patch_accelerate()`."
        ) from error
    return [pth, module]


def disable() -> list[Path]:
    """
    Remove what [`enable`] has written.

    Returns:
        `list[Path]`: The files that were removed.

    Raises:
        [`EnvironmentProblem`]: The files cannot be removed.
    """
    pth, module = _files()
    compiled = (module.parent / "__pycache__").glob(f"{_MODULE}.*.pyc")
    removed = [file for file in (pth, module, *compiled) if file.exists()]
    try:
        for file in removed:
            file.unlink()
        _record([])
    except OSError as error:
        raise EnvironmentProblem(
            f"{error.strerror}: {error.filename}. Disabling takes someone who may write into {pth.parent}."
        ) from error
    return removed


def recorded() -> bool:
    """
    Tell whether pip knows of the files and removes them with this package.

    Returns:
        `bool`: `False` if this package is installed elsewhere, or not by pip.
    """
    path = _record_file()
    return path is not None and _MODULE in path.read_text(encoding="utf-8")


def _folder() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _files() -> tuple[Path, Path]:
    return _folder() / f"{_MODULE}.pth", _folder() / f"{_MODULE}.py"


def _starts_with_hook() -> bool:
    question = f"import sys; print({_MODULE!r} in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    return answer.stdout.strip() == "True"


def _write(path: Path, content: bytes) -> None:
    # An interpreter that starts at this moment must not read half of it.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _record_file() -> Path | None:
    """The list of files that pip removes when it uninstalls this package, if that is in the same folder."""
    for distribution in metadata.distributions(name=_DISTRIBUTION, path=[str(_folder())]):
        for file in distribution.files or ():
            if file.name == "RECORD":
                return Path(distribution.locate_file(file))
    return None


def _record(files: list[Path]) -> None:
    """Make these files, and no others of the hook, part of the installed package."""
    path = _record_file()
    if path is None:
        return
    before = path.read_bytes()
    ending = b"\r\n" if before.endswith(b"\r\n") else b"\n"
    lines = [line for line in before.splitlines(keepends=True) if not line.startswith(_MODULE.encode())]
    for file in files:
        content = _PTH if file.suffix == ".pth" else file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{file.name},sha256={digest},{len(content)}".encode() + ending)
    if b"".join(lines) != before:
        _write(path, b"".join(lines))
