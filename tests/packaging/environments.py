"""Fresh environments that need no download: what is installed here is linked into them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import attrs
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TOOL_TEMPLATE = ROOT / "amanda-core" / "templates" / "tool-package"
DRIVER_TEMPLATE = TOOL_TEMPLATE.parent / "driver-package"
BUILDERS = ("hatchling", "hatch-fancy-pypi-readme")
MINIGRAD = """
import minigrad
for size in (2, 3, 2):
    x = minigrad.MiniTensor([[1.0] * 4] * size, requires_grad=True)
    minigrad.backward(minigrad.relu(minigrad.linear(x, minigrad.MiniParameter([[1.0] * 4] * 3))))
"""
OURS = re.compile(r"amanda[-_]")


@attrs.frozen
class Environment:
    """A virtual environment."""

    folder: Path

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, such as ``amanda`` or ``python``, in its folder."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AMANDA", "PYTHON"))}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def created(folder: Path, dependencies: Iterable[str]) -> Environment:
    """A new environment with some distributions of this one and all that they need."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in sorted(closure(dependencies)):
        for entry in _top_level(metadata.distribution(name)):
            link = site / entry.name
            if not link.exists():
                link.symlink_to(entry)
    return Environment(folder)


def install(environment: Environment, *arguments: str) -> None:
    """Run ``pip install`` on an environment, without an index."""
    python = str(environment.folder / "bin" / "python")
    _pip("--python", python, "install", "--no-index", "--no-build-isolation", *arguments)


def wheel(folder: Path, *sources: Path, **variables: str) -> Path:
    """A folder with the wheels of packages, built with variables of the environment."""
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _pip("wheel", *options, *map(str, sources), **variables)
    return folder


def _pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def closure(names: Iterable[str]) -> set[str]:
    """Distributions and what they require, extras aside."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found or OURS.match(name):
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def _top_level(distribution: metadata.Distribution) -> Iterator[Path]:
    """What a distribution has put into site-packages."""
    root = Path(str(distribution.locate_file("")))
    names = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
    for name in sorted(names - {"__pycache__"}):
        yield root / name
