"""The driver keeps Amanda's contract; tests of capabilities that it has not are skipped."""

from amanda.testing import DriverContract

from amanda_onnx.adapter import Onnx
from amanda_onnx.plugin import OnnxDriver


class TestOnnxDriver(DriverContract):
    driver_cls = OnnxDriver
    framework_cls = Onnx
