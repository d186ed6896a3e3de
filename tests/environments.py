# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Python environments made in a moment: they read the packages of the one that runs the tests."""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path


ROOT = Path(__file__).parent.parent


class Environment:
    """
    A virtual environment of its own, without packages.

    Args:
        folder (`Path`): Where to make it.
        shares_packages (`bool`, *optional*, defaults to `True`): Whether it reads the packages of the one in use.
        shares_sources (`bool`, *optional*, defaults to `True`): Whether it reads this package's sources, too.
    """

    def __init__(self, folder: Path, shares_packages: bool = True, shares_sources: bool = True):
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        [self.packages] = folder.glob("lib/python*/site-packages")
        if shares_packages:
            folders = site.getsitepackages() + [str(ROOT / "src")] * shares_sources
            (self.packages / "0.pth").write_text("".join(f"{entry}\n" for entry in folders))

    def run(self, *arguments, input: str | None = None, status: int | None = 0, **options):
        """What `python *arguments` writes, as a `subprocess.CompletedProcess`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RANK"))}
        process = subprocess.run(
            [self.python, *map(str, arguments)],
            input=input,
            text=True,
            capture_output=True,
            timeout=240,
            env=environment | {"OMP_NUM_THREADS": "1"} | options.pop("env", {}),
            **{"cwd": self.packages.parent} | options,
        )
        assert status is None or process.returncode == status, process.stdout + process.stderr
        return process

    def command(self, *arguments, **options):
        """The command `accelerate-presharded` in this environment."""
        return self.run("-m", "accelerate_presharded", *arguments, **options)

    def files(self) -> dict[str, bytes]:
        """All files, with their content; not the compiled modules that only reading has made."""
        return {
            str(file.relative_to(self.packages)): file.read_bytes()
            for file in self.packages.rglob("*")
            if file.is_file()
        }

    def add_accelerate(self, version: str, source: str = "") -> None:
        """A package that is accelerate in name and version only."""
        (self.packages / "accelerate").mkdir()
        (self.packages / "accelerate" / "__init__.py").write_text(f'__version__ = "{version}"\n{source}')
        information = self.packages / f"accelerate-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accelerate\nVersion: {version}\n")


def copy_of_sources(folder: Path) -> Path:
    """What pip needs to build this package, where building leaves its traces."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"), dirs_exist_ok=True
    )
    return folder


def pip(environment: Environment, *arguments) -> None:
    """Runs this environment's pip for another one."""
    process = subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", environment.python, *arguments],
        text=True,
        capture_output=True,
        timeout=240,
        cwd=environment.packages,
    )
    assert process.returncode == 0, process.stdout + process.stderr
