"""``quantize``: simulated quantization: after training, at run time, and in training."""

from amanda_tools.quantize.options import QuantizeOptions
from amanda_tools.quantize.sensitivity import Sensitivity
from amanda_tools.quantize.tool import QuantizeTool

__all__ = ["QuantizeOptions", "QuantizeTool", "Sensitivity"]
