"""The portability matrix, the paper's Table 3, as a table in Markdown.

    python -m tests.benchmarks.portability

Each cell runs one tool on the same program in one mode, and compares its result with its result in
PyTorch; the exit code is 1 if any differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from tests.tools.optimization.portability import PROGRAMS, Program
from tests.tools.optimization.portability_rows import ROWS, Cell, differences


def measured(row: str, mode: type[Program]) -> Cell:
    """Run one tool in one mode."""
    return ROWS[row](mode())


def lines(cell: Callable[[str, type[Program]], Cell] = measured) -> Iterator[tuple[str, bool]]:
    """The lines of the table, each with whether all its cells are equal."""
    yield "| | " + " | ".join(program.name for program in PROGRAMS) + " | found |", True
    yield "|---|" + "---|" * (len(PROGRAMS) + 1), True
    for name in ROWS:
        cells = [cell(name, program) for program in PROGRAMS]
        wrong = [differences(cell, cells[0]) for cell in cells]
        marks = ["differs: " + ", ".join(names) if names else "yes" for names in wrong]
        yield f"| {name} | " + " | ".join(marks) + f" | {cells[0].shown} |", not any(wrong)


def main() -> int:
    """Print the table."""
    fine = True
    for line, is_equal in lines():
        print(line, flush=True)
        fine &= is_equal
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
