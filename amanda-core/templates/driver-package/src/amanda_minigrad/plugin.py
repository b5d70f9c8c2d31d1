"""What the entry point loads: it says which driver there is, and imports no framework."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import amanda
from amanda.driver import Capability, EagerDriver


class MinigradDriver(EagerDriver):
    """Declares the driver of minigrad, which is in ``driver.py``."""

    name = "minigrad-eager"
    framework = "minigrad"
    mode = "eager"
    interface_version = 2
    target = "amanda_minigrad.driver:MinigradEagerDriver"
    capabilities = frozenset(Capability) - {
        Capability.COMPILED,
        Capability.IN_PLACE,
        Capability.MODULES,
        Capability.SECOND_ORDER,
        Capability.STATIC_GRAPH,
    }

    @classmethod
    def reason_unusable(cls) -> str:
        """Why there is nothing to instrument; "" if there is."""
        return "" if importlib.util.find_spec("minigrad") else "minigrad is not installed"

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """The names that the driver patches and this minigrad lacks; for ``amanda doctor``."""
        import minigrad

        patched = ("execute", "run_graph", "Node")
        return [f"minigrad has no {name}" for name in patched if not hasattr(minigrad, name)]


def standard(context: amanda.OpContext) -> None:
    """Translate an operator into the vocabulary of tools for all frameworks."""
    name = context.get_op().__name__
    context["op_type"] = name
    if name == "linear":
        context["weight_index"], context["bias_index"] = 1, 2
        context["weight_layout"] = "OI"
    if context.is_backward():
        context["backward_op_type"] = context.get_backward_op().__name__


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[amanda.Driver]]:
    """The driver."""
    return [MinigradDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Rules for the contexts of its namespace."""
    return {"minigrad": [standard]}
