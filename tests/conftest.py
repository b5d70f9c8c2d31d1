"""Settings of all tests. Nothing here imports a framework."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import hypothesis  # before a freeze: it looks for the referrers of objects, which frozen ones lack
import pytest

# A deadline is a timed assertion: 200 ms are over where other work runs.
hypothesis.settings.register_profile("amanda", deadline=None)
hypothesis.settings.load_profile("amanda")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background like that, and programs that are
    # interrupted by a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes side by side, each with a thread per core, would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("COLUMNS", None)  # 80, for which tables would be cut
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def pytest_collection_finish() -> None:
    """Take what the imports have made, which lives as long as the process, out of the garbage
    collector's work: tests that ask what is left call it often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_driver_has_been_left_out() -> Iterator[None]:
    """A driver that fails is left out for the rest of the process. The test in which it does so
    tells why; the tests after it have the driver again."""
    yield
    state = sys.modules.get("amanda.state")
    if state is not None:
        failed = {cls.__name__: reason for cls, reason in state.FAILED.items()}
        state.FAILED.clear()
        assert not failed
