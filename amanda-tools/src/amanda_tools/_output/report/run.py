"""The page of a run: sections from the results of any tool, of this package or not.

``render(document_of(report))`` is the page of a :class:`~amanda.results.RunReport`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amanda.results import RunReport, Table, ToolReport
from amanda_tools._output.report.columns import (
    IN_THE_RUN,
    PageTable,
    heading_of,
    make_table,
    make_table_from_records,
    make_table_of_tools,
    plain_cell,
)
from amanda_tools._output.report.document import Document, Section
from amanda_tools._output.report.head import compare_figures, describe_run, main_figures, program_of
from amanda_tools._output.report.model_ops import mapping_of, rows_of
from amanda_tools._output.report.model_tree import model_of

_COMMON = frozenset({"tool", "schema", "namespaces", "summary", "ops"})
"""Keys of a result in the common form, which have their own places on the page."""

_OF_ALL = frozenset(
    "id type name direction namespace module forward phase "
    "inputs input_names outputs attributes source".split()
)
"""Keys of rows that are the same in the results of all tools."""

_SAID_TWICE = frozenset({"name", "direction"})
"""Keys that repeat the type, id or phase of an operator."""

_FEW = 6
"""A list with at most this many plain values is shown as a figure, not as a table."""


def document_of(report: RunReport) -> Document:
    """Make the page of a run, or of two side by side."""
    sections = [_section(tool) for tool in report.tools]
    # The operators of the graph are in the order of the run.
    graph = [ToolReport(name="", result=report.graph)] if report.graph else []
    tools, other = report.runs or ([*graph, *report.tools], ())
    model, operators, compared = None, None, {}
    try:
        model = model_of(tools, report.modules, other)
        # Columns of both runs stand beside each other.
        operators = operators_of([*itertools.chain(*zip(*report.runs, strict=True))] or tools)
        compared = compare_figures(*report.runs) if report.runs else {}
    except Exception as error:
        # Rows of any tool may hold anything.
        lost = f"the model: {type(error).__name__}: {error}"
        sections.append(Section(name="model", lost=[lost]))
    lead = {} if report.runs else describe_run(report, model)
    return Document(
        title=report.title,
        heading=(", ".join(model.names) if lead and model else "") or program_of(report),
        lead=lead,
        figures=compared or main_figures(report.tools, model),
        facts={n: text for n, text in report.facts.items() if text not in lead.values()},
        model=model,
        operators=operators,
        sections=sections,
    )


def _section(tool: ToolReport) -> Section:
    try:
        return section_of(tool)
    except Exception as error:
        # Values of any tool may raise when they are converted; the other tools keep their sections.
        return Section(name=tool.name, about=tool.about, lost=[f"{type(error).__name__}: {error}"])


def section_of(tool: ToolReport) -> Section:
    """Make the section of a tool; of a tool without tables from all that its result holds."""
    result = tool.result
    if not isinstance(result, Mapping):
        result = {} if result is None else {"result": result}
    summary = result.get("summary", {})
    if not isinstance(summary, Mapping):
        summary = {"summary": summary}
    grids = [
        make_table(table.title, table.columns, table.rows)
        for table in tool.tables
        if table.columns and table.rows
    ]
    # What a tool with tables has beside them stands in its JSON file.
    rest = {key: value for key, value in result.items() if key not in _COMMON}
    shown = {} if tool.tables else {**summary, **rest}
    grids += [*tables_of(shown), *_further_rows(result)]
    return Section(
        name=tool.name,
        about=tool.about,
        notes=[_sentence(table) for table in tool.tables if not (table.columns and table.rows)],
        facts=figures(shown),
        charts=tool.charts,
        grids=grids,
        text=tool.text,
        files=tool.files,
        lost=tool.lost,
    )


def _sentence(table: Table) -> str:
    """Return the text that replaces a table without rows."""
    tells_it = not table.columns or any(letter.isdigit() for letter in table.title)
    return table.title if tells_it else f"{table.title}: none"


def figures(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return single values, and short lists of them, as texts by name."""
    found: dict[str, str] = {}
    for key, value in data.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping) and value:
            if _are_few(list(value.values())):
                found.update(figures(value, f"{name}: "))
        elif _is_plain(value):
            found[name] = "none" if value is None else _text(value)
        elif isinstance(value, (Mapping, list, tuple)) and _are_few(list(value)):
            found[name] = ", ".join(map(_text, value)) or "none"
    return found


def tables_of(data: Mapping[str, Any]) -> Iterator[PageTable]:
    """Yield a table of each mapping and list that :func:`figures` leaves out."""
    for key, value in data.items():
        items = list(value.values()) if isinstance(value, Mapping) else value
        if _is_plain(items) or _are_few(items):
            continue
        is_named = isinstance(value, Mapping)
        if all(isinstance(item, Mapping) for item in items):
            rows = [{"": name, **item} for name, item in value.items()] if is_named else items
            yield make_table_from_records(heading_of(key), rows)
        elif is_named:
            yield make_table(heading_of(key), ["", "value"], list(value.items()))
        else:
            yield make_table(heading_of(key), [str(key)], [[item] for item in items])


def _further_rows(result: Mapping[str, Any]) -> list[PageTable]:
    """Return a table of rows that the table of operators does not hold: those of single tensors,
    and those in no common form."""
    ops, ids = result.get("ops"), {row["id"] for row in rows_of(result)}
    if not isinstance(ops, (list, tuple)) or len(ids) == len(ops):
        return []
    if not all(isinstance(op, Mapping) for op in ops):
        return [make_table("operators", ["operator"], [[op] for op in ops])]
    return [make_table_from_records("operators", list(map(_shown, ops)))]


def operators_of(tools: Sequence[ToolReport]) -> PageTable | None:
    """Make one table of the operators in all results; None without operators.

    Of the rows of single tensors each operator has the first, but none of weights.
    """
    found: dict[str, dict[tuple[str, Any], Any]] = {}
    for tool in tools:
        own: dict[str, Mapping[str, Any]] = {}
        for row in rows_of(mapping_of(tool.result)):
            if row.get("kind") != "weights":
                own.setdefault(row["id"], row)
        for op_id, row in own.items():
            merged = found.setdefault(op_id, {})
            for key, value in _shown(row).items():
                merged.setdefault(("" if key in _OF_ALL else tool.name, key), value)
    return make_table_of_tools("operators", list(found.values())) if found else None


def _shown(op: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the cells of a row: figures of the last step first, then those of the run."""
    left_out = {"per_step", *(_SAID_TWICE if op.get("phase") else ())}
    step = mapping_of(op.get("per_step"))
    # The one that a reader looks for first is the last of a row, as the FLOPs after the executions.
    runs = {f"{name}{IN_THE_RUN}": op[name] for name in reversed(list(step)) if name in op}
    return {**{key: value for key, value in op.items() if key not in left_out}, **step, **runs}


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple))


def _are_few(values: Sequence[Any]) -> bool:
    return len(values) <= _FEW and all(map(_is_plain, values))


def _text(value: Any) -> str:
    value = plain_cell(value)
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
