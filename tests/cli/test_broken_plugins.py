"""Broken plugins in a process of their own: the run goes on, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command, driver_package, install

MINIGRAD = "import minigrad as mg\na = mg.MiniTensor(2)\nmg.add(a, a)\nprint('program')\n"

TOOLS = '''
from collections.abc import Mapping

import amanda

class Plain(amanda.Tool):
    """Has a result."""

    answer = 42

    def result(self):
        return {"summary": {"answer": self.answer}}


class Sick(Plain):
    """Fails at the end, in one of many ways."""

    def __init__(self, at: str = "", error: str = "ValueError"):
        super().__init__()
        self.at, self.error = at, error

    def _fail(self, at):
        if self.at == at:
            raise __builtins__[self.error]("sick")

    def result(self):
        self._fail("result")
        return super().result()

    def print_summary(self, file):
        self._fail("print_summary")
        print("sick summary", file=file)

    @property
    def write_files(self):
        self._fail("property")
        return self._write_files

    def _write_files(self, folder, stem):
        self._fail("write_files")
        (folder / f"{stem}.txt").write_text("sick")
        return [folder / f"{stem}.txt"]


class Endless(Plain):
    """Its result goes on for ever."""

    class Nested(Mapping):
        def __getitem__(self, key):
            return type(self)()

        def __iter__(self):
            return iter(["self"])

        def __len__(self):
            return 1

    def result(self):
        return self.Nested()


class Mine(Plain):
    """Has the name of another package's tool."""

    answer = 43
'''

PLUGIN = """
from amanda import hookimpl

@hookimpl
def amanda_register_tools():
    return {names}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with two packages of tools and some broken ones, to put on ``PYTHONPATH``."""
    folder = tmp_path / "site"
    folder.mkdir()
    names = {name.lower(): f"sick_tools:{name}" for name in ("Plain", "Sick", "Endless")}
    (folder / "sick_tools.py").write_text(TOOLS)
    (folder / "sick_plugin.py").write_text(PLUGIN.format(names=names))
    (folder / "mine_plugin.py").write_text(PLUGIN.format(names={"plain": "sick_tools:Mine"}))
    (folder / "leaving_plugin.py").write_text("import sys\nsys.exit('leaving')\n")
    install(folder, "amanda-sick", "sick = sick_plugin")
    install(folder, "my-tools", "mine = mine_plugin")
    return folder


ENDINGS = {
    "at=result": ("ValueError", [".txt"]),
    "at=result,error=SystemExit": ("SystemExit", [".txt"]),
    "at=write_files": ("ValueError", [".json"]),
    "at=write_files,error=BrokenPipeError": ("BrokenPipeError", [".json"]),
    "at=property,error=RuntimeError": ("RuntimeError", [".json"]),
    "at=print_summary,error=RecursionError": ("RecursionError", [".json", ".txt"]),
}
"""Options of ``sick``: what is said of the loss, and the files that are there all the same."""


def test_a_tool_that_fails_at_the_end_loses_only_what_failed(
    site: Path, amanda: Command, tmp_path: Path
) -> None:
    """Its other results and those of the other tools are given; the exit status stays."""
    (tmp_path / "program.py").write_text(MINIGRAD)
    words = [word for options in ENDINGS for word in ("-t", f"sick:{options}")]
    run = amanda("run", *words, "-t", "count", "-o", "out", "program.py", PYTHONPATH=str(site))
    assert run.returncode == 0
    names = ["sick", *(f"sick-{i}" for i in range(2, len(ENDINGS) + 1))]
    endings = dict(zip(names, ENDINGS.values(), strict=True))
    assert sorted(run.stderr.splitlines()) == sorted(
        f"amanda: a result of {name} is lost: {kind}: sick" for name, (kind, _) in endings.items()
    )
    kept = {f"{name}{suffix}" for name, (_, suffixes) in endings.items() for suffix in suffixes}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kept | {"count.json"}
    assert run.stdout.startswith("program\n")
    assert run.stdout.count("sick summary") == len(ENDINGS) - 1
    assert "count: 1 forward execution" in run.stdout
    assert "amanda: 1 op, all seen" in run.stdout


def test_a_result_that_has_no_end_is_lost(site: Path, amanda: Command, tmp_path: Path) -> None:
    """No half file stays, and the others are written."""
    (tmp_path / "program.py").write_text(MINIGRAD)
    words = ["-t", "endless,count", "-o", "out", "program.py"]
    run = amanda("run", *words, PYTHONPATH=str(site))
    assert run.returncode == 0
    assert "amanda: a result of endless is lost: RecursionError" in run.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["count.json"]


def test_of_two_tools_of_one_name_the_full_name_tells_which(
    site: Path, amanda: Command, tmp_path: Path
) -> None:
    """The short name is that of the first package, with a warning; files carry the short name."""
    (tmp_path / "program.py").write_text(MINIGRAD)
    words = ["-t", "plain,my-tools/plain", "-o", "out", "program.py"]
    run = amanda("run", *words, PYTHONPATH=str(site))
    assert run.returncode == 0
    assert run.stderr == (
        "amanda: warning: several packages have a tool 'plain': the one of amanda-sick is used; "
        "the full name chooses another one, my-tools/plain\n"
    )
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    answers = {name: result["summary"]["answer"] for name, result in results.items()}
    assert answers == {"plain.json": 42, "plain-2.json": 43}
    listed = amanda("tools", PYTHONPATH=str(site)).stdout
    assert "\n  plain           Has a result.\n" in listed.partition("\nother:\n")[2]
    about = "Has the name of another package's tool. (plain means the tool of amanda-sick)"
    assert f"\n  my-tools/plain  {about}\n" in listed


def test_a_driver_that_cannot_be_attached_leaves_the_program_alone(
    site: Path, amanda: Command, tmp_path: Path
) -> None:
    """The next one is used; without any the program runs vanilla, and its end says so."""
    failing = "def attach(self):\n    super().attach()\n    raise OSError('no way')\n"
    driver_package(site, "stuck", "priority = 1", failing)
    (tmp_path / "program.py").write_text(MINIGRAD)
    said = "PluginWarning: driver stuck of amanda-stuck is left out: it could not be attached: "
    run = amanda("run", "-t", "count", "program.py", PYTHONPATH=str(site))
    assert run.returncode == 0
    assert f"{said}OSError: no way; minigrad-eager is used instead" in run.stderr
    assert "amanda: 1 op, all seen" in run.stdout
    alone = {"AMANDA_DISABLE_PLUGINS": "amanda-minigrad,amanda-torch,amanda-tensorflow"}
    run = amanda("run", "-t", "count", "program.py", PYTHONPATH=str(site), **alone)
    assert (run.returncode, run.stdout.splitlines()[0]) == (2, "program")
    assert f"{said}OSError: no way\n" in run.stderr
    assert "error: nothing was instrumented: not seen: all of minigrad, which has no" in run.stderr
    assert (
        "not seen: all of minigrad, which has no usable driver (see: amanda drivers)" in run.stdout
    )
