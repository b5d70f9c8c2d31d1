"""The interceptor of tests that are about the gate alone."""

from __future__ import annotations

import pytest

from tests.torch.gate.programs import VARIABLE


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are noticed by the gate."""
    monkeypatch.setenv(VARIABLE, "gate")
