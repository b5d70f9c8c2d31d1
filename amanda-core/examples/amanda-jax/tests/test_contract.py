"""The driver keeps Amanda's contract; tests of capabilities that it has not are skipped."""

from __future__ import annotations

from amanda.testing import DriverContract

from amanda_jax.adapter import Jax
from amanda_jax.plugin import JaxDriver


class TestJaxDriver(DriverContract):
    driver_cls = JaxDriver
    framework_cls = Jax
