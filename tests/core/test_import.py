"""Core imports no framework."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from amanda import __version__
from tests.running import run_python

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "tensorflow", "numpy", "pytest", "rich")


def in_process(code: str, *path: Path) -> str:
    """What a fresh interpreter prints."""
    own = [str(folder) for folder in path] + [p for p in sys.path if p]
    result = run_python("-W", "error", "-c", code, env={"PYTHONPATH": os.pathsep.join(own)})
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that makes all packages of the repository look installed."""
    for project in ROOT.glob("amanda-*/pyproject.toml"):
        data = tomllib.loads(project.read_text())["project"]
        folder = tmp_path / f"{data['name'].replace('-', '_')}-{__version__}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {data['name']}\nVersion: {__version__}\n"
        )
        points = data.get("entry-points", {}).get("amanda", {})
        lines = [f"{name} = {target}" for name, target in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[amanda]", *lines, ""]))
    return tmp_path


def test_import_amanda() -> None:
    """``import amanda`` imports no framework, no numpy and no pytest."""
    code = f"import sys, amanda; print([m for m in {HEAVY} if m in sys.modules])"
    assert in_process(code) == "[]"


def test_load_all_plugins(installed: Path) -> None:
    """Loading all plugins and listing all tools and drivers imports no framework."""
    sources = [project.parent / "src" for project in ROOT.glob("amanda-*/pyproject.toml")]
    code = (
        "import sys, amanda\n"
        "from amanda.registry import drivers as registered, plugins\n"
        "tools = amanda.tools.available()\n"
        "drivers = registered.registered_drivers()\n"
        "plugins.mapping_rules()\n"
        f"print([m for m in {HEAVY} if m in sys.modules])\n"
        "print(len(tools) > 0, len(drivers) > 0, [r.error for r in plugins.registry().records])"
    )
    heavy, found = in_process(code, installed, *sources).splitlines()
    assert heavy == "[]"
    assert found.startswith("True True ['', ")


def test_loopback_needs_no_pytest() -> None:
    """The loopback framework can be used without pytest."""
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import amanda\n"
        "from amanda.testing import loopback as lb\n"
        "with amanda.apply(amanda.Tool()): print(lb.add(lb.tensor(1), 2).tolist())"
    )
    assert in_process(code) == "3.0"


def test_tool_module_is_reachable() -> None:
    """``import amanda`` alone makes amanda.tool.apply and amanda.tools.mapping reachable."""
    code = "import amanda; print(amanda.tool.apply is amanda.apply, amanda.tools.mapping.__name__)"
    assert in_process(code) == "True amanda.tools.mapping"
