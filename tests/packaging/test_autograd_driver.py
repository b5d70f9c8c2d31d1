"""A driver of a third party, for HIPS autograd, written against the public interface alone."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.packaging.environments import BUILDERS, ROOT, Environment, created, install

PACKAGE = Path(__file__).parent / "autograd_driver"
OF_TOOLS = ("jinja2", "safetensors", "xxhash")

PROGRAM = """
import numpy
import autograd.numpy as np
from autograd import grad

def loss(weights, x, y):
    hidden = np.tanh(np.dot(x, weights[0]) + weights[1])
    return np.mean((np.dot(hidden, weights[2]) - y) ** 2)

random = numpy.random.RandomState(0)
weights = [random.randn(4, 5), random.randn(5), random.randn(5)]
x, y = random.randn(6, 4), random.randn(6)
for _ in range(3):
    gradients = grad(loss)(weights, x, y)
    weights = [w - 0.1 * g for w, g in zip(weights, gradients)]
print(loss(weights, x, y).hex(), random.randn())
"""


def code_lines(folder: Path, *names: str) -> int:
    """Lines that are neither blank nor a comment nor a docstring."""
    count = 0
    for name in names:
        text = (folder / name).read_text()
        documented: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for number, line in enumerate(text.splitlines(), start=1):
            count += bool(line.strip() and line.strip()[0] != "#" and number not in documented)
    return count


def test_a_driver_is_short() -> None:
    """The driver of a real framework has at most 210 lines of code, the template's at most 180."""
    package = PACKAGE / "src/amanda_autograd"
    assert code_lines(package, "plugin.py", "driver.py", "_internals.py") <= 210
    template = ROOT / "amanda-core/templates/driver-package/src/amanda_minigrad"
    assert code_lines(template, "plugin.py", "driver.py", "adapter.py") <= 180


def test_nothing_of_amanda_that_is_private_is_used() -> None:
    """Drivers, template and documents import no underscored name of Amanda's."""
    private = re.compile(r"\bamanda\._\w|\bamanda(\.\w+)* import _\w")
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "amanda-core/templates").rglob("*.py")]
    files += (ROOT / "amanda-core/examples").rglob("*.py")
    files += [*ROOT.glob("amanda-*/docs/*.md"), *ROOT.glob("amanda-*/templates/**/*.md")]
    assert [str(file) for file in files if private.search(file.read_text())] == []


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """amanda-core, amanda-tools, autograd and the driver."""
    needed = ["attrs", "pluggy", "importlib-metadata", "autograd", "pytest", *BUILDERS]
    fresh = created(tmp_path_factory.mktemp("autograd"), [*needed, *OF_TOOLS])
    install(fresh, str(ROOT / "amanda-core"), str(ROOT / "amanda-tools"), str(PACKAGE))
    (fresh.folder / "program.py").write_text(PROGRAM)
    return fresh


def test_it_keeps_the_contract(environment: Environment) -> None:
    """The contract kit is green; functional differentiation is an ordinary case of it."""
    tests = str(PACKAGE / "tests")
    options = ("-q", "-p", "no:cacheprovider", "-c", str(PACKAGE / "pyproject.toml"))
    run = environment.run("python", "-m", "pytest", *options, "--rootdir", tests, tests)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = run.stdout.splitlines()[-1].split(" passed")[0].split()[-1]
    assert int(passed) >= 200, run.stdout


def test_all_tools_run_on_it(environment: Environment) -> None:
    """No tool knows autograd; results are unchanged, and scalars of NumPy are no obstacle."""
    vanilla = environment.run("python", "program.py")
    tools = "count,flops,nan,stats,sparsity,dump,trace,profile,coverage,path"
    run = environment.run("amanda", "run", "-t", tools, "-o", "out", "program.py")
    assert (run.returncode, run.stderr) == (0, "")
    assert vanilla.stdout.strip() in run.stdout
    count = json.loads((environment.folder / "out/count.json").read_text())
    assert count["namespaces"] == ["autograd/1/eager"]
    # Seven operators in each of three iterations; the last loss has two that autograd sees
    # by name, for its other operands are plain arrays.
    executions = {row["id"]: row["executions"] for row in count["ops"]}
    assert executions["/tanh:0"] == 4
    assert executions["/subtract:0/grad/subtract_backward:0"] == 3
    flops = json.loads((environment.folder / "out/flops.json").read_text())
    # Two products, of 6x4 by 4x5 and of 6x5 by 5, in four forward passes and three backward ones,
    # which compute one product for each.
    assert flops["summary"]["flops"] == 4 * 2 * (6 * 4 * 5 + 6 * 5)
    assert flops["summary"]["flops_backward"] == 3 * 2 * (6 * 4 * 5 + 6 * 5)


def test_nan_names_the_line_of_the_program(environment: Environment) -> None:
    """Frames of a driver and its framework are skipped; a Python number may be differentiated."""
    (environment.folder / "nan.py").write_text(
        "import autograd.numpy as np\nfrom autograd import grad\n\n"
        "def loss(x):\n    return np.sqrt(x)\n\ngrad(loss)(-1.0)\n"
    )
    environment.run("amanda", "run", "-t", "nan", "-o", "out", "nan.py")
    first = json.loads((environment.folder / "out/nan.json").read_text())["summary"]["first"]
    assert first["source"] == "nan.py:5"


def test_the_doctor_is_content(environment: Environment) -> None:
    """The driver is attached once, and the framework is listed."""
    run = environment.run("amanda", "doctor")
    assert run.returncode == 0, run.stdout
    assert "autograd-eager: attach passed" in run.stdout
    assert re.search(r"^  autograd [\d.]+ \(autograd\)$", run.stdout, re.MULTILINE)
