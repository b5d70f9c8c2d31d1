"""What the entry point loads: the declaration of the driver. It imports no framework."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import amanda
from amanda.driver import Capability, EagerDriver

from amanda_onnx.mapping_rules import standard


class OnnxDriver(EagerDriver):
    """Declares the driver of ONNX Runtime, which is in ``driver.py``."""

    name = "onnx-nodes"
    framework = "onnxruntime"
    packages = ("onnx",)
    mode = "nodes"
    interface_version = 2
    target = "amanda_onnx.driver:OnnxNodeDriver"
    capabilities = frozenset(
        {Capability.REPLACE_OP, Capability.REPLAY, Capability.MODULES, Capability.THREADS}
    )

    @classmethod
    def reason_unusable(cls) -> str:
        """Why there is nothing to instrument; "" if there is."""
        lacking = [n for n in ("onnxruntime", "onnx") if importlib.util.find_spec(n) is None]
        return f"{' and '.join(lacking)} not installed" if lacking else ""

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """What the driver relies on and this ONNX Runtime lacks; for ``amanda doctor``."""
        from amanda_onnx._internals import problems

        return problems()


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[amanda.Driver]]:
    """The driver."""
    return [OnnxDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Rules for the contexts of its namespace."""
    return {"onnx": [standard]}
