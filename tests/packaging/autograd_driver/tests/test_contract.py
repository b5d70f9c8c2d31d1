"""The driver keeps Amanda's contract."""

from amanda.testing import DriverContract

from amanda_autograd.adapter import Autograd
from amanda_autograd.plugin import AutogradDriver


class TestAutogradDriver(DriverContract):
    driver_cls = AutogradDriver
    framework_cls = Autograd
