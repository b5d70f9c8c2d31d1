"""The common form of tools."""

from __future__ import annotations

import io
import json
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest

import amanda
from amanda.files import write_json
from amanda.results import MAX_ROWS, Table
from amanda.state import LIVE_SCOPES
from amanda.testing import loopback as lb
from amanda.tools.description import OpDescription, describe
from amanda.tools.reporting import ReportingTool, plain_text


def test_a_table_is_aligned_and_cut() -> None:
    """Amounts stand on the right, below their unit, and long tables say what is left out."""
    assert plain_text(Table("title", ("name", "n"), [("a", 1), ("bcdef", 10)])) == (
        "title\n  name    n\n  -----  --\n  a       1\n  bcdef  10"
    )
    long = plain_text(Table("long", ("n",), [(i,) for i in range(MAX_ROWS + 5)]))
    assert long.endswith(f"  {MAX_ROWS - 1}\n... 5 more rows with --full")
    one = plain_text(Table("one", ("n",), [(i,) for i in range(MAX_ROWS + 1)]))
    assert one.endswith("... 1 more row with --full")
    assert plain_text(Table("empty", ("n",), [])) == "empty"
    assert plain_text(Table("names", ("a", "b"), [("", "")])).splitlines()[1].strip() == "a"
    assert plain_text(Table("", ("a", "b"), [("x B", "1.5 kB"), ("y", "-")])).splitlines()[1:] == [
        "  a        b",
        "           B",
        "  ---  -----",
        "  x B  1.5 k",
        "  y        -",
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are cut, sentences continued, and then columns on the right left out; not in full."""
    monkeypatch.setenv("COLUMNS", str(width))
    path, why = ".".join(["module"] * 30), "a sentence of some words " * 6
    table = Table(why, ("op", "n", "type", "why"), [(path, 1, "T" * 40, why.strip())])
    lines = plain_text(table).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert ".module.module  1  TTT" in text
    assert path not in text
    full = plain_text(table, full=True)
    assert path in full
    assert why.strip() in full


def test_names_that_are_cut_stay_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column on the right is left out for it."""
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"bert.encoder.layer.{i}.attention.output.LayerNorm.weight" for i in range(3)]
    lines = plain_text(Table("", ("op", *"abcdef"), [(n, *[0.1234] * 6) for n in names]))
    shown = [line.split()[0] for line in lines.splitlines()[-3:]]
    assert shown == [f"…r.{i}.attention.output.LayerNorm.weight" for i in range(3)]


def test_json_takes_what_tools_have(tmp_path: Path) -> None:
    """Tuples, sets, paths, infinities and keys of any kind are written."""
    path = tmp_path / "a.json"
    write_json(path, {1: (1, 2), "set": {3}, "path": Path("x"), "inf": float("-inf"), "n": None})
    assert json.loads(path.read_text()) == {
        "1": [1, 2],
        "set": [3],
        "path": "x",
        "inf": "-inf",
        "n": None,
    }


@pytest.mark.parametrize("extra", [0.5, math.nan, (1,), "cycle"], ids=str)
def test_json_of_objects_is_the_same_beside_what_json_lacks(extra: Any, tmp_path: Path) -> None:
    """NumPy's scalars, attrs objects, enumerations and mappings have one form in every file."""
    point = attrs.make_class("Point", ["x"])(1)
    proxy = MappingProxyType({"a": (np.int64(1), np.float64(2.5), np.bool_(True))})
    data: dict[Any, Any] = {
        "proxy": proxy,
        "attrs": point,
        "enum": signal.SIGINT,
        "deep": [[frozenset({(2,)})], {"none": None, "yes": True}],
        "array": np.array([1]),
        "extra": extra,
    }
    if extra == "cycle":
        data["extra"] = [data]
    if extra == (1,):
        data[(1, 2)] = 1
    write_json(tmp_path / "a.json", data)
    written = json.loads((tmp_path / "a.json").read_text())
    expected = {0.5: 0.5, "cycle": ["..."], (1,): [1]}.get(extra, "nan")
    assert written.pop("extra") == expected
    assert written.pop("(1, 2)", 1) == 1
    assert written == {
        "proxy": {"a": ["1", 2.5, "True"]},
        "attrs": "Point(x=1)",
        "enum": 2,
        "deep": [[[[2]]], {"none": None, "yes": True}],
        "array": "[1]",
    }


def test_an_operator_is_described_in_the_terms_of_all_tools() -> None:
    """Forward and backward rows have the same keys; types are canonical where a rule knows them."""
    found: list[OpDescription] = []
    tool = amanda.Tool()
    rules = [
        ["loopback", lambda context: context.__setitem__("op_type", "dense")],
        ["other", lambda context: context.__setitem__("op_type", "wrong")],
    ]
    tool.depends_on(amanda.tools.mapping.MappingTool(rules))
    tool.add_inst_for_op(lambda context: found.append(describe(context)))
    tool.add_inst_for_op(lambda context: found.append(describe(context)), backward=True)
    net = lb.Sequential(lb.Linear([[1.0]]))
    with amanda.apply(tool):
        net(lb.tensor([[2.0]])).backward()
    forward, backward = found[0], found[1]

    def tensor(*shape: int) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": "", "device": ""}

    assert forward.row() == {
        "id": "Sequential.0/linear:0",
        "type": "dense",
        "name": "linear",
        "direction": "forward",
        "module": "0",
        "namespace": "loopback/1.0/eager",
        "phase": "forward",
        "inputs": [tensor(1, 1), tensor(1, 1), None],
        "outputs": [tensor(1, 1)],
        "attributes": {},
    }
    assert backward.row() == {
        "id": "Sequential.0/linear:0/grad/MatmulBackward:0",
        "type": "MatmulBackward",
        "name": "MatmulBackward",
        "direction": "backward",
        "module": "0",
        "namespace": "loopback/1.0/eager",
        "forward": "Sequential.0/linear:0",
        "phase": "backward",
        "inputs": [tensor(1, 1)],
        "outputs": [tensor(1, 1), tensor(1, 1)],
        "attributes": {},
    }
    assert backward.is_selected(["MatmulBackward"])
    assert not backward.is_selected(["dense", "linear"])
    for types in (["dense"], ["linear"], []):
        assert forward.is_selected(types)


@attrs.frozen(kw_only=True)
class NoOptions:
    """No options."""


class Minimal(ReportingTool[NoOptions]):
    """Says nothing."""

    name = "minimal"
    Options = NoOptions

    def op_rows(self) -> list[dict[str, Any]]:
        return [
            {"id": "a", "type": "t", "module": "", "namespace": "x/1"},
            {"id": "b", "type": "t", "module": "", "namespace": "w/1"},
        ]

    def summary(self) -> dict[str, Any]:
        return {"n": 2}


def test_the_result_has_the_common_form() -> None:
    """Tool, schema, namespaces, summary and ops, whatever the tool."""
    assert Minimal().result() == {
        "tool": "minimal",
        "schema": 1,
        "namespaces": ["w/1", "x/1"],
        "summary": {"n": 2, "not_seen": {}},
        "ops": Minimal().op_rows(),
    }


def test_results_are_read_while_no_thread_writes_them() -> None:
    """Routines of other threads wait for the end of a result, and of all of a generator."""

    class Reader(Minimal):
        def op_rows(self) -> list[dict[str, Any]]:
            return list(self.tables())

        def tables(self) -> Iterator[Any]:
            worker = threading.Thread(target=lb.relu, args=(lb.tensor([1.0]),))
            worker.start()
            worker.join(0.3)
            yield {"namespace": worker.is_alive()}

    tool = Reader()
    tool.add_inst_for_op(lambda context: None)
    for read in lambda: tool.result()["ops"], tool.tables, tool.op_rows:
        with amanda.apply(tool):
            assert read() == [{"namespace": True}]


def test_the_sum_with_an_unknown_number_is_unknown() -> None:
    """Of executions that were not seen, in one scope and over several."""
    tool = Minimal()
    for counts in ((2, 3), (5, 0), (4,)):
        with amanda.apply(tool):
            for count in counts:
                LIVE_SCOPES[-1].statistics.count_not_seen("compiled", count)
                LIVE_SCOPES[-1].statistics.count_not_seen("other", 1)
    assert tool.not_seen() == {"compiled": 0, "other": 5}


def test_a_tool_may_leave_out_tables_and_files(tmp_path: Path) -> None:
    """Without tables nothing is printed, without files nothing is written."""
    out = io.StringIO()
    Minimal().print_summary(out)
    assert out.getvalue() == ""
    assert list(Minimal().write_files(tmp_path, "minimal")) == []


def test_a_tool_that_says_nothing_is_told_what_to_say() -> None:
    """The base class names the method that is missing."""

    class Silent(ReportingTool[NoOptions]):
        name = "silent"
        Options = NoOptions

    with pytest.raises(NotImplementedError, match="Silent must implement op_rows"):
        Silent().result()


@pytest.mark.parametrize(
    ("tool", "option", "value"),
    [("flops", "by", "colour"), ("profile", "sort", "size"), ("nan", "action", "stop")],
)
def test_choices(tool: str, option: str, value: str) -> None:
    """A value that is no choice is answered in one plain sentence that names the choices."""
    with pytest.raises(ValueError, match=rf"^tool {tool}: {option}={value} is not one of \w+, "):
        amanda.tools.load(tool)(**{option: value})


@pytest.mark.parametrize("name", ["coverage", "flops", "kernels", "profile", "trace"])
def test_a_tool_has_no_branch_for_a_framework(name: str) -> None:
    """Operators of the toy framework have rows, and stand in the summary, as others do."""
    tool, out = amanda.tools.load(name)(), io.StringIO()
    with amanda.apply(tool):
        lb.sum(lb.relu(lb.parameter([1.0]))).backward()
    assert {row["type"] for row in tool.op_rows()} >= {"relu", "sum"}
    tool.print_summary(out)
    assert f"{name}:" in out.getvalue()
