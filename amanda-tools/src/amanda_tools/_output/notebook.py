"""Output for notebooks: a page in a frame of the cell, and tables.

::

    frame_of("<!DOCTYPE html>...")
    table_of(Table("summary of Net", ("module", "calls"), [("fc", 1)]), texts=1)
"""

from __future__ import annotations

import html

from amanda.results import Table

_DARK = (
    'body[data-jp-theme-light="false"]',  # JupyterLab, Notebook 7, and pages of nbconvert
    'body[data-vscode-theme-kind$="dark"]',
    'body[data-vscode-theme-kind="vscode-high-contrast"]',
    'html[theme="dark"]',  # Colab
    'html[data-theme="dark"]',  # sites made by Sphinx
)
_LIGHT = (
    'body[data-jp-theme-light="true"]',
    'body[data-vscode-theme-kind$="light"]',
    'html[theme="light"]',
    'html[data-theme="light"]',
)
"""CSS selectors of notebooks' light theme. A frame takes its colour scheme from its element; if no
selector matches, it follows the browser."""

_HEIGHT = "40rem"


def frame_of(page: str) -> str:
    """Return the HTML of a frame that shows a page in the colours of the notebook's theme.

    The page has no access to the notebook; its lower edge can be drawn down.
    """
    schemes = "".join(
        f"{','.join(f'{mark} .amanda-frame' for mark in marks)}{{color-scheme:{scheme}}}"
        for marks, scheme in ((_DARK, "dark"), (_LIGHT, "light"))
    )
    return (
        f"<style>{schemes}</style>"
        f'<div style="height:{_HEIGHT};min-height:8rem;resize:vertical;overflow:hidden">'
        '<iframe class="amanda-frame" sandbox="allow-scripts" '
        'style="display:block;width:100%;height:100%;border:0" '
        f'srcdoc="{html.escape(page)}"></iframe></div>'
    )


def table_of(table: Table, texts: int) -> str:
    """Return the HTML of a table in the notebook's own colours, with its title.

    Args:
        table: the table; spaces at the beginning of cells stay.
        texts: how many columns, from the first, hold text; the others are aligned to the right.
    """
    ways = ["left" if i < texts else "right" for i in range(len(table.columns))]
    head = "".join(
        f'<th style="text-align:{way};white-space:nowrap">{html.escape(column)}</th>'
        for column, way in zip(table.columns, ways, strict=True)
    )
    lines = (
        "".join(
            f'<td style="text-align:{way};white-space:pre">{html.escape(str(cell))}</td>'
            for cell, way in zip(row, ways, strict=True)
        )
        for row in table.rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<p>{html.escape(table.title)}</p><div style="overflow-x:auto">'
        f'<table style="margin-left:0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )
