# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The command `accelerate-presharded`. What it does stands in other modules, which are imported when they are needed."""

from __future__ import annotations

import argparse
import sys

from . import __version__
from .audit_command import add_parser as _add_audit


_RUN = """\
Runs a script unchanged, with this package's names in the place of accelerate's, as `python SCRIPT ...` or
`python -m MODULE ...` would run it. With a launcher:

  accelerate launch -m accelerate_presharded run train.py --my-option 3
  torchrun --nproc_per_node 2 -m accelerate_presharded run train.py --my-option 3
"""

_ENABLE = """\
Makes every program of this Python environment use this package's names in the place of accelerate's, without a change
to the program: a small file in site-packages waits for the first import of accelerate. Programs that never import it
are not affected. `accelerate-presharded disable` takes it back. So does `pip uninstall`, and an upgrade of this package
too: run `enable` again after one.
"""

_STATUS = """\
Tells whether `accelerate-presharded enable` is in effect in this Python environment. The exit status is 0 if it is, and
1 if it is not.
"""


def main(argv: list[str] | None = None) -> int:
    """
    Run the command.

    Args:
        argv (`list[str]`, *optional*): The arguments. Defaults to those of this process.

    Returns:
        `int`: The exit status.
    """
    own, scripts = _split(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="accelerate-presharded",
        description="Train with Accelerate on data that is already sharded across ranks.",
        epilog="More on each command: accelerate-presharded COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"accelerate-presharded {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_audit, _add_run, _add_enable, _add_disable, _add_status):
        add(subparsers)
    arguments = parser.parse_args(own)
    arguments.script_arguments = scripts
    return arguments.handler(arguments)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Part the arguments of `run` from those of the script, which may look like any of ours."""
    if argv[:1] == ["run"]:
        for position, argument in enumerate(argv[1:], 1):
            if argument == "-m":
                return argv[: position + 2], argv[position + 2 :]
            if not argument.startswith("-"):
                return argv[: position + 1], argv[position + 1 :]
    return argv, []


def _add(subparsers, name: str, handler, description: str, summary: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(handler=handler)
    return parser


def _add_run(subparsers) -> None:
    parser = _add(subparsers, "run", _run, _RUN, "run a script unchanged, with accelerate patched")
    parser.usage = "accelerate-presharded run [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    program = parser.add_mutually_exclusive_group(required=True)
    program.add_argument("-m", dest="module", metavar="MODULE", help="a module to run, in the place of SCRIPT")
    program.add_argument("script", nargs="?", metavar="SCRIPT", help="the file to run; what follows is for it")


def _run(arguments: argparse.Namespace) -> int:
    from .environment import refuse_accelerate
    from .running import run

    problem = refuse_accelerate()
    if problem is not None:
        return _fail(f"{problem} Without this package: python {arguments.script or '-m ' + arguments.module} ...")
    run(arguments.script, arguments.module, arguments.script_arguments)
    return 0


def _add_enable(subparsers) -> None:
    _add(subparsers, "enable", _enable, _ENABLE, "patch accelerate in every program of this environment")


def _enable(_: argparse.Namespace) -> int:
    from .environment import EnvironmentProblem, enable, recorded

    try:
        files = enable()
    except EnvironmentProblem as problem:
        return _fail(str(problem))
    print(f"Enabled for {sys.prefix}. Written:", *files, sep="\n  ")
    if not recorded():
        print("pip will not remove these files with this package: run `accelerate-presharded disable` before that.")
    return 0


def _add_disable(subparsers) -> None:
    _add(subparsers, "disable", _disable, "Takes `accelerate-presharded enable` back.", "take `enable` back")


def _disable(_: argparse.Namespace) -> int:
    from .environment import EnvironmentProblem, disable

    try:
        files = disable()
    except EnvironmentProblem as problem:
        return _fail(str(problem))
    if files:
        print(f"Disabled for {sys.prefix}. Removed:", *files, sep="\n  ")
    else:
        print(f"It was not enabled for {sys.prefix}.")
    return 0


def _add_status(subparsers) -> None:
    _add(subparsers, "status", _status, _STATUS, "tell whether `enable` is in effect")


def _status(_: argparse.Namespace) -> int:
    from .environment import status

    found = status()
    rows = {
        "environment": sys.prefix,
        "enabled": "yes" if found.files else "no",
        "files": "\n             ".join(map(str, found.files)) or "none",
        "accelerate": found.accelerate or "not installed",
        "supported": f"accelerate{found.supported}" if found.supported else "not known",
        "in effect": "yes" if found.problem is None else f"no. {found.problem}",
    }
    for name, text in rows.items():
        print(f"{name:12} {text}")
    return 0 if found.problem is None else 1


def _fail(message: str) -> int:
    print(f"accelerate-presharded: error: {message}", file=sys.stderr)
    return 1
