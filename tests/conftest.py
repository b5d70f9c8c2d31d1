"""Settings of all tests. Nothing here imports a framework."""

from __future__ import annotations

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background like that, and programs that are
    # interrupted by a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes side by side, each with a thread per core, would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
