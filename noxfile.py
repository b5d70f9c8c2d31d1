"""Sessions of the repository: ``nox -l`` lists them.

Those that run pytest are in ``tests/sessions.toml``. Arguments after ``--`` go to pytest, and paths
among them replace the tests of the session: ``nox -s torch-mode -- tests/torch/test_ids.py -x``.
The frameworks are large: sessions use the environment that nox is installed in, made by README.md's
test command, unless they are about an environment.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
SESSIONS = tomllib.loads((ROOT / "tests/sessions.toml").read_text(encoding="utf-8"))
CONSTRAINTS = "tests/constraints/torch.txt"

PUBLIC_INDEX = {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
"""The settings of pip may prefer, or pin, a build of PyTorch of another version."""

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = SESSIONS["default"]


def _run(session: nox.Session, *args: str, **variables: str) -> None:
    """Run Python, with `args`, in the environment that nox is installed in."""
    session.run(sys.executable, *args, external=True, env=variables)


def _pytest_arguments(session: nox.Session, table: Mapping[str, Any]) -> list[str]:
    """Arguments of pytest for a session of ``sessions.toml``."""
    words = SESSIONS["words"]
    given = [part for word in session.posargs for part in words.get(word, [word])]
    named = any((ROOT / part.partition("::")[0]).exists() for part in given)
    tests = [] if named else table.get("tests", [])
    return ["-q", *table.get("options", []), *tests, *given]


def _add_shared(name: str, table: Mapping[str, Any]) -> None:
    """Add a session that runs pytest in the environment of nox."""

    def shared(session: nox.Session) -> None:
        arguments = _pytest_arguments(session, table)
        _run(session, "-m", "pytest", *arguments, **table.get("variables", {}))

    shared.__doc__ = table["about"]
    nox.session(shared, name=name)


def _add_own(name: str, table: Mapping[str, Any], version: str = "") -> None:
    """Add a session that runs pytest in an environment of its own."""

    def own(session: nox.Session) -> None:
        constraints = table.get("constraints", "").format(version=version)
        options = ["-c", constraints] if constraints else []
        framework = [f"{table['framework']}=={version}.*"] if version else []
        session.install(
            *("-q", *options, *framework, *table["packages"]),
            env=PUBLIC_INDEX if table.get("newest") else None,
        )
        arguments = _pytest_arguments(session, table)
        session.run("python", "-m", "pytest", *arguments, env=table.get("variables", {}))

    own.__doc__ = table["about"].format(version=version)
    name = f"{name}-{version}" if version else name
    python = table.get("pythons")
    nox.session(own, name=name, python=python, venv_backend="virtualenv", reuse_venv=True)


for _name, _table in SESSIONS["shared"].items():
    _add_shared(_name, _table)
for _name, _table in SESSIONS["own"].items():
    for _version, _more in _table.get("versions", {"": {}}).items():
        _add_own(_name, {**_table, **_more}, _version)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    _run(session, "-m", "ruff", "check", ".")
    _run(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on all packages."""
    _run(session, "-m", "mypy")


@nox.session
@nox.parametrize(
    "compiler", ["eager", "aot_eager", "inductor"], ids=["eager", "aot_eager", "inductor"]
)
def compilers(session: nox.Session, compiler: str) -> None:
    """The contract kit on compiled programs: a compiler gets the graphs that it can take."""
    # What a compiler cannot take runs operator by operator, with a warning.
    known = "ignore:a compiled function runs operator by operator"
    kit = "tests/torch/test_contract.py::TestTorchGraphDriver"
    arguments = session.posargs or [kit]
    _run(session, "-m", "pytest", "-q", "-W", known, *arguments, AMANDA_TORCH_COMPILER=compiler)


@nox.session
def faults(session: nox.Session) -> None:
    """Interrupt each driver at every line of Amanda's: some 40,000 runs, some four hours.

    ``nox -s faults -- 2/20`` tries every twentieth line, from the second on. CI tries three.
    """
    part = session.posargs[0] if session.posargs else "all"
    _test_drivers(session, "an_interrupt_leaves", AMANDA_INTERRUPTS=part)


@nox.session
def sanitizers(session: nox.Session) -> None:
    """The extension of amanda-torch with ASan and UBSan, under tests/accel and tests/torch/gate."""
    # Without vptr: PyTorch does not export the type information of some classes.
    folder, flags = session.create_tmp(), "-g -fsanitize=address,undefined -fno-sanitize=vptr"
    options = ("-q", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--target", folder)
    build = {"CFLAGS": f"{flags} -Werror", "LDFLAGS": flags, "AMANDA_TORCH_ACCEL_BUILD": "require"}
    _run(session, "-m", "pip", "install", *options, "./amanda-torch/accel", **build)
    find = ("g++", "-print-file-name=libasan.so", "-print-file-name=libstdc++.so")
    found = [session.run(find[0], name, external=True, silent=True) for name in find[1:]]
    # Leaks are those of PyTorch and CPython, which free little at their end.
    checked = {"PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": folder}
    checked["LD_PRELOAD"] = " ".join(str(path).strip() for path in found)
    checked["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
    tests = session.posargs or ["tests/accel", "tests/torch/gate"]
    _run(session, "-m", "pytest", "-q", *tests, AMANDA_TORCH_INTERCEPTOR="gate", **checked)


@nox.session
def soak(session: nox.Session) -> None:
    """Open 20,000 scopes on each driver, and as many in threads: nothing may grow. Hours.

    ``nox -s soak -- 2000`` opens fewer. CI opens eight.
    """
    count = int(session.posargs[0]) if session.posargs else 20_000
    _test_drivers(session, "many_scopes", AMANDA_SOAK=str(count))
    for framework in ("core", "torch"):
        # In one process the tests of core would meet PyTorch, which they have no driver for.
        threads = f"tests/{framework}/test_scope_threads.py"
        # PyTorch compiles a function anew in each scope.
        _run(session, "-m", "pytest", "-q", threads, AMANDA_STRESS=str(count // 8))


def _test_drivers(session: nox.Session, tests: str, **variables: str) -> None:
    """Run the tests of one rule on each driver in its own process; also if one fails."""
    failed = []
    for path in SESSIONS["words"]["drivers"]:
        try:
            options = ("-q", "-s", "-p", "no:logging", "-k", tests)
            _run(session, "-m", "pytest", *options, path, **variables)
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
    tools = ("mutmut==3.8.1", "pytest", "importlib-metadata", "attrs", "pluggy")
    session.install("-q", "-c", CONSTRAINTS, *tools)
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

    Then the figures of unusual programs, beside independent ones (tests/programs/test_scripts.py).
    Arguments go to ``python -m tests.programs``: names of programs; ``--write``, which puts their
    lines into amanda-core/docs/programs.md; ``--together``, which runs them in one process and is
    quicker.
    """
    packages = ("./amanda-core", f"./amanda-{framework}", "./amanda-tools")
    editable = [option for package in packages for option in ("-e", package)]
    session.install("-q", "-r", f"tests/programs/{framework}.txt", *editable, "setuptools", "wheel")
    if framework == "torch":
        session.install("-q", "--no-build-isolation", "./amanda-torch/accel")
    session.run("python", "-m", "tests.programs", framework, *session.posargs)
    if not session.posargs:
        tests = ("-q", "tests/programs/test_scripts.py")
        session.run("python", "-m", "pytest", *tests, env={"AMANDA_PROGRAMS": "all"})


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/VERSION, beside the versions that are there; no framework.

    Every warning is an error: a link that leads nowhere, a docstring that cannot be read. If the
    site is served under a path, it is in AMANDA_SITE_PATH: ``/amanda/``.
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
    base = os.environ.get("AMANDA_SITE_PATH", "/")
    entries = [{"version": name, "url": f"{base}{name}/docs/index.html"} for name in versions]
    (site / "versions.json").write_text(json.dumps(entries), encoding="utf-8")
    redirect = f'<meta http-equiv="refresh" content="0; url={version}/docs/index.html">'
    (site / "index.html").write_text(f"<!doctype html>{redirect}", encoding="utf-8")


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def release(session: nox.Session) -> None:
    """Build, check and try all packages: steps of tests/packaging/release.py, build try check."""
    session.install("-q", "--require-hashes", "-r", "tests/constraints/release.txt")
    steps = session.posargs or ["build", "try"]
    _run(session, "-m", "tests.packaging.release", session.bin, *steps)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Ratios to vanilla, beside the peers' (nothing is asserted)."""
    os.chdir(ROOT)
    _run(session, "-m", "tests.benchmarks.speed", *session.posargs)
