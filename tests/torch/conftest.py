"""Every test here leaves PyTorch as it found it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from amanda import _state
from tests.torch.support import framework_state

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _vanilla_afterwards() -> Iterator[None]:
    """After a test, nothing of ours is left in PyTorch or in the threads' start."""
    torch.manual_seed(0)
    before, start = framework_state(), threading.Thread.start
    yield
    after = framework_state()
    changed = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    # Submodules that a test imports lazily are PyTorch's own doing.
    assert not [k for k in changed if k in before], changed
    assert not _state.LIVE_SCOPES
    assert not _state.ATTACHED
    assert _state.STATE.scopes == ()
    assert threading.Thread.start is start
