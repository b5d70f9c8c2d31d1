"""Pages: charts, graphs in levels, results of any form."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import amanda
from amanda.results import Chart, RunReport, Table, ToolReport
from amanda_tools._output.chart_data import (
    BOTH_DIRECTIONS,
    rank_groups,
    rank_modules,
    sum_by_direction,
    sum_to_parents,
)
from amanda_tools._output.charts import (
    MAX_BARS,
    Drawing,
    lay_out,
)
from amanda_tools._output.report import Document, Section, render
from amanda_tools._output.report.columns import make_column
from amanda_tools._output.report.graphs import MAX_NODES, GraphView, graph_of
from amanda_tools._output.report.run import document_of, section_of
from amanda_tools._output.units import format_short

# -- charts -------------------------------------------------------------------


def drawn(**chart: Any) -> Drawing:
    found = lay_out(Chart(**{"title": "t", "labels": ["a", "b"], **chart}))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (35.128e9, "FLOP", "35.1 GFLOP"),
        (999.9, "B", "1 kB"),
        (0.00123, "s", "1.23 ms"),
        (4.5e-6, "s", "4.5 µs"),
        (12.34, "%", "12.3 %"),
        (0, "B", "0 B"),
        (0.25, "", "0.25"),
        (math.inf, "", "inf"),
    ],
)
def test_amounts_have_three_digits_and_a_prefix(value: float, unit: str, text: str) -> None:
    """Small prefixes are for times only."""
    assert format_short(value, unit) == text


def test_bars_are_shares_of_the_longest() -> None:
    """Series are stacked; what is no number or negative has no length; further bars are counted."""
    found = drawn(kind="bar", values={"x": [3, 1], "y": [1, None]}, unit="B")
    shares = [[part.percent for part in bar.parts] for bar in found.bars]
    assert shares == [[75, 25], [25, 0]]
    assert [bar.text for bar in found.bars] == ["4 B", "1 B"]
    assert found.series == ["x", "y"]
    many = drawn(kind="bar", labels=range(30), values={"x": [1.0] * 30})
    assert (len(many.bars), many.hidden, many.series) == (MAX_BARS, 30 - MAX_BARS, [])


def test_lines_have_axes_with_round_values() -> None:
    """A higher value is higher up; gaps are left out."""
    found = drawn(kind="line", labels=[0, 5, 10], values={"x": [0, None, 97]})
    assert [tick.text for tick in found.y_ticks] == ["0", "20", "40", "60", "80"]
    places = [tick.place for tick in found.y_ticks]
    assert places == sorted(places, reverse=True)
    assert [tick.text for tick in found.x_ticks] == ["0", "2", "4", "6", "8", "10"]
    assert found.lines[0][1].count("L") == 1
    assert found.points[0].y > found.points[1].y


def test_powers_of_ten_are_equally_far_apart() -> None:
    """Zero stands at the bottom of such an axis; names are told instead of numbers."""
    found = drawn(
        kind="points", labels=range(4), values={"x": [1e-6, 1e-3, 1.0, 0.0]}, names="abcd", log=True
    )
    first, second, third, zero = (mark.y for mark in found.points)
    assert first - second == pytest.approx(second - third, abs=0.02)
    assert zero > first
    assert [mark.text for mark in found.points] == ["a: 1e-06", "b: 0.001", "c: 1", "d: 0"]
    assert len(found.y_ticks) >= 4


def test_a_histogram_stands_on_its_axis() -> None:
    """Each bin is a bar from zero."""
    found = drawn(kind="hist", values={"n": [2, 4]})
    low, high = found.columns
    assert high.height == pytest.approx(2 * low.height)
    assert low.y + low.height == pytest.approx(high.y + high.height)
    assert low.text == "a: 2"


@pytest.mark.parametrize("values", [{"x": []}, {"x": [None, math.nan]}, {}])
def test_nothing_makes_no_chart(values: dict[str, list[float]]) -> None:
    """A tool need not look whether it has something."""
    assert lay_out(Chart(title="t", kind="bar", labels=["a"], values=values)) is None


def test_the_largest_modules_are_sum_to_parents() -> None:
    """As far as a chart can show all; what a module runs itself stays under its name."""
    groups = {f"net.layer{i}.part{j}": {"n": 1 + 9 * (i == 3)} for i in range(10) for j in range(9)}
    groups |= {"net": {"n": 5}, "net.layer3": {"n": 2}, "idle": {"n": 0}}
    found = sum_to_parents(groups, ["n"])
    assert {name: of["n"] for name, of in found.items()} == {
        "net": 5, "net.layer3": 2,
        **{f"net.layer3.part{j}": 10 for j in range(9)},
        **{f"net.layer{i}": 9 for i in range(10) if i != 3},
    }  # fmt: skip
    keras = {f"net/block{i}": {"n": 1} for i in range(20)}
    assert sum_to_parents(keras, ["n"]) == keras
    assert set(sum_to_parents({f"net/block{i}": {"n": 1} for i in range(30)}, ["n"])) == {"net"}
    [chart] = rank_modules("n", keras, {"n": "n"})
    assert len(chart.labels) == 20


def test_bars_are_rank_groups() -> None:
    """Both directions make one bar; a chart of one bar is none."""
    rows = [
        {"type": "relu", "direction": "forward", "calls": 2},
        {"type": "add", "direction": "forward", "calls": 3},
        {"type": "add", "direction": "backward", "calls": None},
    ]
    [chart] = rank_groups("calls", sum_by_direction(rows, "type", "calls"), BOTH_DIRECTIONS)
    assert (chart.labels, chart.values) == (
        ["add", "relu"], {"forward": [3, 2], "backward": [0, 0]},
    )  # fmt: skip
    assert list(rank_groups("one", {"a": {"n": 1}, "b": {"n": 0}}, {"n": "n"})) == []


def test_charts_agree_with_what_the_tools_say() -> None:
    """The bars of a chart add up to the figure of the summary; each chart can be drawn."""
    names = ("count", "flops", "profile", "stats", "sparsity", "trace")
    tools = {name: amanda.tools.load(name)() for name in names}
    layers = (torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        layers[0].bias[0] = -9  # zeros, whatever the weights are
    with amanda.apply(*tools.values()):
        model(torch.rand(3, 4)).sum().backward()
    charts = {(n, chart.title): chart for n, tool in tools.items() for chart in tool.charts()}
    assert [key for key, chart in charts.items() if lay_out(chart) is None] == []

    def total(tool: str, title: str, series: str) -> float:
        return sum(value or 0 for value in charts[tool, title].values[series])

    flops, count, profile = (tools[n].result()["summary"] for n in ("flops", "count", "profile"))
    for title in ("operations by module", "operations by type"):
        assert total("flops", title, "forward") == flops["flops"] == 288
        assert total("flops", title, "backward") == flops["flops_backward"] > 0
    assert total("flops", "parameters by module", "parameters") == flops["params"] == 58
    for title in ("executions by module", "executions by type"):
        assert total("count", title, "backward") == count["backward"]
    for direction in ("forward", "backward"):
        seconds = pytest.approx(profile[f"seconds_{direction}"])
        assert total("profile", "time by module", direction) == seconds
    assert charts["sparsity", "zeros of the activations"].unit == "%"
    assert len(charts["stats", "standard deviation of the weights"].labels) == 4
    assert sum(charts["stats", "sizes of the elements of the weights"].values["elements"]) == 58


# -- graphs -------------------------------------------------------------------


def op(op_id: str, module: str, kind: str = "relu", **more: Any) -> dict[str, Any]:
    return {"id": op_id, "type": kind, "module": module, "direction": "forward", **more}


def chain(*ids: str) -> list[dict[str, str]]:
    return [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)]


def graph(ops: list[dict[str, Any]], edges: list[dict[str, str]]) -> GraphView:
    found = graph_of({"ops": ops, "edges": edges})
    assert found is not None
    return found


def test_levels_go_from_modules_to_operators() -> None:
    """A module's operators are one node, with what is in it; edges within it are gone."""
    ids = [f"Net.layer{i}.{j}/relu:0" for i in range(3) for j in range(4)]
    ops = [op(i, i.removeprefix("Net.").partition("/")[0]) for i in ids]
    found = graph(ops, chain(*ids))
    assert [(level["title"], len(level["nodes"])) for level in found.levels] == [
        ("modules to depth 1", 3), ("all operators", 12),
    ]  # fmt: skip
    coarse_level = found.levels[0]
    assert [node[0] for node in coarse_level["nodes"]] == ["layer0", "layer1", "layer2"]
    assert coarse_level["nodes"][0][6] == "Net.layer0\n4 operators: 4 relu"
    assert sorted(coarse_level["edges"]) == [[0, 1], [1, 2]]
    heights = [node[3] for node in coarse_level["nodes"]]
    assert heights == sorted(set(heights))


def test_what_makes_weights_is_one_node_beside_the_modules() -> None:
    """Only where there are modules; a loss after them stays as it is."""
    ops = [op(f"/uniform_:{i}", "", "uniform") for i in range(5)]
    ops += [op("Net.a/mm:0", "a"), op("Net.b/mm:0", "b"), op("/mean:0", "", "mean")]
    edges = [{"producer": "/uniform_:0", "consumer": "Net.a/mm:0"}]
    found = graph(ops, edges + chain("Net.a/mm:0", "Net.b/mm:0", "/mean:0"))
    labels = [node[0] for node in found.levels[0]["nodes"]]
    assert sorted(labels) == ["(outside of modules)", "a", "b", "mean"]
    assert len(found.levels[0]["edges"]) == 2
    assert len(found.levels[-1]["edges"]) == 3
    functional = graph([op(f"/add:{i}", "") for i in range(3)], chain("/add:0", "/add:1", "/add:2"))
    assert [len(level["nodes"]) for level in functional.levels] == [3]


def test_boxes_do_not_lie_on_each_other() -> None:
    """Parts that nothing connects stand side by side, two models of one class apart."""
    ids = [f"{model}.{i}/relu:0" for model in ("Net", "Net@1") for i in range(6)]
    ops = [op(i, i.partition(".")[2].partition("/")[0]) for i in ids]
    ops += [op(f"/empty:{i}", "", "empty") for i in range(40)]
    found = graph(ops, chain(*ids[:6]) + chain(*ids[6:]))
    for level in found.levels:
        places = [(node[2], node[3]) for node in level["nodes"]]
        assert len(set(places)) == len(places)
        for i, (x, y) in enumerate(places):
            others = places[i + 1 :]
            assert not [p for p in others if abs(p[0] - x) < 180 and abs(p[1] - y) < 34]
    assert [len(level["nodes"]) for level in found.levels] == [13, 52]


def test_what_is_too_large_is_shown_by_modules_only() -> None:
    """And the page says so."""
    ids = [f"Net.a/relu:{i}" for i in range(MAX_NODES + 1)]
    found = graph([op(i, "a") for i in ids], chain(*ids))
    assert [len(level["nodes"]) for level in found.levels] == [1]
    assert found.note.startswith(f"{MAX_NODES + 1:,} operators are too many")


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"ops": [], "edges": []},
        {"ops": [{"id": "a"}], "edges": [{"from": "a"}, "x", None]},
        {"ops": "ab", "edges": {"producer": "a"}},
        {"ops": [{"id": "a"}], "edges": [{"producer": "a", "consumer": "gone"}]},
    ],
)
def test_other_results_have_no_graph(result: dict[str, Any]) -> None:
    """Whatever a tool of others calls edges."""
    assert graph_of(result) is None


# -- pages --------------------------------------------------------------------


def test_every_value_of_a_result_is_somewhere() -> None:
    """Figures, mappings within mappings, lists within lists: nothing is left out."""
    result = {
        "summary": {
            "a": "v01", "b": {"c": "v02", "d": {"e": "v03"}}, "f": {}, "g": ["v04", ["v05"]],
            "h": {str(i): f"v1{i}" for i in range(9)}, "i": {"j": ["v06"], "k": {"l": ["v07"] * 9}},
        },
        "ops": [{"id": "v08", "x": {"y": "v09"}}],
        "more": [{"z": "v20"}], "text": "v21", "m": {"n": {"o": "v22"}, "p": {"q": "v23"}},
    }  # fmt: skip
    section = section_of(ToolReport(name="any", result=result))
    page = render(Document(title="t", sections=[section]))
    values = [f"v0{i}" for i in range(1, 10)] + [f"v1{i}" for i in range(9)]
    assert [v for v in [*values, "v20", "v21", "v22", "v23"] if v not in page] == []
    assert section.facts["f"] == "none"


def test_large_mappings_are_one_table_each() -> None:
    """What is in their values stands in the cells."""
    by_type = {f"t{i}": {"n": i, "kernels": {f"k{j}": j for j in range(9)}} for i in range(50)}
    mixed = {f"m{i}": {"a": {"b": i}} if i % 2 else i for i in range(60)}
    result = {"summary": {"by_type": by_type, "mixed": mixed}}
    section = section_of(ToolReport(name="any", result=result))
    assert [(grid.title, grid.rows) for grid in section.grids] == [("by_type", 50), ("mixed", 60)]
    assert '{"k0": 0' in section.grids[0].columns[2]["texts"][0]


@pytest.mark.parametrize("result", [None, [], [1, 2], "text", 3.5, {"summary": 1}, {"ops": [1]}])
def test_results_of_any_form_make_a_page(result: Any) -> None:
    """Nothing asks a tool for a mapping."""
    report = RunReport(title="t", facts={}, tools=[ToolReport(name="odd", result=result)])
    assert "<h2>odd</h2>" in render(document_of(report))


def test_tables_of_a_tool_come_first_and_the_rest_is_folded() -> None:
    """A table without columns is a sentence."""
    tool = ToolReport(
        name="own",
        result={"summary": {"by": {"a": {"n": 1}}}, "ops": [{"id": "a", "namespace": "x"}]},
        tables=[Table("all is well", (), ()), Table("shares", ("op", "share"), [("a", "3 %")])],
    )
    section = section_of(tool)
    assert section.notes == ["all is well"]
    assert [(g.title, g.is_open) for g in section.grids] == [
        ("shares", True), ("by", False), ("operators", True),
    ]  # fmt: skip
    assert [c["name"] for c in section.grids[-1].columns] == ["id"]


def test_what_is_no_plain_data_is_text() -> None:
    """NumPy's numbers are numbers; one that cannot be shown loses its tool's part only."""

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    good = {"n": np.float32(0.5), "p": Path("a/b"), "rows": [{"i": np.int64(i)} for i in range(9)]}
    section = section_of(ToolReport(name="good", result=good))
    assert section.facts == {"n": "0.5", "p": "a/b"}
    assert section.grids[0].columns[0] == make_column("i", range(9))
    tools = [ToolReport(name="bad", result={"x": Bad()}), ToolReport(name="good", result=good)]
    bad, same = document_of(RunReport(title="t", facts={}, tools=tools)).sections
    assert (bad.lost, same) == (["RuntimeError: no text"], section)


def test_text_is_never_markup() -> None:
    """Wherever a name may stand."""
    bad = "</script><script>alert('x')</script>\u2028<!--"
    tool = ToolReport(
        name=bad, about=bad, text=bad, files=[bad], lost=[bad],
        result={bad: bad, "ops": [op(bad, bad, bad), op(bad + "2", bad, bad)],
                "edges": chain(bad, bad + "2")},
        charts=[Chart(title=bad, kind=kind, labels=[bad, "b"], values={bad: [1, 2], "y": [1, 2]},
                      unit=bad, axis=bad) for kind in ("bar", "hist", "line", "points")],
    )  # fmt: skip
    page = render(document_of(RunReport(title=bad, facts={bad: bad}, tools=[tool])))
    assert "alert('x')" not in page
    assert page.count("<script>") == 1
    assert "<!--" not in page


def test_a_page_allows_itself_only_its_own_script() -> None:
    """The policy holds the script's hash."""
    page = render(Document(title="t", sections=[Section(name="s")]))
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/]{43}='", policy)


def test_tools_import_what_is_heavy_only_where_they_need_it() -> None:
    """``amanda tools``, which loads all of them, imports no framework and nothing that draws."""
    code = (
        "import sys, amanda\n"
        "found = amanda.tools.available().items()\n"
        "ours = [name for name, tool in found if tool.distribution == 'amanda-tools']\n"
        "assert len([amanda.tools.load(name) for name in ours]) > 10\n"
        "heavy = {'torch', 'tensorflow', 'jinja2', 'matplotlib', 'networkx', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
