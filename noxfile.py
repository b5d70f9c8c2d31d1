"""Tasks of the repository: ``nox -l`` lists them.

The frameworks are large. Therefore the sessions share the environment that nox itself
is installed in, made by README.md's test command, and only those that have to prove
something about an environment of their own make one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = (
    *("amanda-core", "amanda-torch", "amanda-torch/accel"),
    *("amanda-tensorflow", "amanda-tensorflow/accel", "amanda-tools"),
)
CONSTRAINTS = "tests/constraints/torch.txt"

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The versions of Python that the packages without a framework are tried with. The packages declare
those with which the tests have passed."""

PURE = (
    "tests/core",
    *(f"tests/tools/test_{name}.py" for name in ("count", "effects", "flops_formulas", "trace")),
    *(f"tests/tools/test_{name}.py" for name in ("graph_tracing", "report_columns", "reporting")),
    *(f"tests/tools/optimization/test_{name}.py" for name in ("prune_rules", "size")),
    "amanda-core/templates/driver-package/tests",
    "amanda-core/templates/tool-package/tests",
    "tests/packaging/autograd_driver/tests",
)
"""Tests of core, tools and drivers that need no large framework."""

PURE_PACKAGES = (
    "amanda-core/templates/driver-package",
    "amanda-core/templates/tool-package",
    "tests/packaging/autograd_driver",
)
"""The packages of these drivers and tools."""

BOUNDED = tuple(
    f"tests/torch/test_{name}.py"
    for name in "contract ids autograd checkpoint functorch actions attach proofs".split()
)
"""The tests of amanda-torch that CI makes with the newest PyTorch."""

WITHOUT_GATE = tuple(
    f"tests/torch/test_{name}.py"
    for name in "contract ids autograd functorch fused_modules call_counts modes".split()
)
"""The tests of amanda-torch that CI makes without the gate, which all others use."""

WITHOUT_ACCELERATOR = (
    "tests/tensorflow/test_contract.py::TestEager",
    *(
        f"tests/tensorflow/test_{name}.py"
        for name in "call_counts counters keras keras_ids phases threads".split()
    ),
)
"""The tests of amanda-tensorflow that CI makes without the accelerator. Those of the eager driver
alone, in tests/tensorflow/eager, run with it and without wherever they run."""

CAPTURED = tuple(
    f"tests/torch/test_{name}.py"
    for name in (
        *"contract capture_interceptor transparency scopes ids checkpoint".split(),
        *"actions call_counts leaks modes phases points".split(),
    )
)
"""The tests of amanda-torch that pass with modules captured."""

NO_PIP_SETTINGS = {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
"""What pip is configured with may prefer, or pin, a build of PyTorch of another version."""

IS_VERSION = """
import sys, torch
found, version = torch.__version__, sys.argv[1]
if not found.startswith(f"{version}."):
    sys.exit(f"PyTorch here is {found}: NOTHING WAS TESTED with {version}")
"""
"""Fails in an environment of another PyTorch than that of the argument."""

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = [
    "lint",
    "types",
    "core",
    "tensorflow-2.16",
    "docs",
    "trackers",
    "browser",
    "torch-mode",
    "tensorflow-python",
    "tests",
]


def _run(session: nox.Session, *args: str) -> None:
    """Run Python, with `args`, in the environment that nox is installed in."""
    session.run(sys.executable, *args, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    _run(session, "-m", "ruff", "check", ".")
    _run(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the four packages."""
    _run(session, "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite on two processes; arguments go to pytest."""
    _run(session, "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def core(session: nox.Session) -> None:
    """The tests of amanda-core in an environment that holds no framework."""
    session.install(
        "-q", "-c", CONSTRAINTS, "-e", "./amanda-core[testing]", "hypothesis", "pytest-randomly"
    )
    session.run("python", "-m", "pytest", "-q", "tests/core", *session.posargs)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def trackers(session: nox.Session) -> None:
    """What ``stats`` logs to Weights & Biases and MLflow, by their own libraries, offline."""
    packages = ("-e", "./amanda-core[testing]", "-e", "./amanda-tools[wandb,mlflow]")
    session.install("-q", *packages, "hypothesis")
    session.run("python", "-m", "pytest", "-q", "tests/tools/test_trackers.py", *session.posargs)


@nox.session(name="tensorflow-2.16", venv_backend="virtualenv", reuse_venv=True)
def tensorflow_oldest(session: nox.Session) -> None:
    """The tests of amanda-tensorflow with the oldest TensorFlow that it supports."""
    _tensorflow(session, "2.16")


@nox.session(name="tensorflow-2.21", venv_backend="virtualenv", reuse_venv=True)
def tensorflow_newest(session: nox.Session) -> None:
    """The tests of amanda-tensorflow with the newest TensorFlow, and without PyTorch."""
    _tensorflow(session, "2.21")


def _tensorflow(session: nox.Session, version: str) -> None:
    """Run tests/tensorflow in an environment of one TensorFlow and no other framework."""
    constraints = f"tests/constraints/tensorflow-{version}.txt"
    session.install(
        *("-q", "-c", constraints, f"tensorflow-cpu=={version}.*"),
        *("-e", "./amanda-core[testing]", "-e", "./amanda-tensorflow", "-e", "./amanda-tools"),
        "./amanda-tensorflow/accel",
        *("hypothesis", "pytest-randomly", "pytest-xdist"),
    )
    session.run("python", "-m", "pytest", "-q", "-n", "2", "tests/tensorflow", *session.posargs)


@nox.session(name="torch-2.13", venv_backend="virtualenv", reuse_venv=True)
def torch_oldest(session: nox.Session) -> None:
    """The tests of amanda-torch with the oldest PyTorch that it supports."""
    _torch(session, "2.13", {}, "-c", CONSTRAINTS)


@nox.session(name="torch-2.14", venv_backend="virtualenv", reuse_venv=True)
def torch_middle(session: nox.Session) -> None:
    """Those with PyTorch 2.14, and the newest of the rest that it takes (5 GB of wheels)."""
    _torch(session, "2.14", NO_PIP_SETTINGS)


@nox.session(name="torch-2.15", venv_backend="virtualenv", reuse_venv=True)
def torch_newest(session: nox.Session) -> None:
    """Those with the newest one, and the newest transformers, timm and torchao (5 GB of wheels).

    ``nox -s torch-2.15 -- bounded`` makes the part that CI does, in about five minutes.
    """
    _torch(session, "2.15", NO_PIP_SETTINGS)


def _torch(session: nox.Session, version: str, variables: Mapping[str, str], *options: str) -> None:
    """Run tests/torch in an environment of one PyTorch and no other framework."""
    try:
        session.install(
            *("-q", *options, f"torch=={version}.*", "torchvision", "transformers", "timm"),
            *("-e", "./amanda-core[testing]", "-e", "./amanda-torch"),
            *("-e", "./amanda-tools[torchao]", "hypothesis", "pytest-randomly", "pytest-xdist"),
            *("expecttest", "scipy"),
            env=variables,
        )
    except CommandFailed:
        session.error(f"PyTorch {version} cannot be installed here: NOTHING WAS TESTED with it")
    # An environment that is reused may have been changed: its files say which version they are.
    session.run("python", "-c", IS_VERSION, version)
    tests = BOUNDED if session.posargs == ["bounded"] else session.posargs or ["tests/torch"]
    session.run("python", "-m", "pytest", "-q", "-n", "2", *tests)


@nox.session(name="torch-gate")
def torch_gate(session: nox.Session) -> None:
    """The tests of amanda-torch with the gate; fails where the gate cannot be used."""
    os.environ["AMANDA_TORCH_INTERCEPTOR"] = "gate"
    _run(session, "-m", "pytest", "-n", "2", *(session.posargs or ["tests/torch", "tests/accel"]))


@nox.session(name="torch-mode")
def torch_mode(session: nox.Session) -> None:
    """A sample of the tests of amanda-torch without the gate; arguments go to pytest instead."""
    os.environ["AMANDA_TORCH_INTERCEPTOR"] = "mode"
    _run(session, "-m", "pytest", "-q", "-n", "2", *(session.posargs or WITHOUT_GATE))


@nox.session(name="tensorflow-python")
def tensorflow_python(session: nox.Session) -> None:
    """A part of the tests of amanda-tensorflow without its accelerator, or what is named."""
    os.environ["AMANDA_TENSORFLOW_ACCEL"] = "off"
    chosen = session.posargs or WITHOUT_ACCELERATOR
    _run(session, "-m", "pytest", "-q", "-n", "2", *chosen)


@nox.session
@nox.parametrize(
    "compiler", ["eager", "aot_eager", "inductor"], ids=["eager", "aot_eager", "inductor"]
)
def compilers(session: nox.Session, compiler: str) -> None:
    """The contract kit on compiled programs: a compiler gets the graphs that it can take."""
    os.environ["AMANDA_TORCH_COMPILER"] = compiler
    # What a compiler cannot take runs operator by operator, with a warning.
    known = "ignore:a compiled function runs operator by operator"
    kit = "tests/torch/test_contract.py::TestTorchGraphDriver"
    _run(session, "-m", "pytest", "-q", "-W", known, *(session.posargs or [kit]))


@nox.session(name="torch-capture")
def torch_capture(session: nox.Session) -> None:
    """The contract kit and more of amanda-torch with modules captured; arguments go to pytest."""
    os.environ.update(AMANDA_TORCH_INTERCEPTOR="capture", AMANDA_CAPTURE="all")
    _run(session, "-m", "pytest", "-q", "-n", "2", *(session.posargs or CAPTURED))


@nox.session
def architectures(session: nox.Session) -> None:
    """25 architectures of timm and transformers, bit for bit, with every interceptor; an hour.

    Arguments are names of some of them, with commas.
    """
    os.environ["AMANDA_ARCHITECTURES"] = ",".join(session.posargs) or "all"
    _run(session, "-m", "pytest", "-q", "-n", "2", "tests/torch/test_architectures.py")


def _environment(session: nox.Session, name: str, version: str) -> str:
    """The Python of the session's environment; without such a Python the session is skipped."""
    interpreter = _interpreter(version)
    if not interpreter:
        session.skip(f"Python {version} is not installed: nothing was tested with it")
    folder = ROOT / ".nox" / f"{name}-{version}"
    own = folder / "bin" / "python"
    if not own.exists():
        session.run(interpreter, "-m", "venv", str(folder), external=True)
    return str(own)


def _python(session: nox.Session, version: str) -> None:
    """Run the tests of core, tools and the pure drivers on a Python, if there is one."""
    own = _environment(session, "python", version)
    packages = ("./amanda-core[testing]", "./amanda-tools", *PURE_PACKAGES)
    session.run(
        # A Python outside of the range that the packages declare is tried, too.
        *(own, "-m", "pip", "install", "-q", "--ignore-requires-python", "-c", CONSTRAINTS),
        *(option for package in packages for option in ("-e", package)),
        *("hypothesis", "pytest-randomly", "autograd", "numpy"),
        external=True,
    )
    session.run(own, "-m", "pytest", "-q", *PURE, *session.posargs, external=True)


def _add_session(version: str) -> None:
    @nox.session(name=f"python-{version}")
    def python(session: nox.Session) -> None:
        """The tests of core, tools and the pure drivers on one Python, if it is there."""
        _python(session, version)


def _gate(session: nox.Session, version: str) -> None:
    """Run the tests of the extensions on a Python, if there is one; they need no framework."""
    own = _environment(session, "gate", version)
    session.run(own, "-m", "pip", "install", "-q", "pytest", "setuptools", external=True)
    session.run(own, "-m", "pytest", "-q", "tests/accel", *session.posargs, external=True)


def _add_gate_session(version: str) -> None:
    @nox.session(name=f"gate-{version}")
    def gate(session: nox.Session) -> None:
        """The tests of the extensions in C on one Python, if it is there."""
        _gate(session, version)


for _version in PYTHONS:
    _add_session(_version)
    _add_gate_session(_version)


def _interpreter(version: str) -> str:
    """The path of a Python of a version, on PATH or among those of pyenv; "" if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    for path in filter(None, found):
        # The shims of pyenv are there for versions that are not switched on, too.
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(path)
    return ""


@nox.session
def browser(session: nox.Session) -> None:
    """Pages of ``amanda run --html`` in Debian's chromium; without one the tests are skipped."""
    _run(session, "-m", "pytest", "tests/browser", *session.posargs)


DRIVERS = (
    *("tests/core/test_contract.py", "tests/torch/test_contract.py"),
    *("tests/torch/test_graph_driver.py", "tests/tensorflow/test_contract.py"),
)
"""The tests of all drivers: loopback, PyTorch eager and compiled, TensorFlow in its three modes."""


@nox.session
def faults(session: nox.Session) -> None:
    """Interrupt each driver at every line of Amanda's: some 40,000 runs, some four hours.

    ``nox -s faults -- 2/20`` tries every twentieth line, from the second on. CI tries three.
    """
    part = session.posargs[0] if session.posargs else "all"
    _sweep(session, "any_line", AMANDA_INTERRUPTS=part)


@nox.session
def soak(session: nox.Session) -> None:
    """Open 20,000 scopes on each driver, and as many in threads: nothing may grow. Hours.

    ``nox -s soak -- 2000`` opens fewer. CI opens eight.
    """
    count = int(session.posargs[0]) if session.posargs else 20_000
    _sweep(session, "many_scopes", AMANDA_SOAK=str(count))
    # PyTorch compiles a function anew in each scope.
    threads = ("tests/core/test_scope_threads.py", "tests/torch/test_scope_threads.py")
    rounds = {"AMANDA_STRESS": str(count // 8)}
    for path in threads:
        # In one process the tests of core would meet PyTorch, which they have no driver for.
        session.run(sys.executable, "-m", "pytest", "-q", path, external=True, env=rounds)


def _sweep(session: nox.Session, tests: str, **variables: str) -> None:
    """Run the tests of one rule on all drivers, each in a process of its own; also if one fails."""
    failed = []
    for path in DRIVERS:
        try:
            session.run(
                *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:logging", path),
                *("-k", tests),
                external=True,
                env=variables,
            )
        except CommandFailed:
            failed.append(path)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="virtualenv", reuse_venv=True)
@nox.parametrize("package", ["core", "torch"], ids=["core", "torch"])
def mutants(session: nox.Session, package: str) -> None:
    """Change the eager drivers in small ways: the contract kit should notice each change.

    Of amanda-core, what eager drivers share, and the loopback driver; of amanda-torch, the eager
    driver. Arguments are patterns of mutants, such as ``amanda.engine.op_ids*``. All of core
    take an hour, all of PyTorch four.
    """
    session.install("-q", "-c", CONSTRAINTS, "mutmut==3.8.1", "pytest", "importlib-metadata")
    session.install("-q", "-c", CONSTRAINTS, "attrs", "pluggy")
    if package == "torch":
        session.install("-q", "-c", CONSTRAINTS, "./amanda-core[testing]", "torch", "numpy")
    folder = Path(session.create_tmp()) / package
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / f"amanda-{package}" / "src", folder / "src")
    shutil.copytree(ROOT / "tests" / package, folder / "tests" / package)
    shutil.copy(ROOT / "tests" / package / "mutants.toml", folder / "pyproject.toml")
    session.chdir(folder)
    session.run("mutmut", "run", "--max-children", "2", *session.posargs)
    session.run("mutmut", "results")


@nox.session(venv_backend="virtualenv", reuse_venv=True)
@nox.parametrize("framework", ["torch", "tensorflow"], ids=["torch", "tensorflow"])
def programs(session: nox.Session, framework: str) -> None:
    """Programs of published packages, vanilla and under tools that change nothing, bit for bit.

    Arguments go to ``python -m tests.programs``: names of programs; ``--write``, which puts their
    lines into amanda-core/docs/programs.md; ``--together``, which runs them in one process and is
    quicker.
    """
    session.install(
        *("-q", "-r", f"tests/programs/{framework}.txt"),
        *("-e", "./amanda-core", "-e", f"./amanda-{framework}", "-e", "./amanda-tools"),
        f"./amanda-{framework}/accel",
    )
    session.run("python", "-m", "tests.programs", framework, *session.posargs)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/VERSION, beside the versions that are there; no framework.

    Every warning is an error: a link that leads nowhere, a docstring that cannot be read.
    """
    packages = ("-e", "./amanda-core", "-e", "./amanda-tools")
    session.install("-q", "-r", "docs/requirements.txt", *packages)
    command = "import amanda; print(amanda.__version__)"
    version = session.run("python", "-c", command, silent=True).strip()
    site = ROOT / "site"
    session.run(
        *("python", "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "-c", "docs", "."),
        *(str(site / version), *session.posargs),
    )
    # Beside the versions: the list that the switcher of the pages reads, and the way to the last.
    versions = sorted(path.parent.parent.name for path in site.glob("*/docs/index.html"))
    entries = [{"version": name, "url": f"/{name}/docs/index.html"} for name in versions]
    (site / "versions.json").write_text(json.dumps(entries), encoding="utf-8")
    way = f'<meta http-equiv="refresh" content="0; url={version}/docs/index.html">'
    (site / "index.html").write_text(f"<!doctype html>{way}", encoding="utf-8")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build sdists and wheels of all packages into dist/."""
    for package in PACKAGES:
        _run(session, "-m", "build", "--outdir", "dist", package)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Ratios to vanilla, beside the peers' (nothing is asserted)."""
    os.chdir(ROOT)
    _run(session, "-m", "tests.benchmarks.overhead", *session.posargs)
    if not session.posargs:
        _run(session, "-m", "tests.benchmarks.overhead_tensorflow")
