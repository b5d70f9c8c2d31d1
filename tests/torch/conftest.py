"""Every test here leaves PyTorch as it found it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator

import pytest
import torch

from amanda.state import ATTACHED, LIVE_SCOPES, STATE
from amanda_torch.eager.gate import reason_unusable
from amanda_torch.plugin import TorchEagerDriver
from tests.torch.support import dynamos, framework_state, ours

torch.set_num_threads(1)
# Its import, which PyTorch puts off, changes some of PyTorch's own functions.
importlib.import_module("torch._dynamo")
# What it says holds for the process; a test may let its self-test fail.
REASON = reason_unusable()
USES_GATE = pytest.mark.skipif(bool(REASON), reason=f"the gate is not used here: {REASON}")


@pytest.fixture(params=["mode", pytest.param("gate", marks=USES_GATE)])
def interceptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the mode and, where it is used, with the gate."""
    monkeypatch.setenv(TorchEagerDriver.interceptor_variable, request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def _vanilla_afterwards() -> Iterator[None]:
    """After a test, nothing of ours is left in PyTorch or in the threads' start."""
    torch.manual_seed(0)
    before, start = framework_state(), threading.Thread.start
    yield
    after = framework_state()
    # Submodules that are imported lazily, and what Dynamo replaces, are PyTorch's own doing.
    changed = [k for k in before if before[k] != after.get(k) and not dynamos(*k)]
    assert not changed
    added = [k for k in after.keys() - before.keys() if ours(*k)]
    assert not added
    assert not LIVE_SCOPES
    assert not ATTACHED
    assert STATE.scopes == ()
    assert threading.Thread.start is start
