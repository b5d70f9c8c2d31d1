"""The CUDA device that the process uses: its memory, and the end of its work.

``device_bytes()`` is 0, and ``synchronize()`` does nothing, as long as no device is in use.
"""

from __future__ import annotations

import sys


def device_bytes() -> int:
    """Return the bytes of tensors on the current CUDA device; 0 if none is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())


def synchronize() -> None:
    """Wait until the CUDA device in use has finished its queued work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def allocator_peaks() -> dict[str, dict[str, int]]:
    """Return the largest bytes of tensors on each device in use since the program began, or has
    set them back, and those that the framework has reserved; none for main memory."""
    found: dict[str, dict[str, int]] = {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            peaks = (torch.cuda.max_memory_allocated(i), torch.cuda.max_memory_reserved(i))
            found[f"cuda:{i}"] = dict(zip(("peak", "reserved"), peaks, strict=True))
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        for device in tensorflow.config.list_logical_devices("GPU"):
            peak = tensorflow.config.experimental.get_memory_info(device.name)["peak"]
            found[device.name] = {"peak": int(peak)}
    return found
