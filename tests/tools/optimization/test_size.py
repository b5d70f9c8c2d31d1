"""The size of the pruning methods, beside the paper's (Table 4)."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from amanda_tools import prune

FOLDER = Path(str(prune.__file__)).parent

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def code_lines(path: Path) -> int:
    """The lines that hold code: no docstrings, no comments, no empty lines."""
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


@pytest.mark.parametrize(
    ("method", "modules", "paper"),
    [
        ("tile", ("rules", "static"), 213),
        ("nm", ("rules", "static", "files"), 279),
        ("channel", ("channel", "dynamic"), 115),
        ("activation", ("spatial", "dynamic"), 193),
        ("attention", ("attention",), 179),
    ],
)
def test_a_method_has_no_more_lines_than_the_papers(
    method: str, modules: tuple[str, ...], paper: int
) -> None:
    """What all methods share (the tool, its options) is left out, as in the paper Amanda is."""
    found = sum(code_lines(FOLDER / f"{name}.py") for name in modules)
    assert found <= paper, f"{method} has {found} lines"
    assert found > 40
