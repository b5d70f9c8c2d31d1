"""The declaration of the driver and its mapping rules; it imports no framework."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import amanda
from amanda.driver import Capability, EagerDriver


class AutogradDriver(EagerDriver):
    """Declares the driver of autograd, which is in ``driver.py``."""

    name = "autograd-eager"
    framework = "autograd"
    mode = "eager"
    interface_version = 2
    target = "amanda_autograd.driver:AutogradEagerDriver"
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
    def reason_unusable(cls) -> str:
        """Why there is nothing to instrument; "" if there is."""
        return "" if importlib.util.find_spec("autograd") else "autograd is not installed"

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """What the driver relies on and this autograd lacks; for ``amanda doctor``."""
        import autograd.numpy as anp

        from amanda_autograd._internals import PRIMITIVE

        operators = {name: getattr(anp, name) for name in ("multiply", "dot", "reshape")}
        return [
            f"{name} is no closure of the function that add is one of"
            for name, operator in operators.items()
            if getattr(operator, "__code__", None) is not PRIMITIVE
        ]


def standard(context: amanda.OpContext) -> None:
    """Give NumPy's operators the names that tools for all frameworks know."""
    name = context.get_op().__name__
    context["op_type"] = {"dot": "matmul", "multiply": "mul", "subtract": "sub"}.get(name, name)


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Rules for the contexts of its namespace."""
    return {"autograd": [standard]}


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[amanda.Driver]]:
    """The driver."""
    return [AutogradDriver]
