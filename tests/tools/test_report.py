"""Pages: charts, graphs in levels, results of any form."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import amanda
from amanda.results import Chart, RunReport, Table, ToolReport
from amanda_tools._output import report
from amanda_tools._output.ranked_charts import (
    BOTH_DIRECTIONS,
    rank_groups,
    rank_modules,
    sum_by_direction,
)
from amanda_tools._output.report import Document, Section, chart_data, render
from amanda_tools._output.report.columns import make_column
from amanda_tools._output.report.model_tree import ModelView, model_of
from amanda_tools._output.report.run import document_of, section_of
from amanda_tools._output.units import format_short
from tests.running import run_python

# -- charts -------------------------------------------------------------------


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


@pytest.mark.parametrize("values", [{"x": []}, {"x": [None]}, {"x": [math.nan]}, {}])
def test_nothing_makes_no_chart(values: dict[str, list[float]]) -> None:
    """A tool need not look whether it has something."""
    assert chart_data(Chart(title="t", kind="bar", labels=["a"], values=values)) is None


def test_a_chart_of_modules_has_all_depths() -> None:
    """The page sums them up at one depth; modules without the figure are left out."""
    groups = {f"net.layer{i}.part{j}": {"n": 1 + 9 * (i == 3)} for i in range(10) for j in range(9)}
    groups |= {"net": {"n": 5}, "net.layer3": {"n": 2}, "idle": {"n": 0}}
    [chart] = rank_modules("n", groups, {"n": "n"})
    assert chart.modules
    assert len(chart.labels) == len(groups) - 1


def test_what_json_lacks_is_a_gap_of_a_chart() -> None:
    """Infinities and NaN; labels of axes stay numbers."""
    found = chart_data(Chart(title="t", kind="line", labels=[0, 5], values={"x": [math.inf, 2]}))
    assert found is not None
    assert (found["labels"], found["values"]) == ([0, 5], [("x", [None, 2.0])])
    assert chart_data(Chart(title="t", kind="bar", labels=["a"], values={"x": [math.nan]})) is None


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
    """The bars of a chart add up to the figure of the summary, without what is not the model's;
    each chart has values."""
    names = ("count", "flops", "profile", "stats", "sparsity", "trace")
    tools = {name: amanda.tools.load(name)() for name in names}
    layers = (torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        layers[0].bias[0] = -9  # zeros, whatever the weights are
    with amanda.apply(*tools.values()):
        model(torch.rand(3, 4)).sum().backward()
    charts = {(n, chart.title): chart for n, tool in tools.items() for chart in tool.charts()}
    assert [key for key, chart in charts.items() if chart_data(chart) is None] == []

    def total(tool: str, title: str, series: str) -> float:
        return sum(value or 0 for value in charts[tool, title].values[series])

    flops, count, profile = (tools[n].result()["summary"] for n in ("flops", "count", "profile"))
    for title in ("operations by module", "operations by type"):
        assert total("flops", title, "forward") == flops["flops"] == 288
        assert total("flops", title, "backward") == flops["flops_backward"] > 0
    assert flops["params"] == 58
    for title in ("executions by module", "executions by type"):
        assert total("count", title, "backward") == count["backward"]
    for direction in ("forward", "backward"):
        phases = ("setup", "other") if direction == "forward" else ()
        apart = sum(profile["phases"][phase]["seconds"] for phase in phases)
        seconds = pytest.approx(profile[f"seconds_{direction}"] - apart)
        assert total("profile", "time by module", direction) == seconds
    assert charts["sparsity", "zeros of the activations"].unit == "%"
    assert len(charts["stats", "standard deviation of the weights"].labels) == 4


# -- the model ----------------------------------------------------------------


def op(op_id: str, module: str, kind: str = "relu", **more: Any) -> dict[str, Any]:
    return {"id": op_id, "type": kind, "module": module, "direction": "forward", **more}


def chain(*ids: str) -> list[dict[str, str]]:
    return [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)]


def model(*results: dict[str, Any]) -> ModelView:
    found = model_of([ToolReport(name=f"t{i}", result=r) for i, r in enumerate(results)])
    assert found is not None
    return found


def test_values_of_variables_are_no_shapes_of_modules() -> None:
    """A layer's output is known from its exit, not from its operators; a model's input is no
    handle, and a loss, which reads no variable, no model: a layer's kernel may be read last."""
    image = {"shape": [2, 9, 9, 1], "dtype": "float32"}
    kernel = {"shape": [3, 3, 1, 8], "dtype": "float32"}
    read = {"inputs": [{"shape": [], "dtype": "resource"}], "outputs": [kernel]}
    ops = [
        op("net/conv/ReadVariableOp:0", "net/conv", "read_variable", **read),
        op("net/conv/Conv2D:0", "net/conv", "conv2d", inputs=[image], outputs=[image]),
        op("net/conv/ReadVariableOp:1", "net/conv", "read_variable", **read),
        op("loss/mse/Mean:0", "loss/mse", "mean", inputs=[image], outputs=[image]),
    ]
    view = model({"ops": ops})
    shapes = {node.name: node.shape for node in view.nodes if node.kind == "module"}
    assert (view.names, view.inputs) == (["net"], "")
    assert shapes["conv"] == ""
    modules = [{"path": p, "inputs": [image], "outputs": [image]} for p in ("net", "net/conv")]
    found = model_of([ToolReport(name="t", result={"ops": ops})], modules)
    assert found is not None
    modules_shown = {node.name: node for node in found.nodes if node.kind == "module"}
    assert found.inputs == modules_shown["conv"].shape == "2×9×9×1 f32"
    assert modules_shown["conv"].details["inputs"] == "2×9×9×1 f32"
    assert modules_shown["loss"].shape == ""


def names(view: ModelView, kind: str = "") -> list[str]:
    """The path of each node of a kind."""
    found: list[str] = []
    for node in view.nodes:
        at, path = node, [node.name]
        while at.parent > 0:
            at = view.nodes[at.parent]
            path.insert(0, at.name)
        if not kind or node.kind == kind:
            found.append("/".join(path))
    return found


def test_operators_stand_in_their_modules_with_what_all_tools_say() -> None:
    """A backward operator belongs to its forward one; figures of one operator come together."""
    back = {**op("Net.a/mm:0/grad/Mm:0", "a", "mm_backward"), "direction": "backward",
            "forward": "Net.a/mm:0"}  # fmt: skip
    trace = {"ops": [op("Net.a/mm:0", "a", "mm"), back, op("Net.a/relu:0", "a")],
             "edges": chain("Net.a/mm:0", "Net.a/relu:0")}  # fmt: skip
    flops = {"ops": [op("Net.a/mm:0", "a", "mm", flops=6, params=3), {**back, "flops": 12}],
             "summary": {"steps": 3}}  # fmt: skip
    found = model(flops, trace)
    assert names(found) == ["run", "Net", "Net/a", "Net/a/mm", "Net/a/relu"]
    assert (found.names, found.steps, found.edges) == (["Net"], 3, [(3, 4)])
    assert [figure.name for figure in found.figures] == ["FLOPs", "parameters"]
    # Figures are those of one step, the mean where no tool tells those of the last one.
    assert found.of == "one step, the mean of 3"
    assert (found.total("flops", "forward"), found.total("flops", "backward")) == (2, 4)
    # The backward operator stands with its figures.
    assert found.data()["nodes"][3][-2:] == [
        [2, 3],
        [["Net.a/mm:0/grad/Mm:0", "mm_backward", 4, None]],
    ]


def test_equal_modules_in_a_row_are_marked() -> None:
    """Their names differ in a number only, and what is in them is equal, shapes included."""
    shape = {"outputs": [{"shape": [2, 3], "dtype": "torch.float32", "device": "cpu"}]}
    ids = [f"Net.layers.{i}.fc/mm:0" for i in range(4)]
    ops = [op(i, i.partition(".")[2].partition("/")[0], "mm", **shape) for i in ids]
    ops[3]["outputs"] = [{"shape": [2, 4]}]
    ops += [op(f"Net.{name}/mm:0", name, "mm") for name in ("q_proj", "k_proj")]
    found = model({"ops": ops})
    assert names(found, "repeat") == ["Net/layers/0 … 2"]
    # The last operator of a module may give something else than the module.
    assert found.nodes[4].shape == ""
    assert found.device == "cpu"


def test_repeated_modules_are_named_by_what_differs() -> None:
    """A common beginning stands once, so that the count beside it has room."""
    for form, expected in (("layer_{}", "layer_0 … 2"), ("a{}_norm", "a0_norm … a2_norm")):
        ids = [f"Net.{form.format(i)}/mm:0" for i in range(3)]
        found = model({"ops": [op(i, i[4:].partition("/")[0], "mm") for i in ids]})
        assert names(found, "repeat") == [f"Net/{expected}"]


def test_equal_modules_of_other_parts_of_a_model_stand_by_themselves() -> None:
    """The graph shows where `partition` cuts, as a share of operators in later parts."""
    ops = [op(f"Net.{i}/mm:0", f"{i}", "mm", parts_before=i // 2, parts_but_one=1)
           for i in range(4)]  # fmt: skip
    found = model({"ops": ops})
    assert names(found, "repeat") == ["Net/0 … 1", "Net/2 … 3"]
    assert [node[-2] for node in found.data()["nodes"] if node[1] == "op"] == [
        [[i // 2, 1]] for i in range(4)
    ]


def test_what_is_saved_for_the_backward_pass_is_shown_where_something_is() -> None:
    """A column of zeros, as of TensorFlow, which does not say what it saves, is left out."""
    rows = [{"id": f"N.a/f:{i}", "type": "f", "module": "a", "flops": 1} for i in range(2)]
    nothing = [{**row, "saved_bytes": 0} for row in rows]
    something = [{**row, "saved_bytes": i} for i, row in enumerate(rows)]
    assert [figure.key for figure in model({"ops": nothing}).figures] == ["flops"]
    assert [figure.key for figure in model({"ops": something}).figures] == ["flops", "saved_bytes"]


def test_what_is_not_the_models_stands_aside() -> None:
    """By its phase; the loss stays with the model."""
    setup, optimizer = ({"phase": name} for name in ("setup", "optimizer"))
    ops = [op(f"/uniform_:{i}", "", "uniform", params=9, **setup) for i in range(5)]
    ops += [op("Net.a/mm:0", "a", "mm", params=4), op("/mean:0", "", "mean")]
    ops += [op("/sqrt:0", "", "sqrt", **optimizer)]
    found = model({"ops": ops, "edges": [*chain("/uniform_:0", "Net.a/mm:0", "/mean:0")]})
    assert found.total("params", "forward") == 4
    inside = [i for i in names(found, "op") if i.startswith(("Net", "mean"))]
    assert inside == ["Net/a/mm", "mean"]
    assert names(found, "phase") == ["setup: building and initialising", "optimizer"]
    assert len(found.edges) == 1


def test_many_operators_in_a_row_get_a_level_between() -> None:
    """A browser lays out small groups quickly; nothing is left out."""
    ids = [f"/relu:{i}" for i in range(5000)]
    found = model({"ops": [op(i, "") for i in ids], "edges": chain(*ids)})
    assert len(found.edges) == 4999
    assert len(names(found, "op")) == 5000
    assert max(len(node.children) for node in found.nodes) <= 150


def test_calls_and_models_of_one_class_are_told_apart() -> None:
    """A module that is called twice is one; a second model of a class is another one."""
    ids = ("Net.fc/mm:0", "Net.fc#1/mm:0", "Net@1.fc/mm:0")
    found = model({"ops": [op(i, "fc", "mm") for i in ids]})
    assert names(found, "module") == ["Net", "Net/fc", "Net@1", "Net@1/fc"]
    keras = model({"ops": [op("net/block/MatMul:0", "net/block", "linear")]})
    assert names(keras, "module") == ["net", "net/block"]


@pytest.mark.parametrize("tool", ["sparsity", "stats"])
def test_zeros_are_a_share_and_weights_do_not_count(tool: str) -> None:
    """Rows of sparsity and stats are about one tensor each."""
    row = op("Net.a/relu:0", "a")
    ops = [{**row, "kind": "activations", "zeros": 1, "elements": 4},
           {**row, "kind": "activations", "zeros": 2, "elements": 4},
           {**row, "kind": "weights", "zeros": 9, "elements": 9}]  # fmt: skip
    found = model({"tool": tool, "ops": ops})
    assert found.data()["nodes"][3][-2] == [[3, 8]]


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"ops": [], "edges": []},
        {"ops": [{"id": "a"}], "edges": [{"from": "a"}, "x", None]},
        {"ops": "ab", "edges": {"producer": "a"}},
        {"ops": [{"id": 3, "type": "x"}, {"type": "x"}, None]},
    ],
)
def test_other_results_have_no_model(result: dict[str, Any]) -> None:
    """Whatever a tool of others calls operators."""
    assert model_of([ToolReport(name="any", result=result)]) is None


def test_a_row_may_hold_anything() -> None:
    """What is not a number is not a figure, and what is not a shape is none."""
    odd = op("a", "b", flops="many", params=math.inf, outputs=[{"shape": 3}, 4], attributes=[1])
    found = model({"ops": [odd], "edges": [{"producer": "a"}], "summary": {"steps": True}})
    assert (found.figures, found.edges, found.steps) == ([], [], 0)
    page = render(
        document_of(
            RunReport(title="t", facts={}, tools=[ToolReport(name="x", result={"ops": [odd]})])
        )
    )
    assert "Lost" not in page


def test_the_head_tells_what_ran_and_the_main_figures() -> None:
    """Of the model alone, per step where steps are known."""
    outputs = {"outputs": [{"shape": [2, 3], "dtype": "float32", "device": "cuda:0"}]}
    ops = [op("Net.a/mm:0", "a", "mm", flops=6000, inputs=outputs["outputs"], **outputs)]
    tool = ToolReport(name="flops", result={"ops": ops, "summary": {"steps": 3}})
    facts = {
        "command": "amanda run",
        "not seen": "a function",
        "program ended": "normally",
        "x": "y",
    }
    document = document_of(RunReport(title="t", facts=facts, tools=[tool]))
    assert document.heading == "Net"
    assert document.lead == {
        "command": "amanda run", "steps": "3", "device": "cuda:0", "not seen": "a function",
    }  # fmt: skip
    assert document.figures == {"FLOPs per step": "2 kFLOP"}
    unseen = {"ops": ops, "summary": {"steps": 3, "not_seen": {"a function": 2}}}
    bound = document_of(
        RunReport(title="t", facts={}, tools=[ToolReport(name="flops", result=unseen)])
    )
    assert bound.figures == {"FLOPs per step": "≥ 2 kFLOP"}
    assert document.facts == {"program ended": "normally", "x": "y"}
    result = {"ops": ops, "summary": {"steps": 3, "batch": 2}}
    modules = [{"path": "Net", "inputs": [{"shape": [2, 7], "dtype": "float32"}]}]
    flops = ToolReport(name="flops", result=result)
    known = document_of(RunReport(title="t", facts={}, tools=[flops], modules=modules))
    assert (known.lead["largest batch"], known.lead["input"]) == ("2", "2×7 f32")
    failed = document_of(RunReport(title="t", facts={"program ended": "by ValueError"}, tools=[]))
    assert failed.lead == {"ended": "by ValueError"}


def test_the_tree_and_the_head_have_the_last_step() -> None:
    """The sums of the run, evaluations and all, stand in the table; setup is in no step."""
    step = {"flops": 10, "executions": 1, "per_step": {"flops": 4, "executions": 2}}
    setup = {"phase": "setup", "flops": 7, "per_step": {"flops": 0}}
    ops = [op("Net.a/mm:0", "a", "mm", phase="forward", **step), op("/rand:0", "", "rand", **setup)]
    per_step = {"flops": 4, "flops_backward": 0}
    summary = {"steps": 3, "per_step": {**per_step, "min": {"flops": 4}, "max": {"flops": 3000}}}
    found = model({"ops": ops, "summary": summary})
    assert (found.of, found.total("flops", "forward")) == ("one step, the last of 3", 4)
    rows = found.data()["nodes"]
    assert [row[6] for row in rows if row[1] == "op"] == [[4], [7]]
    tool = ToolReport(name="flops", result={"ops": ops, "summary": summary})
    head = document_of(RunReport(title="t", facts={}, tools=[tool]))
    assert head.figures == {"FLOPs per step": "4 FLOP (steps from 4 FLOP to 3 kFLOP)"}
    assert head.operators is not None
    columns = {column["name"]: column.get("values") for column in head.operators.columns}
    assert (columns["flops"], columns["flops in the run"]) == ([4, 0], [10, 7])


def test_two_models_keep_their_own_shapes() -> None:
    """Modules of one path in two models, and the inputs of both."""

    def tensors(*shape: int) -> list[dict[str, Any]]:
        return [{"shape": list(shape), "dtype": "float32", "device": "cpu"}]

    ops = [
        op(f"{name}.net/mm:0", "net", "mm", params=1, inputs=tensors(2, size))
        for name, size in (("G", 8), ("D", 32))
    ]
    modules = [
        {"model": "G", "path": "net", "type": "Linear", "output": [2, 32]},
        {"model": "D", "path": "net", "type": "Linear", "output": [2, 1]},
        {"model": "G", "path": "", "inputs": tensors(2, 8)},
        {"model": "D", "path": "", "inputs": tensors(2, 32)},
    ]
    found = model({"ops": ops, "modules": modules})
    shapes = {node.details["path"]: node.shape for node in found.nodes if node.kind == "module"}
    assert (shapes["G.net"], shapes["D.net"]) == ("2×32", "2×1")
    assert found.inputs == "G 2×8 f32, D 2×32 f32"


def test_shared_parameters_count_once() -> None:
    """Rows of modules tell them; those of operators have them for each that reads them."""
    ops = [op(f"N.{name}/mm:0", name, "mm", params=6) for name in "ab"]
    rows = {"": 9, "a": 6, "b": 6, "unused": 3}
    modules = [{"model": "N", "path": path, "parameters": n} for path, n in rows.items()]
    found = model({"ops": ops, "modules": modules})
    assert found.total("params", "forward") == 9
    assert found.data()["nodes"][1][-1] == [-3]


def test_a_page_without_a_model_is_called_after_its_program() -> None:
    """The tools say nothing of what ran."""
    facts = {"command": "amanda run -t flops -- folder/train.py --lr 1"}
    assert document_of(RunReport(title="t", facts=facts, tools=[])).heading == "train.py"


def test_libraries_are_those_that_are_published() -> None:
    """VERSIONS.txt tells version, licence and checksum, and no page needs another."""
    folder = Path(report.__file__).parents[1] / "vendor"
    rows = re.findall(r"\| `(\S+)` \|.*\| `(\w{64})` \|", (folder / "VERSIONS.txt").read_text())
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name, _ in rows}
    assert digests == dict(rows)
    assert set(digests) == {path.name for path in folder.glob("*.js")}
    assert all(
        (folder / name).with_name(f"{name.partition('.')[0]}.LICENSE").exists() for name in digests
    )


def test_a_page_holds_the_libraries_that_it_needs() -> None:
    """Tables alone need none: a page of a few kilobytes stays one."""
    plain = render(Document(title="t", sections=[Section(name="s")]))
    assert len(plain) < 60_000
    chart = Chart(title="c", kind="bar", labels=["a", "b"], values={"x": [1, 2]})
    charts = render(Document(title="t", sections=[Section(name="s", charts=[chart])]))
    assert 200_000 < len(charts) < 320_000
    assert "dagre" not in charts
    ids = ("Net.a/mm:0", "Net.b/mm:0")
    view = model({"ops": [op(i, i[4]) for i in ids], "edges": chain(*ids)})
    assert 450_000 < len(render(Document(title="t", model=view))) < 620_000


# -- pages --------------------------------------------------------------------


def test_every_value_of_a_result_is_somewhere() -> None:
    """Of a tool without tables: figures, mappings within mappings, lists within lists."""
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
    assert [(grid.title, grid.rows) for grid in section.grids] == [("by type", 50), ("mixed", 60)]
    assert '{"k0": 0' in section.grids[0].columns[2]["texts"][0]


@pytest.mark.parametrize("result", [None, [], [1, 2], "text", 3.5, {"summary": 1}, {"ops": [1]}])
def test_results_of_any_form_make_a_page(result: Any) -> None:
    """Nothing asks a tool for a mapping."""
    report = RunReport(title="t", facts={}, tools=[ToolReport(name="odd", result=result)])
    assert "<h2>odd</h2>" in render(document_of(report))


def test_a_tool_with_tables_shows_them_and_its_operators() -> None:
    """What else is in its result repeats them; a table without columns is a sentence."""
    tool = ToolReport(
        name="own",
        result={"summary": {"by": {"a": {"n": 1}}}, "ops": [{"id": "a", "namespace": "x"}]},
        tables=[Table("all is well", (), ()), Table("shares", ("op", "share"), [("a", "3 %")])],
    )
    section = section_of(tool)
    assert section.notes == ["all is well"]
    assert [grid.title for grid in section.grids] == ["shares", "operators"]
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
    done = run_python("-c", code, check=True)
    assert done.stdout == "[]\n"


def test_the_head_names_models_and_tells_their_zeros() -> None:
    """A loss is a module without parameters; what setup fills with zeros is not the model's."""
    rows = [
        op("net/MatMul:0", "net", "linear", params=4, phase="forward", zeros=1, elements=10),
        op("loss/Mean:0", "loss", "mean", params=0, phase="forward"),
        op("/zeros:0", "", "zeros", phase="setup", zeros=90, elements=90),
    ]
    result = {"summary": {"activations": 0.91}, "ops": rows}
    tools = [ToolReport(name=n, result={**result, "tool": n}) for n in ("flops", "sparsity")]
    page = document_of(RunReport(title="t", facts={}, tools=tools))
    assert page.heading == "net"
    assert page.figures["zeros of the activations"] == "10 %"


def test_a_table_without_rows_is_a_line() -> None:
    """Its title says that there is nothing, or the page does; no empty table stands below it."""
    tables = [Table("types: 0 of 9", ("type", "ops"), []), Table("more", ("a",), [(1,)])]
    tables += [Table("flops by module", ("module", "ops"), []), Table("no divergence", (), ())]
    section = section_of(ToolReport(name="types", result={}, tables=tables))
    assert section.notes == ["types: 0 of 9", "flops by module: none", "no divergence"]
    assert [grid.title for grid in section.grids] == ["more"]
