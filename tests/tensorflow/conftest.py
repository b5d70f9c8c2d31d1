"""Settings of the tests of amanda-tensorflow, made before TensorFlow is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes side by side; the executor keeps several threads for whole operators.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
