"""Cells of a notebook under tools: ``%load_ext amanda`` and ``%%amanda -t count``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from amanda.cli import notebook
from amanda.state import ATTACHED, LIVE_SCOPES
from amanda.testing import loopback
from tests.running import run_python

EXAMPLE = Path(__file__).parents[2] / "amanda-tools" / "examples" / "notebook.ipynb"

HTML = "text/html"

Run = Callable[[str], Any]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell that has imported the loopback framework and loaded the extension."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    settings = Config()
    settings.HistoryManager.enabled = False
    settings.InteractiveShell.colors = "nocolor"
    settings.InteractiveShell.xmode = "Plain"
    made = InteractiveShell(config=settings)
    made.run_line_magic("load_ext", "amanda")
    made.user_ns["lb"] = loopback
    yield made
    made.run_line_magic("unload_ext", "amanda")
    made.restore_sys_module_state()
    assert not LIVE_SCOPES


@pytest.fixture
def run(shell: InteractiveShell) -> Run:
    """Runs a cell; nothing of it stays patched, whatever has happened in it."""

    def running(text: str) -> Any:
        callbacks = {event: list(functions) for event, functions in shell.events.callbacks.items()}
        result = shell.run_cell(text, store_history=True)
        assert (LIVE_SCOPES, ATTACHED) == ([], {})
        assert shell.custom_exceptions == ()
        assert shell.events.callbacks == callbacks
        return result

    return running


ADD = "x = lb.tensor([1.0])\ny = lb.add(x, x)\n"


def test_a_cell_runs_under_tools(run: Run, shell: InteractiveShell, capsys: Any) -> None:
    """Its names stay, its last expression is displayed, then come summary and last line."""
    result = run("%%amanda -t count\n" + ADD + "y.tolist()")
    assert (result.success, result.result) == (True, [2.0])
    assert shell.user_ns["y"].tolist() == [2.0]
    printed = capsys.readouterr().out
    assert printed.index("[2.0]") < printed.index("count: 1 forward execution")
    assert re.search(r"^amanda: 1 op[,;]", printed, re.MULTILINE)


def test_the_tools_are_left_in_a_variable(run: Run, shell: InteractiveShell) -> None:
    """By name, in ``_amanda``."""
    run("%%amanda -t count -t count\n" + ADD)
    first, second = shell.user_ns["_amanda"].items()
    assert [first[0], second[0]] == ["count", "count-2"]
    assert first[1].result()["summary"]["forward"] == 1


def test_the_options_are_those_of_the_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Selection, folder and driver; a folder is where the cell began."""
    monkeypatch.chdir(tmp_path)
    options = "--ops mul -o out --driver loopback --every 2"
    text = f"import os\nos.mkdir('other')\nos.chdir('other')\n{ADD}lb.mul(x, x)"
    assert run(f"%%amanda -t 'count' {options}\n{text}").success
    assert '"mul"' in (tmp_path / "out/count.json").read_text()
    assert f"amanda: wrote count.json in {tmp_path / 'out'}\n" in capsys.readouterr().out


def test_a_cell_that_fails_shows_its_own_traceback(run: Run, capsys: Any) -> None:
    """No frame of Amanda or a driver is shown, and the results are given."""
    text = ADD + "def mine():\n    lb.add(x, None)\nmine()"
    alone = run(text)
    capsys.readouterr()
    under = run("%%amanda -t count\n" + text)
    shown, _, rest = capsys.readouterr().out.partition("count: 1 forward execution")
    assert type(under.error_in_exec) is type(alone.error_in_exec)
    assert str(under.error_in_exec) == str(alone.error_in_exec)
    assert "amanda: 2 ops" in rest
    # The loopback framework is a part of Amanda too.
    places = re.findall(r"^  File <ipython-input-(\d+).*>:(\d+)( in mine)?", shown, re.MULTILINE)
    assert places == [("2", "6", ""), ("2", "5", " in mine")]
    assert shown.count("File ") == 2


@pytest.mark.parametrize(
    ("ending", "kind"), [("raise KeyboardInterrupt", KeyboardInterrupt), ("exit(3)", SystemExit)]
)
@pytest.mark.filterwarnings("ignore:To exit")
def test_an_interrupted_cell_gives_its_results(
    ending: str, kind: type, run: Run, capsys: Any
) -> None:
    """An interrupt and an exit end the cell, not the tools' results."""
    result = run("%%amanda -t count\n" + ADD + ending.replace("exit", "import sys; sys.exit"))
    assert type(result.error_in_exec) is kind
    assert "amanda: 1 op" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-t cuont", "no tool named 'cuont'; did you mean count"),
        ("-t count --evry 2", "unrecognized arguments: --evry 2; see: %amanda --help"),
        ("-t count train.py", "unrecognized arguments: train.py"),
        ("-t 'count", "No closing quotation"),
        ("--help", "the cell was not run"),
    ],
)
def test_what_is_wrong_is_said_and_the_cell_is_not_run(
    options: str, said: str, run: Run, shell: InteractiveShell, capsys: Any
) -> None:
    """A usage error with the close matches, without a traceback."""
    result = run(f"%%amanda {options}\nran = True")
    assert type(result.error_in_exec).__name__ == "UsageError"
    assert said in str(result.error_in_exec)
    assert "ran" not in shell.user_ns
    printed = capsys.readouterr()
    assert "UsageError: " in printed.err
    assert "Traceback" not in printed.out + printed.err


def test_help_lists_the_options(run: Run, capsys: Any) -> None:
    """``--help`` is that of the command, without a program."""
    run("%%amanda --help\n1")
    printed = capsys.readouterr().out
    assert printed.startswith("usage: %amanda ")
    assert "--modules" in printed
    assert "script.py" not in printed


def test_the_rest_of_a_cell_runs_under_tools(run: Run, shell: InteractiveShell) -> None:
    """``%amanda`` in the middle of a cell; a second one is refused."""
    run(ADD + "%amanda -t count\nlb.mul(y, y)")
    assert [row["type"] for row in shell.user_ns["_amanda"]["count"].result()["ops"]] == ["mul"]
    twice = run("%amanda -t count\n%amanda -t trace\nran = True")
    assert "already runs under tools" in str(twice.error_in_exec)
    # One that fails does not count.
    assert "no driver named" in str(run("%amanda -t count --driver nosuch").error_in_exec)
    assert run("%amanda -t count\n1").success
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize(
    "text",
    [
        "%%time\n%%amanda -t count\n",
        "%%amanda -t count\n%%time\n",
        "%%amanda -t count\n%%capture\n",
        "%%capture\n%%amanda -t count\n",
    ],
)
def test_other_magics_go_with_it(text: str, run: Run, shell: InteractiveShell) -> None:
    """Those that run code of their own do so under the tools."""
    assert run(text + ADD + "lb.mul(y, y)").success
    assert shell.user_ns["_amanda"]["count"].result()["summary"]["forward"] == 2


def test_await_works(run: Run, shell: InteractiveShell) -> None:
    """At top level, as in every cell; the tools stay until the cell ends."""
    # IPython keeps one event loop for all cells, and never closes it.
    loop = asyncio.new_event_loop()
    shell.loop_runner = loop.run_until_complete  # type: ignore[assignment]
    text = "import asyncio\nawait asyncio.sleep(0)\n" + ADD + "await asyncio.sleep(0, lb.mul(y, y))"
    result = run("%%amanda -t count\n" + text)
    loop.close()
    assert result.result.tolist() == [4.0]
    assert shell.user_ns["_amanda"]["count"].result()["summary"]["forward"] == 2


def test_a_terminal_asks_for_the_next_line(shell: InteractiveShell) -> None:
    """A cell is complete as one of another cell magic is."""
    for magic in ("%%time", "%%amanda -t count"):
        for text in ("", "\n", "\nx = 1", "\nx = 1\n"):
            assert shell.check_complete(magic + text) == ("incomplete", "")


def test_a_magic_can_be_called_by_name(run: Run, shell: InteractiveShell) -> None:
    """``run_cell_magic`` is what programs use."""
    text = f"get_ipython().run_cell_magic('amanda', '-t count', {ADD!r})"
    assert run(text).success
    assert shell.user_ns["y"].tolist() == [2.0]
    assert "count" in shell.user_ns["_amanda"]


def test_a_result_that_is_lost_is_said_in_the_notebook(
    run: Run, shell: InteractiveShell, tmp_path: Path, capsys: Any
) -> None:
    """The file is lost, not the summary; nothing is raised."""
    folder = tmp_path / "out"
    text = f"import os\nos.rmdir({str(folder)!r})\nopen({str(folder)!r}, 'w').close()"
    assert run(f"%%amanda -t count -o {folder}\n{text}").success
    printed = capsys.readouterr()
    assert "amanda: a result of count is lost: NotADirectoryError" in printed.err
    assert "amanda: 0 ops" in printed.out


def test_the_extension_can_be_taken_out(shell: InteractiveShell) -> None:
    """After ``%unload_ext`` a shell is as before; loading again is possible."""
    transformers = shell.input_transformer_manager.line_transforms
    assert notebook.as_line_magic in transformers
    shell.run_line_magic("unload_ext", "amanda")
    assert notebook.as_line_magic not in transformers
    assert shell.find_cell_magic("amanda") is None
    shell.run_line_magic("load_ext", "amanda")
    shell.run_line_magic("reload_ext", "amanda")
    assert transformers.count(notebook.as_line_magic) == 1


def test_ipython_is_not_needed(tmp_path: Path) -> None:
    """Importing Amanda, and its command, imports no IPython."""
    (tmp_path / "IPython.py").write_text("raise ImportError('IPython is not here')\n")
    code = "import amanda, amanda.cli.run, sys; print('IPython' in sys.modules)"
    run = run_python("-c", code, cwd=tmp_path, check=True)
    assert run.stdout == "False\n"


def test_the_example_notebook_runs(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel of its own, from its first cell to its last: under each cell one page of all of
    its tools and at most two lines, and under a tool its page."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened = nbformat.read(EXAMPLE, as_version=4)
    assert all(not cell.get("outputs") for cell in opened.cells), "outputs are not kept"
    client = nbclient.NotebookClient(
        opened, timeout=100, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    for cell in opened.cells:
        outputs = cell.get("outputs", ())
        printed = "".join(output.get("text", "") for output in outputs)
        pages = [page for o in outputs if "<iframe" in (page := o.get("data", {}).get(HTML, ""))]
        if cell.source.startswith("%%amanda"):
            assert re.fullmatch(r"(amanda: wrote .*\n)?amanda: \d+ ops?\b.*\n", printed)
            title = "amanda run: " + cell.source.split()[2].replace(",", ", ")
            assert [title in page for page in pages] == [True]
        else:
            shown = ["outputs of modules" in page for page in pages]
            assert shown == [True] * ("Outputs" in cell.source)
