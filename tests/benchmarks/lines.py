"""Lines of code of each tool, beside the paper's Table 4.

    python -m tests.benchmarks.lines

Lines that hold code are counted: no documentation, no comments, no empty lines. A method of
``prune`` is those modules that it needs and that not all methods need: the tool and its options are
left out, as the paper leaves Amanda out.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

import amanda_tools

FOLDER = Path(str(amanda_tools.__file__)).parent

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@attrs.frozen
class Entry:
    """A tool, or a method of one.

    Attributes:
        name: as the table calls it.
        modules: where its code is, below the tools' package.
        paper: lines of the paper's tool; None where its Table 4 has none.
        project: lines of the project that the paper compares with.
    """

    name: str
    modules: Sequence[str]
    paper: int | None = None
    project: int | None = None

    def lines(self) -> int:
        """Count the lines that hold its code."""
        return sum(code_lines(path) for name in self.modules for path in files_of(name))


TABLE_4 = (
    Entry("prune: tile", ("prune/rules", "prune/static"), 213, 1203),
    Entry("prune: channel", ("prune/channel", "prune/dynamic"), 115, 387),
    Entry("prune: activation", ("prune/spatial", "prune/dynamic"), 193, 650),
    Entry("prune: attention", ("prune/attention",), 179, 1105),
    Entry("prune: nm", ("prune/rules", "prune/static", "prune/files"), 279, 499),
)
"""The rows of the paper's Table 4."""

OTHERS = tuple(
    Entry(name, (name,))
    for name in ("prune", "quantize", "inject", "remat", "path", "flops", "profile", "stats", "nan")
)
"""Whole tools, with all their methods, options, files and tables."""


def files_of(name: str) -> list[Path]:
    """The files of a module or of a package, given below the tools' package."""
    folder = FOLDER / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no docstrings, no comments, no empty lines."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def table(entries: Iterable[Entry]) -> str:
    """Format a table: lines of each entry, of the paper's tool, and of the project it replaces."""
    rows = [f"{'tool':20} {'lines':>7} {'paper':>7} {'project':>9}"]
    for entry in entries:
        paper, project = (str(n) if n is not None else "-" for n in (entry.paper, entry.project))
        rows.append(f"{entry.name:20} {entry.lines():>7} {paper:>7} {project:>9}")
    return "\n".join(rows)


def main() -> int:
    """Print both tables."""
    print(table(TABLE_4))
    print(f"\nwhole tools\n{table(OTHERS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
