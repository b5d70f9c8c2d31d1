"""The loopback driver keeps the contract."""

from amanda.testing import DriverContract
from amanda.testing.loopback import LoopbackDriver
from tests.core.functional_driver import FunctionalDriver, FunctionalToy
from tests.core.loopback_framework import FunctionalLoopback, LoopbackFramework


class TestLoopbackDriver(DriverContract):
    driver_cls = LoopbackDriver
    framework_cls = LoopbackFramework


class TestFunctionalDifferentiation(DriverContract):
    driver_cls = LoopbackDriver
    framework_cls = FunctionalLoopback


class TestFunctionalDriver(DriverContract):
    driver_cls = FunctionalDriver
    framework_cls = FunctionalToy
