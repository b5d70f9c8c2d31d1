"""For authors of drivers and tools: the contract kit and the loopback framework.

Needs pytest, the extra ``testing``, except for ``amanda.testing.loopback``.

Attributes:
    DriverContract: base class of a driver's tests; see :mod:`amanda.testing.contract`.
    Framework: base class of adapters, which make tensors and programs for the tests.
    requires: marks a contract test with the capabilities that it needs.
"""

import sys
from typing import Any

_KIT = {"DriverContract": "contract", "Framework": "framework", "requires": "framework"}

# Assertions are rewritten only in modules that are imported later, and only
# by a running pytest.
if sys.modules.get("pytest"):
    sys.modules["pytest"].register_assert_rewrite("amanda.testing.contract")


def __getattr__(name: str) -> Any:
    # The kit needs pytest; the loopback framework does not.
    if name not in _KIT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_KIT[name]}"), name)


__all__ = ["DriverContract", "Framework", "requires"]
