"""The templates of amanda-core: installed as they are, they work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.packaging.environments import BUILDERS, MINIGRAD, ROOT, Environment, created, install

TEMPLATES = ROOT / "amanda-core" / "templates"
NAMES = ("tool-package", "driver-package")
OF_TOOLS = ("jinja2", "safetensors", "xxhash")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """amanda-core, amanda-tools and copies of both templates, with what their tests need."""
    needed = ["attrs", "importlib-metadata", "pluggy", "numpy", "pytest", *BUILDERS, *OF_TOOLS]
    fresh = created(tmp_path_factory.mktemp("templates"), needed)
    for name in NAMES:
        # Built where people build it: in a folder of their own.
        caches = shutil.ignore_patterns("__pycache__", ".*_cache")
        shutil.copytree(TEMPLATES / name, fresh.folder / name, ignore=caches)
    folders = [str(fresh.folder / name) for name in NAMES]
    install(fresh, str(ROOT / "amanda-core"), str(ROOT / "amanda-tools"), *folders)
    return fresh


def test_our_tools_run_on_the_driver(environment: Environment) -> None:
    """A framework that none of them has heard of: what they find is right."""
    (environment.folder / "program.py").write_text(MINIGRAD)
    tools = "count,flops,nan,stats,sparsity,dump,trace,profile"
    run = environment.run("amanda", "run", "-t", tools, "-o", "all", "program.py")
    assert (run.returncode, run.stderr) == (0, "")
    found = {
        name: json.loads((environment.folder / f"all/{name}.json").read_text())
        for name in tools.split(",")
    }
    assert {tuple(result["namespaces"]) for result in found.values()} == {("minigrad/0.1/eager",)}
    # Rows times four inputs and three units.
    assert found["flops"]["summary"]["flops"] == 2 * (2 + 3 + 2) * 4 * 3
    assert found["flops"]["summary"]["unknown_ops"].keys() <= {"linear_backward"}
    assert found["count"]["summary"]["forward"] == found["count"]["summary"]["backward"] == 6
    assert found["nan"]["summary"]["first"] is None
    means = {(row["type"], row["tensor"]): row["mean"] for row in found["stats"]["ops"]}
    assert means["relu", "output0"] == 4.0
    assert means["relu_backward", "grad0"] == 1.0


def test_the_doctor_is_content(environment: Environment) -> None:
    """Both plugins are loaded, and the driver passes its own tests."""
    run = environment.run("amanda", "doctor")
    assert run.returncode == 0, run.stdout
    assert "minigrad-eager: check_internals passed" in run.stdout
    assert "minigrad-eager: attach passed" in run.stdout
    assert "shapes (amanda-shapes 0.1.0): loaded" in run.stdout
    assert "minigrad (amanda-minigrad 0.1.0): loaded" in run.stdout


@pytest.mark.parametrize(("name", "least"), [("tool-package", 6), ("driver-package", 200)])
def test_their_own_tests_pass(environment: Environment, name: str, least: int) -> None:
    """The contract kit on the driver, and the tool's tests, with installed packages only."""
    shutil.rmtree(environment.folder / name / "src", ignore_errors=True)
    options = ("-q", "--rootdir", name, "-c", f"{name}/pyproject.toml", f"{name}/tests")
    run = environment.run("python", "-m", "pytest", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = run.stdout.splitlines()[-1].split(" passed")[0].split()[-1]
    assert int(passed) >= least, run.stdout


def test_a_framework_that_is_missing_is_the_reason(
    environment: Environment, tmp_path: Path
) -> None:
    """The driver says in prose why it is not used, and stays out of the way."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "def without(name, *more):\n"
        "    return None if name == 'minigrad' else found(name, *more)\n"
        "importlib.util.find_spec = without\n"
    )
    run = environment.run("amanda", "drivers", PYTHONPATH=str(tmp_path))
    assert "minigrad is not installed" in run.stdout
