"""Tables of pages: columns that sort by what they mean."""

from __future__ import annotations

import math
from typing import Any

import pytest

from amanda_tools._output.report.columns import (
    MAX_ROWS,
    make_column,
    make_table,
    make_table_from_records,
)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (["35.128 GFLOP", "900 FLOP", "0 FLOP"], [35.128e9, 900, 0]),
        (["2.890 k", "224", "-"], [2890, 224, None]),
        (["12.5 %", "3 %"], [12.5, 3]),
        (["3 of 8", "10 of 8"], [3, 10]),
        (["1.5e-07", "nan", "inf", "-0.5"], [1.5e-7, "nan", "inf", -0.5]),
        (["1,234.5", "12"], [1234.5, 12]),
        (["1.3 s", "957 ms", "4 µs", "3 more"], [1.3, 0.957, 4e-6, 3]),
    ],
)
def test_texts_that_begin_with_a_number_sort_by_it(values: list[str], keys: list[Any]) -> None:
    """With prefix and unit; what is special stays so."""
    found = make_column("amount", values)
    assert found["numeric"]
    assert [k if isinstance(k, str) or k is None else pytest.approx(k) for k in keys] == found[
        "keys"
    ]
    assert found["values"] == values


@pytest.mark.parametrize(
    "values", [["0", "4"], ["conv1", "3 of 4"], ["layer1.0", "layer1.1"], ["2024-01-01"], ["", "-"]]
)
def test_names_are_no_numbers(values: list[str]) -> None:
    """Modules of a list, versions and dates are text."""
    assert not make_column("module", values)["numeric"]


def test_modules_of_lists_are_names_in_any_column() -> None:
    """Of nested lists, too: ``0.1`` and ``0.10`` are two modules; figures stand before them."""
    modules = ["0.1", "0.10", "2", ""]
    assert not make_column("module", modules, names=False)["numeric"]
    rows = [(i, module, i / 2) for i, module in enumerate(modules)]
    found = make_table("t", ["#", "module", "error"], rows)
    assert [column["name"] for column in found.columns] == ["#", "error", "module"]
    assert found.columns[-1]["values"] == modules


def test_shapes_stand_beside_the_type_whatever_they_are() -> None:
    """``4 x 10`` is not an amount, and stands where ``scalar`` and ``-`` stand."""
    for last in ("3 x 2", "scalar"):
        rows = [("a", "Net", "4 x 10", 8), ("b", "Linear", "-", 7), ("c", "Loss", last, 6)]
        found = make_table("t", ["module", "type", "output", "parameters"], rows)
        names = [column["name"] for column in found.columns]
        assert names == ["module", "type", "output", "parameters"]
        assert [column["numeric"] for column in found.columns] == [False, False, False, True]


def test_counts_stand_behind_other_figures() -> None:
    """On a phone the first figure is the one that a reader looks for."""
    rows = [{"id": str(i), "executions": i, "macs": 2 * i, "flops": 4 * i} for i in range(4)]
    found = make_table_from_records("t", rows)
    assert [column["name"] for column in found.columns] == ["id", "flops", "executions", "macs"]


def test_numbers_are_numbers_and_what_json_lacks_is_text() -> None:
    """None stays None, infinities are told, booleans are words, the rest is written as JSON."""
    assert make_column("n", [1, None, 2.5, math.inf]) == {
        "name": "n", "numeric": True, "values": [1, None, 2.5, "inf"],
    }  # fmt: skip
    assert make_column("b", [True, False])["values"] == ["true", "false"]
    assert make_column("l", [[1, {"a": math.nan}], None])["values"] == ['[1, {"a": "nan"}]', ""]
    assert len(make_column("t", ["x" * 1000, "y"])["values"][0]) == 400


def test_texts_that_repeat_are_there_once() -> None:
    """The browser puts them together again."""
    found = make_column("type", ["conv2d"] * 5 + ["relu"])
    assert (found["texts"], found["index"]) == (["conv2d", "relu"], [0, 0, 0, 0, 0, 1])


def test_rows_may_have_different_keys() -> None:
    """A column for each; tables too long are cut, and say so."""
    table = make_table_from_records("rows", [{"a": 1}, {"b": "x"}])
    assert [c["values"] for c in table.columns] == [[1, None], ["", "x"]]
    long = make_table("long", ["n"], [[i] for i in range(MAX_ROWS + 7)])
    assert (long.rows, long.hidden) == (MAX_ROWS, 7)


def test_figures_of_rows_have_their_units() -> None:
    """Bytes, seconds and operations are amounts; headings are words."""
    rows = [{"id": i, "seconds": 2e-5, "mean": 1e-5, "output_bytes": 2048 * i} for i in range(4)]
    table = make_table_from_records("operators", rows)
    columns = [(c["name"], c.get("unit")) for c in table.columns]
    assert columns == [("id", None), ("output bytes", "B")]
    assert table.equal == [("time", "20 µs"), ("mean", "10 µs")]
    alone = make_table_from_records("values", [{"mean": float(i)} for i in range(4)])
    assert "unit" not in alone.columns[0]


def test_the_namespace_of_operators_is_in_the_head() -> None:
    """Not in their table, if it is one; a column of that name in a tool's own table stays."""
    rows = [{"id": i, "namespace": "x"} for i in range(4)]
    assert [c["name"] for c in make_table_from_records("operators", rows).columns] == ["id"]
    table = make_table("cities", ["id", "namespace"], [[1, "x"], [2, "x"]])
    assert [c["name"] for c in table.columns] == ["id", "namespace"]


def test_an_empty_list_is_an_empty_cell() -> None:
    """An operator without outputs has no brackets to show."""
    assert make_column("outputs", [[], {}, "x"])["values"] == ["", "", "x"]


def test_times_have_one_unit_and_attributes_read_as_in_calls() -> None:
    """Microseconds are shown as times; attributes are not tensors, even with a shape among them."""
    rows = [
        {"id": "a", "host_us": 118000.0, "attributes": {"shape": [2, 3], "mode": "same"}},
        {"id": "b", "host_us": 2.5, "attributes": {"stride": 2}, "seen_by": ["hooks", "amanda"]},
    ]
    columns = {column["name"]: column for column in make_table_from_records("t", rows).columns}
    assert columns["host time"]["values"] == [0.118, 2.5e-6]
    assert columns["host time"]["unit"] == "s"
    assert columns["attributes"]["values"] == ["shape=[2, 3], mode=same", "stride=2"]
    assert columns["seen by"]["values"] == ["", "hooks, amanda"]


def test_what_names_a_row_stands_before_its_figures() -> None:
    """The tensors of one operator are told apart without scrolling."""
    rows = [{"id": "a", "kind": "weights", "tensor": f"w{i}", "mean": 1.0 + i} for i in range(4)]
    names = [column["name"] for column in make_table_from_records("t", rows).columns]
    assert names == ["id", "tensor", "mean"]
    rows[0]["kind"] = "activations"
    names = [column["name"] for column in make_table_from_records("t", rows).columns]
    assert names == ["id", "kind", "tensor", "mean"]
