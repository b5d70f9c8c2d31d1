"""Tables for notebooks.

::

    table_of(Table("summary of Net", ("module", "calls"), [("fc", 1)]), texts=1)
"""

from __future__ import annotations

import html

from amanda.results import Table


def table_of(table: Table, texts: int) -> str:
    """Return the HTML of a table in the notebook's own colours, with its title.

    Args:
        table: the table; spaces at the beginning of cells stay.
        texts: how many columns, from the first, hold text; the others are aligned to the right.
    """
    aligned = ["left" if i < texts else "right" for i in range(len(table.columns))]
    head = "".join(
        f'<th style="text-align:{side};white-space:nowrap">{html.escape(column)}</th>'
        for column, side in zip(table.columns, aligned, strict=True)
    )
    lines = (
        "".join(
            f'<td style="text-align:{side};white-space:pre">{html.escape(str(cell))}</td>'
            for cell, side in zip(row, aligned, strict=True)
        )
        for row in table.rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<p>{html.escape(table.title)}</p><div style="overflow-x:auto">'
        f'<table style="margin-left:0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )
