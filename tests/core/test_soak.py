"""What a soak tells to have grown."""

from __future__ import annotations

import pytest

from amanda.testing import soak


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(soak.VARIABLE, str(soak.LONG))


def test_memory_that_the_garbage_collector_does_not_know_is_told() -> None:
    """Strings that each scope leaves behind are growth: blocks of the allocator, and no objects."""
    kept: list[str] = []
    growth = soak.grow(lambda: kept.extend(f"scope {len(kept)}, {i}" for i in range(10)))
    assert growth.is_long
    # What ran in the process before may be given back meanwhile.
    assert growth.objects < 1 < 5 <= growth.blocks
    assert len(kept) == 10 * growth.scopes


def test_what_is_made_in_the_beginning_is_no_growth() -> None:
    """What the first quarter of the scopes leaves behind, and no later one, is not told."""
    kept: list[list[str]] = []

    def one_scope() -> None:
        if len(kept) < soak.LONG // 4:
            kept.append([f"scope {len(kept)}"])

    growth = soak.grow(one_scope)
    assert growth.objects < 1 > growth.blocks
