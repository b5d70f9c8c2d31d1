"""Tables of a page: columns of plain data, which the browser sorts, filters and draws.

::

    table = make_table("times", ["op", "time"], [["conv2d:0", "1.5 ms"], ["relu:0", "20 µs"]])
    table.columns[1]["keys"]        # [0.0015, 2e-05]: the seconds by which the browser sorts
    table.data()                    # JSON data for tables.js
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda.files import plain_data
from amanda_tools._output.report.model_ops import shapes_text
from amanda_tools._output.units import format_short

MAX_ROWS = 50_000
"""Rows of a table that a page holds; the tool's JSON file has all."""

_LONGEST = 400
"""Characters of a cell."""

_AMOUNT = re.compile(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)(?: ?([kMGTPmµn]?)([A-Za-z%/]*))?(?: .*)?")
"""A number with a unit, as it may stand at the beginning of a text: ``35.1 GFLOP``, ``3 of 8``."""

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_OF_SECONDS = {"m": 1e-3, "µ": 1e-6, "n": 1e-9}
_SPECIAL = frozenset({"inf", "-inf", "nan"})
_NOTHING = frozenset({"", "-"})

_UNITS = {
    "flops": "FLOP",
    "flops_backward": "FLOP",
    "macs": "MAC",
    "seconds": "s",
    "memory_delta": "B",
}
"""Units of columns by the keys of a tool's rows; other keys end with their unit."""

_ENDINGS = {"_bytes": "B", "_seconds": "s"}

_MICROSECONDS = "_us"
"""The ending of keys whose figures are shown as times."""

_TIMES = frozenset({"mean", "shortest", "longest"})
"""Columns that are times in a table that has ``seconds`` as well."""

_FEWEST_EQUAL = 3
"""A table with fewer rows keeps columns with one value."""

_LONGEST_EQUAL = 60
"""Characters of a value that is listed below a table; a column with longer ones stays."""

_NAMING = frozenset({"type", "kind", "tensor", "output", "figure"})
"""Columns that stand before the figures, beside the first one."""


_COUNTS = frozenset({"executions", "calls", "elements", "macs"})
"""Figures that stand after the others, which grow with them."""

_NAMES = frozenset({"module", "op", "id", "path", "output", "shape"})
"""Columns of names: the modules ``0``, ``0.1`` and ``0.10`` of nested lists are not amounts, nor
is a shape, ``4 x 10``."""


@attrs.frozen(kw_only=True)
class PageTable:
    """One table of a page.

    Attributes:
        title: one line.
        columns: results of :func:`make_column`, of equal length.
        rows: number of rows.
        hidden: number of rows left out.
        equal: name and value of columns left out because all rows have the same.
    """

    title: str
    columns: Sequence[Mapping[str, Any]]
    rows: int
    hidden: int = 0
    equal: Sequence[tuple[str, str]] = ()

    def data(self) -> dict[str, Any]:
        """Return the JSON data for the browser."""
        return {"columns": list(self.columns), "rows": self.rows}


def make_table(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    units: Sequence[str] = (),
    tools: Sequence[str] = (),
) -> PageTable:
    """Make a table from rows, which may differ in length.

    Args:
        units: those of plain numbers, by column.
        tools: the tool that a column is from, "" for those of all.
    """
    kept = rows[:MAX_ROWS]
    columns = [
        make_column(
            str(name),
            [row[i] if i < len(row) else None for row in kept],
            unit=units[i] if units else "",
            names=i == 0 or str(name) in _NAMING,
        )
        | ({"tool": tools[i]} if tools and tools[i] else {})
        for i, name in enumerate(names)
    ]
    shown, equal = _without_equal(columns, len(kept))
    return PageTable(
        title=title,
        columns=_figures_first(shown),
        equal=equal,
        rows=len(kept),
        hidden=len(rows) - len(kept),
    )


def make_table_from_records(title: str, rows: Sequence[Mapping[str, Any]]) -> PageTable:
    """Make a table from mappings, with a column for each key that any of them has."""
    return make_table_of_tools(title, [{("", key): row[key] for key in row} for row in rows])


def make_table_of_tools(title: str, rows: Sequence[Mapping[tuple[str, Any], Any]]) -> PageTable:
    """Make a table from mappings, with a column for each tool and key that any of them has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if len({row.get(_NAMESPACE) for row in rows}) == 1:
        # It stands in the head of the page.
        keys = [key for key in keys if key != _NAMESPACE]
    names = [heading_of(key) for _, key in keys]
    cells = [[_cell_of(key[1], row.get(key)) for key in keys] for row in rows]
    units = [_unit_of(key, [other for of, other in keys if of == tool]) for tool, key in keys]
    return make_table(title, names, cells, units=units, tools=[tool for tool, _ in keys])


_NAMESPACE = ("", "namespace")
"""The tool and key of a figure of operators."""

IN_THE_RUN = " in the run"
"""Added to the key of a figure of the last step for that of the run."""


def heading_of(key: Any) -> str:
    """Return the heading of a key of a result: ``output bytes`` of ``output_bytes``."""
    if str(key).endswith(IN_THE_RUN):
        return heading_of(str(key).removesuffix(IN_THE_RUN)) + IN_THE_RUN
    if key == "seconds":
        return "time"
    text = str(key)
    if text.endswith(_MICROSECONDS):
        text = text.removesuffix(_MICROSECONDS) + " time"
    return text.replace("_", " ").strip()


def _unit_of(key: Any, keys: Sequence[Any]) -> str:
    key = str(key).removesuffix(IN_THE_RUN)
    if (key in _TIMES and "seconds" in keys) or str(key).endswith(_MICROSECONDS):
        return "s"
    ending = next((unit for end, unit in _ENDINGS.items() if str(key).endswith(end)), "")
    return _UNITS.get(key, ending)


def _cell_of(key: Any, value: Any) -> Any:
    """Convert a value for its column: times to seconds, attributes to arguments as in a call."""
    if key == "attributes" and isinstance(value, Mapping):
        return ", ".join(f"{name}={_part(part)}" for name, part in value.items())
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_micro = str(key).removesuffix(IN_THE_RUN).endswith(_MICROSECONDS)
    return value / 1e6 if is_number and is_micro else value


def _without_equal(
    columns: Sequence[Mapping[str, Any]], rows: int
) -> tuple[list[Mapping[str, Any]], list[tuple[str, str]]]:
    """Split columns into those to show, and name and value of those with one value in all rows."""
    kept: list[Mapping[str, Any]] = []
    equal: list[tuple[str, str]] = []
    for i, column in enumerate(columns):
        values = column.get("texts") or column.get("values") or [None]
        is_long = len(str(values[0])) > _LONGEST_EQUAL
        is_short = rows < _FEWEST_EQUAL
        if i == 0 or is_short or is_long or any(v != values[0] for v in values):
            kept.append(column)
        elif values[0] not in (None, *_NOTHING):
            name = f"{column.get('tool', '')} {column['name']}".lstrip()
            unit = "" if isinstance(values[0], str) else column.get("unit", "")
            equal.append((name, format_short(values[0], unit) if unit else str(values[0])))
    return kept, equal


def _figures_first(columns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Order columns: the texts before any figure name the row and stay, then come figures."""
    at = next((i for i, column in enumerate(columns) if column["numeric"]), len(columns))
    lead = [c for i, c in enumerate(columns[:at]) if i == 0 or c["name"] in _NAMING]
    rest = [c for c in columns if all(c is not kept for kept in lead)]
    figures = [c for c in rest if c["numeric"]]
    tools = list(dict.fromkeys(column.get("tool") for column in figures))
    # On a phone one or two figures are in sight.
    figures.sort(key=lambda c: (tools.index(c.get("tool")), c["name"] in _COUNTS))
    return [*lead, *figures, *(c for c in rest if not c["numeric"])]


def make_column(
    name: str, values: Iterable[Any], *, unit: str = "", names: bool = True
) -> dict[str, Any]:
    """Make a column: name, values, and how they sort; repeated texts are stored once.

    ``numeric`` is true if all values are numbers. A column of texts that begin with a number
    (``35.1 GFLOP``, ``12.5 %``, ``3 of 8``) is numeric as well and has ``keys`` to sort by.
    """
    cells = [plain_cell(value) for value in values]
    there = [cell for cell in cells if cell is not None and cell not in _NOTHING]
    if there and all(not isinstance(c, str) or c in _SPECIAL for c in there):
        return {"name": name, "numeric": True, "values": cells, **({"unit": unit} if unit else {})}
    texts = ["" if cell is None else str(cell) for cell in cells]
    keys = None if _are_names(name, there, names) else _sort_keys(texts)
    sorting = {"keys": keys} if keys else {}
    return {"name": name, "numeric": keys is not None, **sorting, **_stored(texts)}


def _are_names(name: str, there: Sequence[Any], names: bool) -> bool:
    """True if texts are not amounts, such as the names "0" and "4" of modules in a list."""
    is_named = names and all(cell.isdecimal() for cell in there if isinstance(cell, str))
    return not there or name in _NAMES or is_named


def _stored(texts: Sequence[str]) -> dict[str, Any]:
    """Return the data of texts. Texts that repeat often, such as types, are stored once, which
    makes a page several times smaller."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) * 2 >= len(texts):
        return {"values": texts}
    numbers = {text: number for number, text in enumerate(distinct)}
    return {"texts": distinct, "index": [numbers[text] for text in texts]}


def _sort_keys(texts: Sequence[str]) -> list[Any] | None:
    """Return the amounts by which texts sort; None if one of them has no amount."""
    keys = [text if text in _SPECIAL else amount_of(text) for text in texts]
    pairs = zip(keys, texts, strict=True)
    return keys if all(key is not None or text in _NOTHING for key, text in pairs) else None


def plain_cell(value: Any) -> Any:
    """Convert a value to a number, a text or None; NumPy's numbers become Python's."""
    if value is None or (isinstance(value, (list, tuple, Mapping)) and not value):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if (shapes := shapes_text(_tensors(value))) or _are_handles(value):
        text = shapes
    elif isinstance(value, (list, tuple)) and all(map(_is_word, value)):
        text = ", ".join(value)
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
        text = json.dumps(plain_data(value), default=str, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _tensors(value: Any) -> Any:
    """Return a list with a tensor's description, and [] for other mappings such as attributes."""
    if isinstance(value, Mapping):
        return [value] if "dtype" in value else []
    return value


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_handles(value: Any) -> bool:
    """True of tensors without a text: handles of variables and iterators."""
    is_list = isinstance(value, (list, tuple))
    return is_list and all(isinstance(item, Mapping) and "dtype" in item for item in value)


def _part(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain_data(value), default=str)


def amount_of(text: str) -> float | None:
    """Parse the number that a text begins with, with its unit prefix; None if there is none."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        return None
    number, prefix, unit = found.groups()
    # "12 M" is twelve million, but the "G" of "3 Generations" is not a prefix.
    prefixes = _PREFIXES | (_OF_SECONDS if unit == "s" else {})
    factor = prefixes.get(prefix or "", 1.0) if len(unit or "") <= 5 else 1.0
    return float(number.replace(",", "")) * factor
