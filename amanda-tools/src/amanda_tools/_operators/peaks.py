"""The peak performance of devices, for the share of it that a model uses.

``peak_of("NVIDIA H100 80GB HBM3")`` gives TFLOP/s; 0.0 for a device that is not in the table.
"""

from __future__ import annotations

from amanda_tools._internals import cuda_device_name

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
    """Return the peak of the CUDA device that the program uses, in TFLOP/s; 0.0 if unknown."""
    return peak_of(cuda_device_name())


def peak_of(name: str) -> float:
    """Return the peak of a device by its name, in TFLOP/s; 0.0 if unknown."""
    words = name.replace("-", " ").split()
    fitting = [part for part in PEAKS if set(part.split()) <= set(words)]
    return PEAKS[max(fitting, key=len)] if fitting else 0.0
