"""Packages of others that print, fail or hang harm neither the run nor the program's output."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import textwrap
from pathlib import Path

import pytest

from tests.cli.conftest import Command, driver_package, install, other_package

OPERATORS = "import minigrad as mg\na = mg.MiniTensor(2)\nmg.add(a, a)\nprint('program')\n"

PLUGIN = """
from amanda import hookimpl

@hookimpl
def amanda_register_tools():
    return {"odd": "other_tools:Odd"}
"""

TOOL = "import amanda\n\nclass Odd(amanda.Tool):\n    'Is odd.'\n"


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program with one operator."""
    (tmp_path / "program.py").write_text(OPERATORS)
    return "program.py"


def odd(folder: Path, body: str, before: str = "", plugin: str = PLUGIN) -> str:
    """A folder for ``PYTHONPATH`` with the tool ``odd`` of another package.

    Args:
        folder: where it is made.
        body: of the class of the tool.
        before: what the module of the tool begins with.
        plugin: the module of the plugin.
    """
    return str(other_package(folder, before + TOOL + textwrap.indent(body, "    "), plugin))


# -- what they print ------------------------------------------------------------


def test_what_plugins_print_is_no_output_of_the_program(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """It goes to stderr, where a plugin or a tool is loaded, and is not part of a list either."""
    site = odd(tmp_path, "", "print('tool')\n", f"print('plugin')\n{PLUGIN}")
    run = amanda("run", "-t", "odd", program, PYTHONPATH=site)
    assert run.stdout.startswith("program\namanda: 1 op")
    assert run.stderr == "plugin\ntool\n"
    listed = amanda("tools", PYTHONPATH=site)
    assert (listed.stdout.count("plugin\n"), listed.stdout.count("tool\n")) == (0, 0)
    assert listed.stderr.split() == ["plugin", "tool"]
    disabled = "amanda-torch,amanda-tensorflow"
    doctor = amanda("doctor", PYTHONPATH=site, AMANDA_DISABLE_PLUGINS=disabled)
    assert (doctor.returncode, doctor.stderr) == (0, "plugin\n")


def test_warnings_of_plugins_say_where_they_are_from(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """Those for the authors of a package are not shown, as Python does not."""
    warn = "import warnings\nwarnings.warn('mine')\nwarnings.warn('old', DeprecationWarning)\n"
    site = odd(tmp_path, "", plugin=warn + PLUGIN)
    run = amanda("run", "-t", "odd", program, PYTHONPATH=site)
    assert run.stderr == (
        f"amanda: warning: mine (UserWarning of {tmp_path}/site/other_plugin.py:2)\n"
    )


def test_a_plugin_changes_no_random_numbers(amanda: Command, tmp_path: Path) -> None:
    """Those of Python are as without it."""
    (tmp_path / "program.py").write_text(f"{OPERATORS}import random\nprint(random.random())\n")
    site = odd(tmp_path, "", plugin=f"import random\nrandom.seed(3)\n{PLUGIN}")
    run = amanda("run", "-t", "odd", "program.py", PYTHONPATH=site)
    assert float(run.stdout.splitlines()[1]) != random.Random(3).random()


# -- drivers ----------------------------------------------------------------------


def test_nan_names_the_user_s_line_under_a_driver_of_others(
    amanda: Command, tmp_path: Path
) -> None:
    """Frames of the driver, its framework and the packages that it declares are no user's."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "layers.py").write_text(
        "import minigrad\ndef double(x):\n    return minigrad.add(x, x)\n"
    )
    (tmp_path / "program.py").write_text(
        "import layers, minigrad\nx = minigrad.MiniTensor(1e308)\nfor _ in range(2):\n"
        "    x = layers.double(x)\n"
    )
    for packages, line in (("()", "site/layers.py:3"), ("('layers',)", "program.py:4")):
        driver_package(site, "second", f"packages, priority = {packages}, 1")
        amanda("run", "-t", "nan", "-o", "out", "program.py", PYTHONPATH=str(site))
        first = json.loads((tmp_path / "out" / "nan.json").read_text())["summary"]["first"]
        assert first["source"] == line
        shutil.rmtree(site / "amanda_second-1.0.dist-info")


def test_a_framework_with_a_driver_of_others_is_seen(amanda: Command, tmp_path: Path) -> None:
    """Doctor and run know from the drivers alone which frameworks are seen, and list versions."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ("jax", "flax", "keras"):
        (site / f"{name}.py").touch()
        metadata = site / f"{name}-0.7.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.7\n")
        (metadata / "RECORD").write_text(f"{name}.py,,\n")
    (tmp_path / "program.py").write_text("import jax\n")
    off = {"AMANDA_DISABLE_PLUGINS": "amanda-torch,amanda-tensorflow", "KERAS_BACKEND": "jax"}
    doctor = amanda("doctor", PYTHONPATH=str(site), **off)
    assert "all of Keras, which computes with JAX: no driver sees JAX" in doctor.stdout
    run = amanda("run", "-t", "count", "program.py", PYTHONPATH=str(site), **off)
    assert "all of JAX: no driver sees JAX" in run.stderr
    off["AMANDA_DISABLE_PLUGINS"] += ",amanda-minigrad"
    driver_package(site, "jaxy", "framework, packages = 'jax', ('flax', 'absent')")
    doctor = amanda("doctor", PYTHONPATH=str(site), **off)
    assert "no driver sees" not in doctor.stdout
    assert "  jax 0.7 (jax)\n" in doctor.stdout
    assert "  flax 0.7 (flax)\n" in doctor.stdout
    assert "absent" not in doctor.stdout
    run = amanda("run", "-t", "count", "program.py", PYTHONPATH=str(site), **off)
    assert (run.returncode, run.stderr) == (0, "")
    assert "all seen as far as is known" in run.stdout


# -- entry points -----------------------------------------------------------------


@pytest.mark.parametrize("entry_point", ["other = other_tools:Odd", "other = other_tools"])
def test_an_entry_point_without_any_hook_is_named(
    entry_point: str, amanda: Command, program: str, tmp_path: Path
) -> None:
    """As where the entry point names the tool itself."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "other_tools.py").write_text(TOOL)
    install(site, "amanda-other", entry_point)
    run = amanda("run", "-t", "odd", program, PYTHONPATH=str(site))
    assert run.returncode == 2
    assert run.stderr.startswith("amanda: warning: plugin other (amanda-other 1.0): the entry ")
    assert "which has no hook" in run.stderr


def test_an_interrupt_names_the_plugin_that_is_loaded(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """It may have taken long: the user learns which one, and how to do without it."""
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    site = odd(tmp_path, "", plugin=interrupt + PLUGIN)
    for words in (["run", "-t", "odd", program], ["tools"]):
        run = amanda(*words, PYTHONPATH=site)
        assert (run.returncode, run.stdout) == (-signal.SIGINT, "")
        assert run.stderr == (
            "amanda: interrupted while plugin other (amanda-other 1.0) was loaded; "
            "AMANDA_DISABLE_PLUGINS=amanda-other leaves it out\n"
        )


# -- tools that cannot be made or applied -----------------------------------------


def test_a_tool_that_fails_where_the_scope_begins_is_one_line(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """It names the tool; with all frames it is a traceback."""
    site = odd(tmp_path, "def enter_scope(self, drivers):\n    raise RuntimeError('no')\n")
    run = amanda("run", "-t", "odd", program, PYTHONPATH=site)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "amanda: error: the tools cannot be applied: RuntimeError: no; raised in Odd.enter_scope "
        "(AMANDA_TRACEBACK=full shows where)\n"
    )
    run = amanda("run", "-t", "odd", program, PYTHONPATH=site, AMANDA_TRACEBACK="full")
    assert (run.returncode, run.stderr.startswith("Traceback")) == (1, True)


def test_the_example_of_a_tool_gives_the_options_that_it_needs(
    amanda: Command, tmp_path: Path
) -> None:
    """What is printed can be run, once the value is filled in."""
    site = odd(tmp_path, "def __init__(self, size: int, more: int = 1):\n    pass\n")
    described = amanda("tools", "odd", PYTHONPATH=site).stdout
    assert "  amanda run -t odd:size=... -o out -- train.py\n" in described


# -- tools that fail at the end ---------------------------------------------------


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_a_tool_that_fails_where_the_scope_ends_loses_no_results(
    error: str, amanda: Command, program: str, tmp_path: Path
) -> None:
    """An exit in place of an error is one."""
    site = odd(tmp_path, f"def exit_scope(self):\n    raise {error}('no')\n")
    run = amanda("run", "-t", "odd,count", "-o", "out", program, PYTHONPATH=site)
    assert run.returncode == 0
    said = f"amanda: the scope did not end properly: {error}: no; raised in Odd.exit_scope\n"
    assert run.stderr == said
    assert (tmp_path / "out" / "count.json").exists()
    assert "count: 1 forward execution" in run.stdout


@pytest.mark.parametrize("answer", ["path", "str(path)", "[str(path)]", "iter([path])"])
def test_files_of_a_tool_may_be_named_in_any_form(
    answer: str, amanda: Command, program: str, tmp_path: Path
) -> None:
    """One path, several, or texts: all are listed, and linked on the page."""
    body = f"""
def write_files(self, folder, stem):
    path = folder / f"{{stem}}.txt"
    path.write_text("odd")
    return {answer}
"""
    site = odd(tmp_path, body)
    run = amanda("run", "-t", "odd,count", "-o", "out", "--html", program, PYTHONPATH=site)
    assert (run.returncode, run.stderr) == (0, "")
    assert "amanda: wrote odd.txt, count.json, report.html in" in run.stdout
    assert "odd.txt" in (tmp_path / "out" / "report.html").read_text()


MALFORMED = {
    "def write_files(self, folder, stem):\n    return [3]": (
        "write_files() returned a list of 1 (int); it returns the paths of its files"
    ),
    "def tables(self):\n    return [Table('t', ('a', 'b'), [(1,)])]": (
        "table 't' has 2 columns, and a row of 1 values: a tuple of 1 (int)"
    ),
    "def charts(self):\n    return [Chart(title='c', kind='pie', labels=[], values={})]": (
        "chart 'c': kind='pie' is not one of bar, hist, line, points, spans"
    ),
    "def charts(self):\n    return [Chart(title='c', kind='bar', labels=[], values={'s': [1]})]": (
        "chart 'c' has 0 labels, and 1 values of 's'"
    ),
    "def charts(self):\n    return [3]": "charts: int 3 is not a Chart",
    "def charts(self):\n    raise ValueError('no picture')": "charts: ValueError: no picture",
    "def result(self):\n    raise RuntimeError('nothing')": "Lost: RuntimeError: nothing",
    "def result(self):\n    return {'summary': {'x': Mute()}}": "ValueError: mute",
}


@pytest.mark.parametrize("body", MALFORMED)
def test_what_a_tool_gives_in_a_wrong_form_is_lost_alone(
    body: str, amanda: Command, program: str, tmp_path: Path
) -> None:
    """The page, its other parts and the other tools are there, and the loss is told on the page."""
    before = (
        "from amanda.results import Chart, Table\n"
        "class Mute:\n    def __str__(self):\n        raise ValueError('mute')\n"
        "    __repr__ = __str__\n"
    )
    site = odd(tmp_path, body, before)
    run = amanda("run", "-t", "odd,count", "-o", "out", "--html", program, PYTHONPATH=site)
    assert run.returncode == 0
    assert "count: 1 forward execution" in run.stdout
    assert "report.html in" in run.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    said = MALFORMED[body].replace("'", "&#39;")
    assert said in page or MALFORMED[body] in page


def test_a_summary_of_any_form_is_printed(amanda: Command, program: str, tmp_path: Path) -> None:
    """One that is not a dictionary is one figure."""
    site = odd(tmp_path, "def result(self):\n    return {'summary': [1, 2]}\n")
    run = amanda("run", "-t", "odd", program, PYTHONPATH=site)
    assert (run.returncode, run.stderr) == (0, "")
    assert "summary  [1, 2]" in run.stdout


def test_no_two_tools_of_a_run_have_one_name(amanda: Command, program: str, tmp_path: Path) -> None:
    """A tool that is called like the second one of another name takes no file of it."""
    plugin = PLUGIN.replace('"odd"', '"count-2"')
    site = odd(tmp_path, "def result(self):\n    return {'summary': {'odd': 1}}\n", plugin=plugin)
    run = amanda("run", "-t", "count,count,count-2", "-o", "out", program, PYTHONPATH=site)
    assert run.returncode == 0
    assert "wrote count.json, count-3.json, count-2.json in" in run.stdout
    assert '"odd": 1' in (tmp_path / "out" / "count-2.json").read_text()


def test_the_page_of_another_package_goes_before_ours(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """In whatever order the plugins are found; one that gives no text is named."""
    draw = "\n@hookimpl\ndef amanda_render_report(report):\n    return {!r}\n"
    site = Path(odd(tmp_path, "", plugin=PLUGIN + draw.format("theirs")))
    amanda("run", "-t", "odd", "--html", program, PYTHONPATH=str(site))
    assert (tmp_path / "amanda-report.html").read_text() == "theirs"
    (site / "other_plugin.py").write_text(PLUGIN + draw.format(3))
    run = amanda("run", "-t", "odd", "--html", program, PYTHONPATH=str(site))
    said = "the page is lost: PageError: amanda_render_report() gave int 3, not the text of a page"
    assert said in run.stderr


def test_another_package_names_tools_of_the_page(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """Beside ours where ``-t`` names none; its recorder of the graph goes before ours."""
    hooks = """
@hookimpl
def amanda_suggest_page_tools():
    return ["odd"]

@hookimpl
def amanda_record_graph(tools):
    from other_tools import Odd
    return Odd()
"""
    rows = "[{'id': '/own:0', 'type': 'own'}]"
    result = f"def result(self):\n    return {{'ops': {rows}, 'edges': []}}\n"
    site = odd(tmp_path, result, plugin=PLUGIN + hooks)
    run = amanda("run", "--html", program, PYTHONPATH=site)
    assert "odd" in run.stderr.partition("a page has ")[2].partition(";")[0].split(", ")
    amanda("run", "-t", "largest", "--html", program, PYTHONPATH=site)
    page = (tmp_path / "amanda-report.html").read_text()
    assert '"/own:0"' in page


# -- frameworks of others -----------------------------------------------------------


@pytest.mark.parametrize("tool", ["prune", "quantize"])
def test_a_tool_skips_tensors_that_it_cannot_compute_with(
    tool: str, amanda: Command, tmp_path: Path
) -> None:
    """With the reason; the program goes on."""
    (tmp_path / "program.py").write_text(
        "import minigrad as mg\nmg.linear(mg.MiniTensor([[1.0]]), mg.MiniParameter([[1.0]]))\n"
    )
    run = amanda("run", "-t", tool, "program.py")
    assert (run.returncode, run.stderr) == (0, "")
    reason = r"is of (minigrad\.)?Mini(Tensor|Parameter), which is no array"
    assert re.search(reason, " ".join(run.stdout.split()))
