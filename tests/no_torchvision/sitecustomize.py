"""On PYTHONPATH, this makes a Python process find no torchvision.

The example runs where torchvision is not installed. The tests' environment has one,
whose C operators do not load beside a CPU build of PyTorch (tests/torchvision_ops.py).
"""

import sys

sys.modules["torchvision"] = None  # type: ignore[assignment]
