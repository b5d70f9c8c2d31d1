"""Settings of the tests of amanda-tensorflow, made before TensorFlow is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes side by side; the executor keeps several threads for whole operators.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")


@pytest.fixture
def without_optimizer() -> Iterator[None]:
    """No graph optimizer, in functions and in sessions that are made within."""
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    restored = {"disable_meta_optimizer": False, **before}
    tf.config.optimizer.set_experimental_options(restored)
