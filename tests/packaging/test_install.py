"""Packages as users get them: wheels and editable installs in fresh environments."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import (
    BUILDERS,
    DRIVER_TEMPLATE,
    MINIGRAD,
    ROOT,
    TOOL_TEMPLATE,
    Environment,
    created,
    install,
    wheel,
)

TORCH = """
import torch
torch.relu(torch.ones(2, requires_grad=True)).sum().backward()
"""

OF_CORE = ("attrs", "importlib-metadata", "pluggy")

DEPENDENCIES = (*OF_CORE, *BUILDERS, "torch", "jinja2", "numpy", "safetensors", "xxhash")

OF_OTHERS = ("amanda_shapes", "amanda_minigrad")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = (ROOT / f"amanda-{name}" for name in ("core", "torch", "tensorflow", "tools"))
    folder = tmp_path_factory.mktemp("wheels")
    return wheel(folder, *packages, TOOL_TEMPLATE, DRIVER_TEMPLATE)


def source(mode: str, name: str, wheels: Path) -> list[str]:
    """What pip is to install for a package in a mode."""
    if mode == "wheel":
        (path,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
        return [str(path)]
    folder = {"amanda-shapes": TOOL_TEMPLATE, "amanda-minigrad": DRIVER_TEMPLATE}.get(name)
    return ["--editable", str(folder or ROOT / name)]


@pytest.fixture(scope="session", params=[("wheel", "editable"), ("editable", "wheel")])
def environment(
    request: pytest.FixtureRequest, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """Core in one mode, and in one all others: drivers and tools, ours and external ones."""
    core, rest = request.param
    fresh = created(tmp_path_factory.mktemp("fresh"), DEPENDENCIES)
    others = ("amanda-torch", "amanda-tools", "amanda-shapes", "amanda-minigrad")
    sources = [part for name in others for part in source(rest, name, wheels)]
    # In one call: pip looks on the index for siblings that it is not given.
    install(fresh, *source(core, "amanda-core", wheels), *sources)
    return fresh


@pytest.fixture(scope="session")
def core_alone(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """amanda-core and what it needs, and nothing else."""
    fresh = created(tmp_path_factory.mktemp("core"), OF_CORE)
    install(fresh, *source("wheel", "amanda-core", wheels))
    return fresh


def test_nothing_imports_a_framework_before_it_is_used(environment: Environment) -> None:
    """Importing all packages and listing tools leaves frameworks unimported."""
    run = environment.run(
        "python",
        "-c",
        "import sys, amanda, amanda_torch.plugin, amanda_tools.count, amanda_tools.trace\n"
        "from amanda.cli import main\n"
        "main(['tools']), main(['drivers'])\n"
        "print({'torch', 'tensorflow', 'minigrad', 'amanda_minigrad.driver'} & set(sys.modules))",
    )
    assert run.stdout.endswith("set()\n"), run.stderr


def test_all_tools_are_found(environment: Environment) -> None:
    """``amanda tools`` lists ours and that of the template, in the group that it names."""
    run = environment.run("amanda", "tools")
    names = [line.split()[0] for line in run.stdout.splitlines() if line.startswith(" ")]
    assert {"count", "shapes", "trace"} <= set(names)
    listed = run.stdout.partition("look:\n")[2].partition("\nfind:\n")[0]
    assert "\n  shapes      Lists the output shapes of each operator" in listed
    assert run.stderr == ""


def test_all_drivers_are_found(environment: Environment) -> None:
    """``amanda drivers`` lists ours and that of the template, both used."""
    rows = [line.split() for line in environment.run("amanda", "drivers").stdout.splitlines()]
    used = {row[0]: row[-2:] for row in rows if len(row) > 4}
    assert used["minigrad-eager"] == ["amanda-minigrad", "used"]
    assert used["torch-eager"] == ["amanda-torch", "used"]


def test_an_external_tool_runs_on_an_external_driver(environment: Environment) -> None:
    """``amanda run -t`` uses both by name, and our tools with them; the page has its parts."""
    (environment.folder / "program.py").write_text(MINIGRAD)
    words = ["run", "-t", "shapes:ops=linear", "-t", "count", "-o", "out", "--html", "program.py"]
    run = environment.run("amanda", *words)
    assert (run.returncode, run.stderr) == (0, "")
    assert "/linear:0  linear           3  2x3; 3x3" in run.stdout
    assert "all seen as far as is known" in run.stdout
    shapes = json.loads((environment.folder / "out/shapes.json").read_text())
    assert shapes["namespaces"] == ["minigrad/0.1/eager"]
    [row] = shapes["ops"]
    assert row["shapes"][0] == {"outputs": [[2, 3]], "executions": 2}
    count = json.loads((environment.folder / "out/count.json").read_text())
    assert count["summary"]["forward"] == 6
    page = (environment.folder / "out/report.html").read_text()
    assert all(part in page for part in ("varying shapes", "class Grid", "prefers-color-scheme"))


def test_our_driver_and_tools_run(environment: Environment) -> None:
    """``python -m amanda`` is the command, and PyTorch is instrumented."""
    (environment.folder / "program.py").write_text(TORCH)
    words = ["run", "-t", "count", "--ops", "relu", "-o", "out", "program.py"]
    run = environment.run("python", "-m", "amanda", *words)
    assert (run.returncode, run.stderr) == (0, "")
    summary = json.loads((environment.folder / "out/count.json").read_text())["summary"]
    assert summary["by_type"]["forward"] == {"relu": {"ops": 1, "executions": 1}}
    assert summary["by_type"]["backward"]["relu_backward"]["executions"] == 1


def test_core_alone_works(core_alone: Environment, wheels: Path) -> None:
    """Without drivers and tools the commands say what to install."""
    (core_alone.folder / "program.py").write_text("print('never')")
    advice = f"try: pip install --find-links {wheels} amanda-tools"
    tools = core_alone.run("amanda", "tools")
    assert (tools.returncode, tools.stdout) == (0, f"no tool is installed; {advice}\n")
    doctor = core_alone.run("amanda", "doctor")
    assert doctor.returncode == 0
    assert (
        f"none is installed; {advice}; try: pip install --find-links {wheels} amanda-torch or"
        in doctor.stdout
    )
    run = core_alone.run("amanda", "run", "-t", "count", "program.py")
    assert (run.returncode, run.stdout) == (2, "")
    assert "no tool named 'count'" in run.stderr
    assert advice in run.stderr
    run = core_alone.run("amanda", "run", "--html", "program.py")
    assert (run.returncode, run.stdout) == (2, "")
    assert f"--html: no plugin draws pages; {advice}" in run.stderr
    run = core_alone.run("amanda", "run", "program.py")
    assert (run.returncode, run.stdout) == (2, "")
    assert f"pip install --find-links {wheels} amanda-torch" in run.stderr


def test_another_package_of_that_name_is_found(core_alone: Environment, tmp_path: Path) -> None:
    """``amanda doctor`` names the distribution that has overwritten a file of amanda-core."""
    (package,) = core_alone.folder.glob("lib/python*/site-packages/amanda")
    shutil.copytree(package, tmp_path / "amanda")
    (tmp_path / "amanda/__init__.py").write_text("theirs = True\n")
    other = tmp_path / "theirs-9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 9\n")
    (other / "RECORD").write_text("amanda/__init__.py,,\n")
    doctor = core_alone.run("amanda", "doctor", PYTHONPATH=str(tmp_path))
    assert doctor.returncode == 1
    assert "try: pip uninstall theirs && pip install --force-reinstall --no-deps" in doctor.stdout


def test_core_imports_nothing_but_its_dependencies(core_alone: Environment) -> None:
    """``import amanda`` brings its dependencies and theirs, and no other distribution."""
    run = core_alone.run(
        "python",
        "-c",
        # Some Pythons come with a sitecustomize of their own.
        "import sys; before = set(sys.modules); import amanda\n"
        "new = set(sys.modules) - before\n"
        "print({m.partition('.')[0] for m in new} - set(sys.stdlib_module_names))",
    )
    # Some versions of importlib-metadata import zipp, which they need, at once.
    imported = eval(run.stdout) - {"zipp"}
    assert imported == {"amanda", "attr", "attrs", "importlib_metadata", "pluggy"}, run.stdout


def test_a_long_description_works_on_an_index(wheels: Path) -> None:
    """No link of a long description is relative, and a package says where it comes from."""
    for path in wheels.glob("amanda_*.whl"):
        archive = zipfile.ZipFile(path)
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head, _, text = archive.read(name).decode().partition("\n\n")
        assert text
        assert re.findall(r"\]\((?!https://|#)|^\[.*\]: (?!https://)", text, re.MULTILINE) == []
        if path.name.partition("-")[0] not in OF_OTHERS:
            assert "Project-URL: Homepage, https://" in head
    # Its README is taken as it is: the extension is not built by hatchling.
    assert "](" not in (ROOT / "amanda-torch/accel/README.md").read_text()


def test_the_list_of_vendored_scripts_is_right() -> None:
    """The versions in the SBOM of amanda-tools are those of the scripts that its pages hold."""
    scripts = (ROOT / "amanda-tools/src/amanda_tools/_output/vendor").glob("*.min.js")
    parts = json.loads((ROOT / "amanda-tools/vendored.cdx.json").read_text())["components"]
    for path, part in zip(sorted(scripts), parts, strict=True):
        assert f'"{part["version"]}"' in path.read_text()


def test_wheels_hold_the_package_and_nothing_else(wheels: Path) -> None:
    """Code, type marker, licence and entry points; no tests, no caches."""
    for path in wheels.glob("amanda_*.whl"):
        names = zipfile.ZipFile(path).namelist()
        package = path.name.partition("-")[0]
        top = {name.partition("/")[0] for name in names}
        assert top - {"minigrad.py"} == {
            package.replace("amanda_core", "amanda"),
            *(name for name in top if name.endswith(".dist-info")),
        }
        assert not [name for name in names if "test_" in name or "__pycache__" in name]
        assert any(name.endswith("entry_points.txt") for name in names)
        assert any(name.endswith("/py.typed") for name in names)
        if package not in OF_OTHERS:
            assert any("licenses/LICENSE" in name for name in names)
