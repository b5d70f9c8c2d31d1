"""The lines of tools are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import lines


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row of the paper's Table 4, and whole tools, with at least one line each."""
    assert lines.main() == 0
    printed = capsys.readouterr().out
    for entry in (*lines.TABLE_4, *lines.OTHERS):
        assert entry.name in printed
        assert all(lines.files_of(name) for name in entry.modules)
        assert entry.lines() > 0


def test_only_code_is_counted(tmp_path: Path) -> None:
    """Documentation, comments and empty lines are not code; a call over two lines is two."""
    path = tmp_path / "example.py"
    path.write_text('"""Says."""\n\n# Why.\nx = max(\n    1, 2)  # both\n"""More."""\n')
    assert lines.code_lines(path) == 2
