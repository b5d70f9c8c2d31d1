"""The portability matrix (the paper's Table 3): five tools in four modes, and one result."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.tools.optimization.portability import PROGRAMS, Program
from tests.tools.optimization.portability_rows import MODEL, ROWS, Cell, differences

REFERENCE = PROGRAMS[0]


@functools.lru_cache
def cell(row: str, mode: type[Program]) -> Cell:
    return ROWS[row](mode())


@pytest.mark.parametrize("mode", PROGRAMS, ids=lambda mode: mode.name)
@pytest.mark.parametrize("row", ROWS)
def test_a_tool_finds_the_same_in_every_mode(row: str, mode: type[Program]) -> None:
    """One tool object's code, no line of it for a mode; the weights are copied."""
    assert differences(cell(row, mode), cell(row, REFERENCE)) == []


def test_the_reference_is_what_the_program_says() -> None:
    """Counted by hand, so that the modes are not equal in being wrong."""
    traced = cell("graph tracing", REFERENCE).exact
    assert traced["types"] == [*MODEL, "sub", "square", "mean"]
    assert traced["edges"] == [(i, i + 1) for i in range(8)]
    forward = [2 * 5 * 81 * 9 * 4 * 8, 2 * 5 * 16 * 9 * 8 * 8, 2 * 5 * 8 * 6]
    found = cell("FLOPs", REFERENCE).exact
    assert found["by_type"]["conv2d"] == sum(forward[:2])
    assert found["by_type"]["linear"] == forward[2]
    assert found["backward"] == 2 * sum(forward) - forward[0]
    critical = cell("effective path", REFERENCE).exact["critical"]
    assert critical[-1] == ["linear", 5, 5, 5]


def test_the_table_in_the_documents_is_what_the_tools_find() -> None:
    """The README has the result of each tool."""
    lines = ["| tool | result |", "|---|---|"]
    lines += [f"| {row} | {cell(row, REFERENCE).shown} |" for row in ROWS]
    readme = Path(__file__).parents[3] / "amanda-tools" / "README.md"
    assert "\n".join(lines) in readme.read_text(encoding="utf-8")
