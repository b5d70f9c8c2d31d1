"""The tools' locks, where a fork or an interrupt comes while they are held."""

from __future__ import annotations

from pathlib import Path

import amanda_tools

SOURCES = sorted(Path(amanda_tools.__file__).parent.rglob("*.py"))


def test_all_locks_are_of_core() -> None:
    """A lock of the tools is one that neither an interrupt nor a fork leaves taken."""
    kinds = ("threading.Lock(", "threading.RLock(", "threading.Condition(", "Semaphore(")
    found = [path.name for path in SOURCES if any(kind in path.read_text() for kind in kinds)]
    assert found == []
