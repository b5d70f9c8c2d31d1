"""The command ``amanda`` in a process of its own, with external tools and a driver installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(__file__).parent / "packages"
"""``amanda_example``: two tools in a package of somebody else."""

DRIVER = ROOT / "amanda-core" / "templates" / "driver-package" / "src"
"""``minigrad``, a small framework, and ``amanda_minigrad``, its driver."""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def install(folder: Path, distribution: str, entry_point: str) -> None:
    """Write what an installer writes about a distribution with one plugin."""
    metadata = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[amanda]\n{entry_point}\n")


def other_package(folder: Path, tools: str, plugin: str) -> Path:
    """Write another package's tools and plugin as installed; the folder for ``PYTHONPATH``."""
    site = folder / "site"
    site.mkdir()
    (site / "other_tools.py").write_text(tools)
    (site / "other_plugin.py").write_text(plugin)
    install(site, "amanda-other", "other = other_plugin")
    return site


def driver_package(folder: Path, name: str, declared: str, running: str = "pass") -> None:
    """Write a package with a variant of minigrad's driver as installed, ``amanda-<name>``.

    Args:
        folder: a folder for ``PYTHONPATH``.
        name: of the driver.
        declared: body of the class that the plugin registers.
        running: body of the class that runs.
    """
    (folder / f"{name}_plugin.py").write_text(
        "from amanda import hookimpl\n"
        "from amanda_minigrad.plugin import MinigradDriver\n"
        "class Declared(MinigradDriver):\n"
        f"    name, target = {name!r}, '{name}_driver:Running'\n"
        f"{textwrap.indent(declared, '    ')}\n"
        "@hookimpl\n"
        "def amanda_register_drivers():\n"
        "    return [Declared]\n"
    )
    (folder / f"{name}_driver.py").write_text(
        "from amanda.driver import Namespace\n"
        "from amanda_minigrad.driver import MinigradEagerDriver\n"
        f"from {name}_plugin import Declared\n"
        "class Running(Declared, MinigradEagerDriver):\n"
        f"{textwrap.indent(running, '    ')}\n"
    )
    install(folder, f"amanda-{name}", f"{name} = {name}_plugin")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables that make the example and the driver template look installed.

    How they really install is tested in tests/packaging. What processes leave in their folder for
    temporary files, as those that are killed do, is removed.
    """
    folder = tmp_path_factory.mktemp("site")
    install(folder, "amanda-example", "example = amanda_example.plugin")
    install(folder, "amanda-minigrad", "minigrad = amanda_minigrad.plugin")
    path = os.pathsep.join([str(folder), str(TOOLS), str(DRIVER), os.environ.get("PYTHONPATH", "")])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AMANDA")}
    with tempfile.TemporaryDirectory() as temporary:
        yield {**inherited, "PYTHONPATH": path.rstrip(os.pathsep), "TMPDIR": temporary}


@pytest.fixture
def python(environment: dict[str, str], tmp_path: Path) -> Command:
    """Runs Python with arguments in the test's folder; ``PYTHONPATH`` comes before ours."""

    def path(variables: dict[str, str]) -> str:
        parts = [variables.get("PYTHONPATH", ""), environment["PYTHONPATH"]]
        return os.pathsep.join(part for part in parts if part)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**environment, **variables, "PYTHONPATH": path(variables)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.fixture
def amanda(python: Command) -> Command:
    """Runs the command with arguments in the test's folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "amanda", *arguments, **variables)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a program into the test's folder."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
