"""The driver keeps Amanda's contract; tests of capabilities that it has not are skipped."""

from amanda.testing import DriverContract

from amanda_minigrad.adapter import Minigrad
from amanda_minigrad.plugin import MinigradDriver


class TestMinigradDriver(DriverContract):
    driver_cls = MinigradDriver
    framework_cls = Minigrad
