"""Fixtures of the tools' tests."""

from __future__ import annotations

import pytest

from amanda_tools._operators import op_table


@pytest.fixture
def restored_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a test adds to the table of operators are gone after it."""
    for name in "_FORWARD", "_BACKWARD":
        monkeypatch.setattr(op_table, name, dict(getattr(op_table, name)))
