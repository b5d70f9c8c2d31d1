"""``amanda run --html``: what the page is about, where it goes, and who draws it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda.results import Table
from amanda.testing import loopback as lb
from tests.cli.conftest import Command, install, other_package

Script = Callable[..., Path]

MINIGRAD = "import minigrad as mg\na = mg.MiniTensor(2)\nb = mg.mul(mg.add(a, a), a)\n"

TOOLS = '''
import amanda
from amanda.results import Chart

class Plain(amanda.Tool):
    """Is nothing but a class.

    And more of it.
    """

    def result(self):
        return {
            "answer": 42,
            "best": {"<b>": float("inf"), "few": 1.5},
            "rows": [{"op": f"<op {i}>", "n": i} for i in range(20)],
            "by": {"x": {"a": 1}, "y": {"a": 2, "b": [1]}},
            "names": ["a", "b"],
        }

    def charts(self):
        yield Chart(title="no numbers", kind="line", labels=[1], values={"a": [None]})
        yield Chart(title="<i>bars</i>", kind="bar", labels=["<u>"], values={"a": [3]}, unit="B")


class Silent(amanda.Tool):
    """Has no result."""
'''

PLUGIN = """
from amanda import hookimpl

@hookimpl
def amanda_register_tools():
    return {name: f"other_tools:{name.title()}" for name in ("plain", "silent")}
"""

RENDERER = """
from amanda import hookimpl

@hookimpl
def amanda_render_report(report):
    return f"{report.title}; {[tool.name for tool in report.tools]}; {report.facts['command']}"
"""


@pytest.fixture
def program(script: Script) -> str:
    """A program with two operators of minigrad."""
    return str(script(MINIGRAD))


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A folder with another package's tools, to put on ``PYTHONPATH``."""
    return str(other_package(tmp_path, TOOLS, PLUGIN))


def tables(page: str) -> dict[str, Any]:
    """The tables of a page by their titles."""
    found = re.findall(
        r"<h[23]>([^<]*)</h[23]>(?:(?!<h[23]>).)*?<script type=.application/json.[^>]*>(.*?)</sc",
        page,
        re.DOTALL,
    )
    return {title: json.loads(data) for title, data in found}


def column(table: dict[str, Any], name: str) -> Any:
    [found] = [column for column in table["columns"] if column["name"] == name]
    return found.get("values") or [found["texts"][i] for i in found["index"]]


def test_the_page_stands_with_the_results(amanda: Command, program: str, tmp_path: Path) -> None:
    """It tells of the run, and has each tool's tables with all operators."""
    run = amanda("run", "-t", "count,largest", "-o", "out", "--html", program, "x y")
    assert (run.returncode, run.stderr) == (0, "")
    assert f"wrote count.json, largest.json, report.html in {tmp_path / 'out'}\n" in run.stdout
    page = (tmp_path / "out/report.html").read_text()
    assert f"amanda run -t count,largest -o out --html {program} &#39;x y&#39;" in page
    for fact in ("minigrad/0.1/eager", "2 ops seen (2 forward)", "normally", "amanda-core"):
        assert fact in page
    found = tables(page)
    assert column(found["largest outputs"], "largest") == [4, 8]
    assert column(found["Operators"], "id") == ["/add:0", "/mul:0"]
    assert 'href="count.json"' in page
    # What the libraries of the page say of themselves in comments aside.
    assert not re.search(r"https?://", page.rpartition("<script>")[0])


def test_without_a_folder_it_stands_where_one_is(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """In the folder of the command, wherever the program goes, and nothing else is written."""
    path = script(MINIGRAD + "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n")
    run = amanda("run", "-t", "largest", "--html", str(path))
    assert f"amanda: wrote amanda-report.html in {tmp_path}\n" in run.stdout
    names = {entry.name for entry in tmp_path.iterdir()} - {"__pycache__"}
    assert names == {"program.py", "elsewhere", "amanda-report.html"}


def test_without_a_tool_it_has_the_usual_ones(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """Not an empty page: a line tells which tools it has, and how to name others."""
    run = amanda("run", "--html", program)
    assert run.returncode == 0
    said = "amanda: no tool was given: a page has flops, profile, trace, summary; -t names others\n"
    assert said in run.stderr
    page = (tmp_path / "amanda-report.html").read_text()
    assert [f"<h2>{name}</h2>" in page for name in ("flops", "profile", "trace", "summary")] == [
        True
    ] * 4


def test_each_rank_has_a_page(amanda: Command, program: str, tmp_path: Path) -> None:
    """Under ``torchrun`` names end in the rank, which the page tells."""
    amanda("run", "-t", "largest", "--html", "-o", "out", program, RANK="1", WORLD_SIZE="2")
    assert "1 of 2" in (tmp_path / "out/report-rank1.html").read_text()
    amanda("run", "-t", "largest", "--html", program, RANK="1", WORLD_SIZE="2")
    assert (tmp_path / "amanda-report-rank1.html").exists()


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("raise ValueError('x')", "by ValueError"),
        ("raise SystemExit(3)", "with exit status 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", "by SIGTERM"),
    ],
)
def test_a_program_that_fails_has_a_page(
    ending: str, told: str, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """It tells how the program ended."""
    amanda("run", "-t", "largest", "--html", str(script(MINIGRAD + ending)))
    assert f"<dd>{told}</dd>" in (tmp_path / "amanda-report.html").read_text()


def test_a_tool_that_nobody_knows_is_shown_in_general_terms(
    other: str, amanda: Command, program: str, tmp_path: Path
) -> None:
    """Figures, lists and mappings become figures and tables; text stays text."""
    run = amanda("run", "-t", "plain,silent,log", "--html", program, PYTHONPATH=other)
    assert run.stderr == ""
    page = (tmp_path / "amanda-report.html").read_text()
    assert "Is nothing but a class." in page
    assert "And more of it." not in page
    assert "<dt>answer</dt><dd>42</dd>" in page
    assert "<dt>best: &lt;b&gt;</dt><dd>inf</dd>" in page
    assert "<dt>names</dt><dd>a, b</dd>" in page
    found = tables(page)
    assert column(found["rows"], "op")[19] == "<op 19>"
    assert column(found["rows"], "n") == list(range(20))
    assert column(found["by"], "a") == [1, 2]
    assert "&lt;i&gt;bars&lt;/i&gt;" in page
    assert "no numbers" not in page
    assert "<pre>log: add\nlog: mul\n</pre>" in page
    for raw in ("<op ", "<u>", "<i>bars"):
        assert raw not in page


def test_without_a_plugin_that_draws_the_program_does_not_start(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """The message says what to install, or that it is disabled."""
    run = amanda("run", "-t", "log", "--html", program, AMANDA_DISABLE_PLUGINS="amanda-tools")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "amanda: error: --html: no plugin draws pages; "
        "amanda-tools: disabled by AMANDA_DISABLE_PLUGINS\n"
    )
    assert not (tmp_path / "amanda-report.html").exists()


class Own(amanda.Tool):
    """Has a table, and none of our base classes."""

    def tables(self) -> list[Table]:
        return [Table("<own>", ("value",), [(lb.add(lb.tensor([1.0]), lb.tensor([2.0])),)])]


def test_one_call_writes_the_page_of_tools(tmp_path: Path) -> None:
    """``amanda.report`` takes one tool or several, also of one name, and any that has a result;
    what a tool computes for it is no operator, also within a scope."""
    tools = [amanda.tools.load("count")(), Own(), Own()]
    path = tmp_path / "out.html"
    with amanda.apply(*tools) as scope:
        lb.mul(lb.tensor([1.0]), lb.tensor([1.0]))
        assert amanda.report(tools, str(path)) == path
    assert scope.statistics.ops_seen == 1
    page = path.read_text()
    assert "<title>count, Own, Own-2</title>" in page
    assert "&lt;own&gt;" in page
    assert column(tables(page)["Operators"], "id") == ["/mul:0"]
    amanda.report(tools[1], path)
    assert "<title>Own</title>" in path.read_text()
    # In a notebook the page is in a frame.
    shown = str(Own()._repr_html_())
    assert '<iframe class="amanda-frame" sandbox="allow-scripts"' in shown
    assert "&amp;lt;own&amp;gt;" in shown


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (amanda.Tool(), ValueError, r"Tool has no results: it needs a method result\(\), tables"),
        (Own, TypeError, r"amanda.report\(\) got the class Own; pass an instance"),
        ("count", TypeError, r"amanda.report\(\) needs amanda.Tool instances, got 'count'"),
        ([Own(), 3], TypeError, "got 3"),
    ],
)
def test_what_has_no_page_is_said(given: Any, error: type, said: str, tmp_path: Path) -> None:
    """What is no tool, and a tool without results, which notebooks show as text."""
    with pytest.raises(error, match=said):
        amanda.report(given, tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
    assert amanda.Tool()._repr_html_() is None


def test_another_plugin_may_draw(amanda: Command, program: str, tmp_path: Path) -> None:
    """The hook gets plain data; what it gives is the page."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "own_renderer.py").write_text(RENDERER)
    install(folder, "amanda-own", "own = own_renderer")
    amanda(
        *("run", "-t", "log", "--html", program),
        PYTHONPATH=str(folder),
        AMANDA_DISABLE_PLUGINS="amanda-tools",
    )
    page = (tmp_path / "amanda-report.html").read_text()
    assert page == f"amanda run: log; ['log']; amanda run -t log --html {program}"


def test_a_renderer_that_fails_loses_the_page_only(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """The loss is named, and the exit status is the program's."""
    folder = tmp_path / "site"
    folder.mkdir()
    broken = RENDERER.replace("report.title", "report.titel")
    (folder / "own_renderer.py").write_text(broken)
    install(folder, "amanda-own", "own = own_renderer")
    run = amanda(
        *("run", "-t", "largest", "--html", "-o", "out", program),
        PYTHONPATH=str(folder),
        AMANDA_DISABLE_PLUGINS="amanda-tools",
    )
    assert run.returncode == 0
    assert "amanda: the page is lost: AttributeError" in run.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["largest.json"]
