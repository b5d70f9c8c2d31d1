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
