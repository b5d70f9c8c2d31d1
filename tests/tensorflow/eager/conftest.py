"""The tests of the eager driver run twice: with the accelerator, and with Python alone."""

from __future__ import annotations

import pytest

from amanda_tensorflow.plugin import TensorFlowEagerDriver


@pytest.fixture(autouse=True, params=["auto", "off"], ids=["with-accelerator", "without"])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is asked of the accelerator."""
    asked: str = request.param
    if asked == "auto":
        # TensorFlow is imported by the tests only.
        from amanda_tensorflow.eager.accelerator import reason_unusable

        if reason := reason_unusable():
            pytest.skip(reason)
    monkeypatch.setenv(TensorFlowEagerDriver.accelerator_variable, asked)
    return asked
