"""What the package registers. It is loaded with every use of Amanda: it imports no framework."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import amanda
from amanda.interface.driver import Capability, Driver


class MinigradDriver(Driver, abc.ABC):
    """minigrad; what can be said of the driver without importing the framework."""

    name = "minigrad-eager"
    framework = "minigrad"
    # A number, not amanda.interface.driver.INTERFACE_VERSION: it says what this code was written for.
    interface_version = 1
    # The contract kit skips the tests of what is not here, and says so.
    capabilities = frozenset(
        {
            Capability.BACKWARD,
            Capability.REPLACE_OP,
            Capability.REPLACE_BACKWARD_OP,
            Capability.AD_IN_ROUTINES,
            Capability.USER_OPS,
            Capability.THREADS,
            Capability.REPLAY,
        }
    )

    @classmethod
    def create(cls) -> Any:
        """The driver itself, which imports the framework."""
        from amanda_minigrad.driver import EagerDriver

        return super(MinigradDriver, EagerDriver).create()

    @classmethod
    def reason_unusable(cls) -> str:
        """Why there is nothing to instrument; "" if there is."""
        if importlib.util.find_spec("minigrad") is None:
            return "minigrad is not installed"
        return ""

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """What the driver patches and this minigrad has not; for ``amanda doctor``."""
        import minigrad

        return [
            f"minigrad has no {name}"
            for name in ("execute", "run_graph", "Node")
            if not hasattr(minigrad, name)
        ]

    @classmethod
    def self_test(cls) -> Sequence[str]:
        """What goes wrong with one operator; for ``amanda doctor``."""
        from amanda_minigrad.self_test import problems

        return problems(cls)


def standard(context: amanda.OpContext) -> None:
    """Translate an operator into the words that tools for all frameworks know."""
    name = context.get_op().__name__
    context["op_type"] = name
    if name == "linear":
        context["weight_index"], context["bias_index"] = 1, 2
        context["weight_layout"] = "OI"
    if context.is_backward():
        context["backward_op_type"] = context.get_backward_op().__name__


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[Driver]]:
    """The driver."""
    return [MinigradDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Rules for the contexts of its namespace."""
    return {"minigrad": [standard]}
