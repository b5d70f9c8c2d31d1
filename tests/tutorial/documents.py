"""Runs the Python blocks of a document and compares what they print.

A block that follows a ``python`` block and is marked ``text`` is its output; a
``python`` block without one must print nothing. Blocks share one namespace.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import attrs

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@attrs.frozen
class Block:
    """One Python block: its place, its code and what it has to print."""

    path: Path
    line: int
    code: str
    output: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"

    def run(self, namespace: ModuleType) -> str:
        """Execute the block; returns what it has printed."""
        # The empty lines make tracebacks show the document's line numbers.
        source = "\n" * (self.line - 1) + self.code
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(self.path), "exec"), vars(namespace))
        return printed.getvalue()


def blocks(document: str) -> list[Block]:
    """The Python blocks of a document, which is given by its path from the root."""
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            path=path,
            line=text.count("\n", 0, match.start("code")) + 1,
            code=match["code"],
            output=match["output"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def run_document(document: str) -> list[tuple[Block, str]]:
    """Run a whole document; each block with what it printed."""
    namespace = ModuleType("document")
    try:
        return [(block, block.run(namespace)) for block in blocks(document)]
    finally:
        sys.modules.pop("scalars", None)  # the framework of writing-a-driver.md
