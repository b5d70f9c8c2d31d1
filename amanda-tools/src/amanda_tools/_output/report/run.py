"""The page of a run: sections from the results of any tool, of this package or not.

``render(document_of(report))`` is the page of a :class:`~amanda.results.RunReport`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from amanda.results import RunReport, Table, ToolReport
from amanda_tools._output.report.columns import (
    IN_THE_RUN,
    PageTable,
    heading_of,
    make_table,
    make_table_from_records,
    plain_cell,
)
from amanda_tools._output.report.document import Document, Section
from amanda_tools._output.report.head import describe_run, main_figures, program_of
from amanda_tools._output.report.model_tree import ModelView, model_of

_COMMON = frozenset({"tool", "schema", "namespaces", "summary", "ops"})
"""Keys of a result in the common form, which have their own places on the page."""

_SAID_TWICE = frozenset({"name", "direction"})
"""Columns that repeat the type, id or phase of an operator."""

_FEW = 6
"""A list with at most this many plain values is shown as a figure, not as a table."""

_MANY = 24
"""A mapping with more entries that are not figures is one table, not one table per entry."""


def document_of(report: RunReport) -> Document:
    """Make the page of a run."""
    sections = _without_repeats([_section(tool) for tool in report.tools])
    model = _model(report, sections)
    lead = describe_run(report, model)
    return Document(
        title=report.title,
        heading=(", ".join(model.names) if model is not None else "") or program_of(report),
        lead=lead,
        figures=main_figures(report.tools, model),
        facts={n: text for n, text in report.facts.items() if text not in lead.values()},
        model=model,
        sections=sections,
    )


def _without_repeats(sections: Sequence[Section]) -> list[Section]:
    """Remove line charts that an earlier section has, such as the durations of the steps."""
    seen = set[str]()
    found = []
    for section in sections:
        # Each tool takes the time of a step for itself: the last digits differ.
        lines = [chart.title for chart in section.charts if chart.kind == "line"]
        if seen & set(lines):
            charts = [c for c in section.charts if c.kind != "line" or c.title not in seen]
            found.append(attrs.evolve(section, charts=charts))
        else:
            found.append(section)
        seen.update(lines)
    return found


def _model(report: RunReport, sections: list[Section]) -> ModelView | None:
    try:
        return model_of(report.tools)
    except Exception as error:
        # Rows of any tool may hold anything.
        lost = f"the model: {type(error).__name__}: {error}"
        sections.append(Section(name="model", lost=[lost]))
        return None


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
    has_tables = bool(tool.tables)
    summary = result.get("summary", {})
    if not isinstance(summary, Mapping):
        summary = {"summary": summary}
    grids = [
        make_table(table.title, table.columns, table.rows)
        for table in tool.tables
        if table.columns and table.rows
    ]
    facts = {} if has_tables else figures(summary)
    # Tables from the summary repeat what the tool's own tables show: they are closed at first.
    grids += tables_of(summary, is_open=not has_tables)
    grids += _operators(result.get("ops"))
    rest = {key: value for key, value in result.items() if key not in _COMMON}
    grids += tables_of(rest, is_open=not has_tables)
    return Section(
        name=tool.name,
        about=tool.about,
        notes=[_sentence(table) for table in tool.tables if not (table.columns and table.rows)],
        facts={**facts, **figures(rest)},
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


def tables_of(data: Mapping[str, Any], *, is_open: bool, prefix: str = "") -> Iterator[PageTable]:
    """Yield tables of the mappings and lists that :func:`figures` leaves out."""
    for key, value in data.items():
        title = f"{prefix}{heading_of(key)}"
        if key == "phases" and _is_all_zero(value):
            continue
        if isinstance(value, Mapping):
            yield from _of_mapping(title, value, is_open)
        elif isinstance(value, (list, tuple)) and not _are_few(value):
            if all(isinstance(item, Mapping) for item in value):
                yield make_table_from_records(title, value, is_open=is_open)
            else:
                yield make_table(title, [str(key)], [[item] for item in value], is_open=is_open)


def _is_all_zero(value: Any) -> bool:
    """True if all figures of a mapping of mappings are 0."""
    return isinstance(value, Mapping) and not any(
        leaf for part in value.values() if isinstance(part, Mapping) for leaf in part.values()
    )


def _of_mapping(title: str, value: Mapping[str, Any], is_open: bool) -> Iterator[PageTable]:
    values = list(value.values())
    if all(map(_is_plain, values)):
        if not _are_few(values):
            yield make_table(title, ["", "value"], list(value.items()), is_open=is_open)
    elif all(isinstance(v, Mapping) for v in values) and (
        len(values) > _FEW or all(_is_plain(leaf) for v in values for leaf in v.values())
    ):
        # by_type: "type" is the heading of the names.
        kind = title.rpartition("by ")[2]
        kind = "" if any(kind in item for item in values) else kind
        rows = [{kind: name, **item} for name, item in value.items()]
        yield make_table_from_records(title, rows, is_open=is_open)
    elif len(values) > _MANY:
        yield make_table(title, ["", "value"], list(value.items()), is_open=is_open)
    else:
        if plain := figures(value):
            yield make_table(title, ["", "value"], list(plain.items()), is_open=is_open)
        yield from tables_of(value, is_open=is_open, prefix=f"{title}: ")


def _operators(ops: Any) -> list[PageTable]:
    if not isinstance(ops, (list, tuple)) or not ops:
        return []
    if not all(isinstance(op, Mapping) for op in ops):
        return [make_table("operators", ["operator"], [[op] for op in ops])]
    left_out = set()
    if len({str(op.get("namespace")) for op in ops}) == 1:
        left_out.add("namespace")  # It stands at the head of the page.
    if all(op.get("phase") for op in ops):
        left_out |= _SAID_TWICE
    rows = [
        {key: value for key, value in _with_step(op).items() if key not in left_out} for op in ops
    ]
    return [make_table_from_records("operators", rows)]


def _with_step(op: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the figures of the last step first, then those of the run."""
    step = op.get("per_step")
    if not isinstance(step, Mapping):
        return op
    # The one that a reader looks for first is the last of a row, as the FLOPs after the executions.
    runs = {f"{name}{IN_THE_RUN}": op[name] for name in reversed(list(step)) if name in op}
    return {**{key: value for key, value in op.items() if key != "per_step"}, **step, **runs}


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple))


def _are_few(values: Sequence[Any]) -> bool:
    return len(values) <= _FEW and all(map(_is_plain, values))


def _text(value: Any) -> str:
    value = plain_cell(value)
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
