"""Tasks of the repository: ``nox -l`` lists them.

The frameworks are large. Therefore the sessions share the environment that nox itself
is installed in, made by README.md's test command, and only those that have to prove
something about an environment of their own make one.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ("amanda-core", "amanda-torch", "amanda-tensorflow", "amanda-tools")
CONSTRAINTS = "tests/constraints/torch.txt"

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "core", "tensorflow-2.16", "browser", "tests"]


def _python(session: nox.Session, *args: str) -> None:
    """Run Python, with `args`, in the environment that nox is installed in."""
    session.run(sys.executable, *args, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    _python(session, "-m", "ruff", "check", ".")
    _python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the four packages."""
    _python(session, "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite on two processes; arguments go to pytest."""
    _python(session, "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def core(session: nox.Session) -> None:
    """The tests of amanda-core in an environment that holds no framework."""
    session.install(
        "-q", "-c", CONSTRAINTS, "-e", "./amanda-core[testing]", "hypothesis", "pytest-randomly"
    )
    session.run("python", "-m", "pytest", "-q", "tests/core", *session.posargs)


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
        *("hypothesis", "pytest-randomly", "pytest-xdist"),
    )
    session.run("python", "-m", "pytest", "-q", "-n", "2", "tests/tensorflow", *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """Pages of ``amanda run --html`` in Debian's chromium; without one the tests are skipped."""
    _python(session, "-m", "pytest", "tests/browser", *session.posargs)


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


@nox.session
def wheels(session: nox.Session) -> None:
    """Build sdists and wheels of all packages into dist/."""
    for package in PACKAGES:
        _python(session, "-m", "build", "--outdir", "dist", package)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Ratios to vanilla, beside the peers' (nothing is asserted)."""
    os.chdir(ROOT)
    _python(session, "-m", "tests.benchmarks.overhead", *session.posargs)
    if not session.posargs:
        _python(session, "-m", "tests.benchmarks.overhead_tensorflow")
