"""The tables of amanda-core/docs/programs.md: a line for each program, with versions."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs.comparison import Result
from tests.programs.processes import Row

DOCUMENT = Path(__file__).parents[2] / "amanda-core" / "docs" / "programs.md"

_HEAD = "| program | packages | operators, forward + backward | differences |\n|---|---|---|---|"


def line(row: Row) -> str:
    """One line of the table."""
    names = ", ".join(f"{name} {number}" for name, number in row.versions().items())
    cells = [f"`{row.program.name}`", names]
    if row.result is None:
        cells += ["", "failed"]
    else:
        counts = f"{row.result.forward:,} + {row.result.backward:,}"
        missing = [f"{n:,} {reason}" for reason, n in row.result.not_seen.items()]
        cells.append(f"{counts}; not seen: {', '.join(missing)}" if missing else counts)
        watched, identity = (_verdict(row.result, run) for run in ("count,flops", "identity"))
        found = watched, identity and f"identity: {identity}"
        cells.append("; ".join(filter(None, found)))
    return "| " + " | ".join(cells) + " |"


def _verdict(result: Result, run: str) -> str:
    """What differs in one comparison; empty if all values are identical."""
    if "vanilla after" in result.differing:
        known = "vanilla again" in result.differing
        return f"**{'not deterministic' if known else 'vanilla differs afterwards'}**"
    if run in result.differing:
        return f"**{len(result.differing[run])} values differ**"
    if run == "count,flops" and result.fused:
        return f"fused: {result.fused} differ, by {result.fused_error:.0e} at most"
    return ""


def write(row: Row) -> None:
    """Put the line of a program into the document, in place of an older one."""
    text = DOCUMENT.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {row.program.framework} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    found = pattern.search(text)
    if found is None:
        raise ValueError(f"{DOCUMENT} has no place for {row.program.framework}")
    name = f"| `{row.program.name}` |"
    old = [old for old in found[2].splitlines() if old.startswith("| `")]
    lines = sorted([line(row), *(other for other in old if not other.startswith(name))])
    section = f"{found[1]}{_HEAD}\n" + "\n".join(lines) + f"\n{found[3]}"
    DOCUMENT.write_text(text[: found.start()] + section + text[found.end() :], encoding="utf-8")
