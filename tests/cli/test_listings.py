"""``amanda tools``, ``amanda drivers`` and ``amanda doctor``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command, driver_package, install

ALONE = {"AMANDA_DISABLE_PLUGINS": "amanda-tools,amanda-torch,amanda-tensorflow"}
"""Leaves the example and the driver of minigrad as the only plugins."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An empty folder to put on ``PYTHONPATH``."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def test_tools_are_listed_with_what_they_do(amanda: Command) -> None:
    """In groups, "other" last, in one screen of 80 columns."""
    run = amanda("tools", **ALONE)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(
        "other:\n"
        "  largest  Finds the largest output of each operator.\n"
        "  log      Prints what runs.\n"
        "options, files, an example:  amanda tools NAME\n"
    )
    lines = amanda("tools").stdout.splitlines()
    assert [line for line in lines if line.endswith(":")] == [
        *("look:", "find:", "compare:", "change:", "other:")
    ]
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80


def test_a_tool_is_described(amanda: Command) -> None:
    """All of its description, each option with its default, its files, and an example."""
    run = amanda("tools", "largest", **ALONE)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == (
        "largest  (amanda-example 1.0)\n"
        "\n"
        "Finds the largest output of each operator.\n"
        "\n"
        "options:\n"
        "  ops=text+text+... (default: none)\n"
        "      op types to look at; all by default.\n"
        "  digits=integer (default: 2)\n"
        "      digits to round to.\n"
        "\n"
        "files, in the folder of -o:\n"
        "  largest.json, the result\n"
        "\n"
        "example:\n"
        "  amanda run -t largest -o out -- train.py\n"
    )


MINE = """
import amanda
from beside import level

class Mine(amanda.Tool):
    '''Counts.

    Args:
        level: a number.
    '''

    def __init__(self, level: int = level):
        super().__init__()
        self.level, self.seen = 10 // level, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        self.seen += 1

    def print_summary(self, file):
        print("level", self.level, "seen", self.seen, file=file)

class Other: pass
"""


def test_a_class_of_a_file_or_module_is_a_tool(
    amanda: Command, script: Callable[..., Path]
) -> None:
    """Options are those of its constructor, its file may import what is beside it, and the program
    finds no module that it would not find without the tool."""
    script(MINE, "tools/mine.py")
    script("level = 1", "tools/beside.py")
    script(MINE.replace("beside", "tools.beside"), "tools/other.py")
    program = (
        "import sys, minigrad as mg; x = mg.MiniTensor(2); mg.add(x, x); "
        "print('mine' in sys.modules, sys.path)"
    )
    vanilla = amanda("run", "-c", program).stdout.splitlines()[0]
    for tool in ("tools/mine.py:Mine", "tools.other:Mine"):
        run = amanda("run", "-t", f"{tool}:level=2", "-c", program)
        assert run.stdout.splitlines()[:2] == [vanilla, "level 5 seen 1"], run.stderr
        described = amanda("tools", tool).stdout
        assert described.startswith(
            f"{tool}\n\nCounts.\n\noptions:\n  level=integer (default: 1)\n"
        )


def test_drivers_are_listed_with_their_use(amanda: Command) -> None:
    """Name, framework, mode, priority, distribution, and whether the driver is used."""
    rows = [line.split() for line in amanda("drivers", **ALONE).stdout.splitlines()]
    assert ["minigrad-eager", "minigrad", "eager", "0", "amanda-minigrad", "used"] in rows


def test_doctor_finds_nothing_wrong(amanda: Command) -> None:
    """Versions, plugins, drivers and self-tests are shown, and the status is 0."""
    run = amanda("doctor", **ALONE)
    assert run.returncode == 0, run.stdout
    for line in (
        "  python 3.",
        "  amanda-example 1.0\n",
        "  example (amanda-example 1.0): loaded\n",
        "  minigrad-eager: attach passed (",
        "  minigrad-eager: self_test is not implemented\n",
        "all is well\n",
    ):
        assert line in run.stdout
    # The heading of a part is not repeated by the table below it.
    lines = run.stdout.splitlines()
    assert lines.count("drivers") == 1
    assert "  drivers" not in lines


def test_doctor_names_a_backend_of_keras_that_no_driver_sees(amanda: Command) -> None:
    """By the environment variable."""
    disabled = "amanda-torch,amanda-tensorflow"
    for backend, is_wrong in (("jax", True), ("torch", False), ("", False)):
        run = amanda("doctor", AMANDA_DISABLE_PLUGINS=disabled, KERAS_BACKEND=backend)
        line = "all of Keras, which computes with JAX: no driver sees JAX; set KERAS_BACKEND="
        assert (line in run.stdout) is is_wrong
        assert run.returncode == is_wrong


def test_doctor_names_what_is_wrong(amanda: Command, site: Path) -> None:
    """A broken plugin, a wrong setting and a failed self-test give status 1."""
    driver_package(
        site,
        "sick",
        "mode = 'graph'\n"
        "@classmethod\n"
        "def self_test(cls):\n"
        "    return ['outputs differ']\n"
        "@classmethod\n"
        "def check_internals(cls):\n"
        "    raise AttributeError('no execute')\n"
        "@classmethod\n"
        "def reason_against_settings(cls):\n"
        "    return 'SICK=nope is not one of well'\n",
    )
    install(site, "amanda-bad", "bad = no_such_module")
    run = amanda("doctor", PYTHONPATH=str(site), **ALONE)
    assert run.returncode == 1
    problems = run.stdout.partition("4 problems\n")[2].splitlines()
    assert [problem.partition(":")[0].strip() for problem in problems] == [
        "plugin bad (amanda-bad 1.0) is not loaded",
        "SICK=nope is not one of well",
        "sick check_internals",
        "sick self_test",
    ]


@pytest.mark.parametrize("command", ["tools", "drivers", "--help", "--version"])
def test_commands_import_no_framework(command: str, python: Command) -> None:
    """Listing plugins imports neither torch nor TensorFlow; numpy only where tools use it."""
    unwanted = {"torch", "tensorflow"} | (set() if command == "tools" else {"numpy"})
    run = python(
        "-c",
        f"import sys; from amanda.cli import main; main([{command!r}]); "
        f"print('imported:', sorted({unwanted!r} & set(sys.modules)))",
    )
    assert run.stdout.endswith("imported: []\n")


def test_every_command_has_help(amanda: Command) -> None:
    """``--help`` tells what the command does, as ``amanda help`` does."""
    for command in ("run", "compare", "merge", "tools", "drivers", "doctor"):
        assert amanda(command, "--help").stdout.startswith("usage: amanda ")
    assert amanda("version").stdout == amanda("--version").stdout
    assert amanda("help", "merge").stdout == amanda("merge", "--help").stdout
    assert amanda("tools", "count,largest").stdout == amanda("tools", "count", "largest").stdout
    assert amanda("help").stdout.startswith("usage: amanda COMMAND")


@pytest.mark.parametrize("command", ["tools", "drivers", "doctor", "--help"])
def test_a_reader_that_goes_away_is_no_error(command: str, environment: dict[str, str]) -> None:
    """``amanda tools | head -1`` ends quietly, with status 1."""
    # The reader is gone before anything is written.
    line = f"{{ sleep 0.2; {sys.executable} -m amanda {command}; }} | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", line], env={**environment, **ALONE}, capture_output=True, check=False
    )
    assert (run.returncode, run.stderr) == (1, b"")


def test_disabled_plugins_are_named_where_they_are_missed(amanda: Command) -> None:
    """Not a hint to install what is installed, but that it is disabled."""
    disabled = {"AMANDA_DISABLE_PLUGINS": "amanda-tools,amanda-torch"}
    run = amanda("run", "-t", "count", __file__, **disabled)
    assert run.returncode == 2
    assert "no tool named 'count'" in run.stderr
    assert "amanda-tools is disabled by AMANDA_DISABLE_PLUGINS" in run.stderr
    assert "pip install" not in run.stderr
    listed = amanda("drivers", AMANDA_DISABLE_PLUGINS="amanda-torch").stdout
    assert "torch is installed, but no driver for it; amanda-torch: disabled by" in listed


def test_the_doctor_says_that_no_driver_is_installed(amanda: Command) -> None:
    """Nothing is wrong with such an installation, and it can do nothing."""
    others = "amanda-minigrad,amanda-torch,amanda-tensorflow"
    run = amanda("doctor", AMANDA_DISABLE_PLUGINS=others)
    assert run.returncode == 0
    assert "all is well" not in run.stdout
    assert "no driver is installed, so that nothing can be instrumented; try: pip" in run.stdout
