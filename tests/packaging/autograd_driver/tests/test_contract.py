"""The driver keeps Amanda's contract."""

from amanda_autograd.adapter import Autograd
from amanda_autograd.plugin import AutogradDriver

from amanda.testing import DriverContract


class TestAutogradDriver(DriverContract):
    driver_cls = AutogradDriver
    framework_cls = Autograd
