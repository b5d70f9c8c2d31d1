"""The extension of amanda-torch, as it is installed."""

from __future__ import annotations

import pytest

from amanda_torch import accel
from amanda_torch.eager import gate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need the extension where it cannot be used."""
    reason = accel.refusal() or gate.reason_unusable()
    for item in items:
        if reason and item.get_closest_marker("needs_extension"):
            item.add_marker(pytest.mark.skip(reason=reason))
