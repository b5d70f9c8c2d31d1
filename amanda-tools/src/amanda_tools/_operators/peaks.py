"""The peak performance of devices, for the share of it that a model uses."""

from __future__ import annotations

import sys

PEAKS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "L40S": 362.0,
    "A100": 312.0,
    "A10": 125.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
}
"""TFLOP/s of dense 16-bit matrix products with tensor cores, from NVIDIA's data sheets, by a part
of the device's name. Of several parts that fit the longest counts."""


def peak_of_device() -> float:
    """The peak of the CUDA device that the program uses, in TFLOP/s; 0.0 if it is not known."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    return peak_of(torch.cuda.get_device_name())


def peak_of(name: str) -> float:
    """The peak of a device by its name, in TFLOP/s; 0.0 if it is not known."""
    words = name.replace("-", " ").split()
    fitting = [part for part in PEAKS if set(part.split()) <= set(words)]
    return PEAKS[max(fitting, key=len)] if fitting else 0.0
