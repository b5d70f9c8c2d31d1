"""The extension of amanda-torch, as it is installed."""

from __future__ import annotations

import os

import pytest

from amanda_torch import accel
from amanda_torch.eager import gate
from amanda_torch.plugin import TorchEagerDriver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need the extension where it cannot be used, unless it is asked for."""
    reason = accel.refusal() or gate.reason_unusable()
    if reason and os.environ.get(TorchEagerDriver.interceptor_variable) == "gate":
        raise pytest.UsageError(f"the gate cannot be used: {reason}")
    for item in items:
        if reason and item.get_closest_marker("needs_extension"):
            item.add_marker(pytest.mark.skip(reason=reason))
