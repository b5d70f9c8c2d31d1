"""The comparison as a page of its own: the error along the run, and a table to sort."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """
body{font:14px sans-serif;margin:2em;color:#1a202c}table{border-collapse:collapse}
th{cursor:pointer;text-align:left;background:#edf2f7}
th,td{padding:3px 10px;border:1px solid #cbd5e0}
td.n{text-align:right;font-variant-numeric:tabular-nums}tr.bad{background:#fff5f5}
tr.first{background:#feb2b2}svg{border:1px solid #cbd5e0}"""

_SCRIPT = """
document.querySelectorAll("th").forEach((th,i)=>th.addEventListener("click",()=>{
const body=document.querySelector("tbody"),up=th.dataset.up!=="1";th.dataset.up=up?"1":"0";
const key=r=>{const c=r.children[i];return c.dataset.v===undefined?c.textContent:+c.dataset.v};
[...body.rows].sort((a,b)=>{const x=key(a),y=key(b);return (x>y?1:x<y?-1:0)*(up?1:-1)})
.forEach(r=>body.appendChild(r))}));"""

_COLUMNS = ("#", "op", "type", "tensor", "step", "relative error", "largest difference", "note")
_WIDTH, _HEIGHT = 900, 220
_FLOOR = -17


def page(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """The page, which needs nothing from outside."""
    first = summary["first"]
    if first is None:
        head = f"All {summary['compared']} compared tensors agree."
    else:
        head = (
            f"First divergence: {first['type']}, op {first['id']}, {first['tensor']}, "
            f"step {first['step']}, relative error {first['relative_error']:.3g}."
        )
    columns = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
    body = "\n".join(_row(i, row, first) for i, row in enumerate(rows))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>amanda diff</title>'
        f"<style>{_STYLE}</style></head><body><h1>amanda diff</h1><p>{html.escape(head)}</p>"
        f"<p>{summary['agreeing']} of {summary['compared']} tensors agree within "
        f"{summary['tolerance']:g}; {len(summary['only_here'])} operators have no like in the "
        f"reference, {len(summary['only_in_reference'])} none here.</p>"
        f"{_chart(rows, summary['tolerance'])}"
        f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _row(number: int, row: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    is_first = first is not None and all(row[key] == first[key] for key in ("id", "tensor", "step"))
    kind = "first" if is_first else "" if row["agrees"] else "bad"
    texts = [row[name] for name in ("id", "type", "tensor")]
    numbers = [row["step"], row["relative_error"], row["largest_difference"]]
    cells = f'<td class="n" data-v="{number}">{number}</td>'
    cells += "".join(f"<td>{html.escape(str(text))}</td>" for text in texts)
    cells += "".join(_number(value) for value in numbers)
    return f'<tr class="{kind}">{cells}<td>{html.escape(row["note"])}</td></tr>'


def _number(value: float | None) -> str:
    shown = "-" if value is None else f"{value:.4g}"
    order = 1e308 if value is None or not math.isfinite(value) else value
    return f'<td class="n" data-v="{order!r}">{shown}</td>'


def _chart(rows: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    """The relative errors along the run, as powers of ten."""
    top = 1.0

    def height(error: float) -> float:
        power = math.log10(error) if 0 < error < math.inf else (_FLOOR if error == 0 else top)
        share = (min(max(power, _FLOOR), top) - _FLOOR) / (top - _FLOOR)
        return _HEIGHT - share * _HEIGHT

    step = _WIDTH / max(len(rows), 1)
    dots = "".join(
        f'<circle cx="{(i + 0.5) * step:.1f}" cy="{height(row["relative_error"]):.1f}" r="2" '
        f'fill="{"#2b6cb0" if row["agrees"] else "#c53030"}"><title>{html.escape(row["id"])}'
        f"</title></circle>"
        for i, row in enumerate(rows)
    )
    line = height(tolerance)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">'
        f'<line x1="0" x2="{_WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#a0aec0" '
        f'stroke-dasharray="4"/>{dots}</svg><p>Relative error along the run, from '
        f"1e{_FLOOR} to 10; dashed: the tolerance.</p>"
    )
