"""The TensorFlow drivers keep the contract, each in the ways to run its mode."""

from __future__ import annotations

from amanda.testing import DriverContract
from amanda_tensorflow.plugin import (
    TensorFlowEagerDriver,
    TensorFlowFunctionDriver,
    TensorFlowGraphDriver,
)
from tests.tensorflow import adapters


class TestEager(DriverContract):
    driver_cls = TensorFlowEagerDriver
    framework_cls = adapters.EagerTensorFlow


class TestTapeInside(DriverContract):
    driver_cls = TensorFlowFunctionDriver
    framework_cls = adapters.TapeInside


class TestTapeOutside(DriverContract):
    driver_cls = TensorFlowFunctionDriver
    framework_cls = adapters.TapeOutside


class TestSession(DriverContract):
    driver_cls = TensorFlowGraphDriver
    framework_cls = adapters.SessionFramework
