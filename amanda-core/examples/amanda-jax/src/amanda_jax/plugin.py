"""What the entry points load: the declaration of the driver. It imports no framework."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import amanda
from amanda.driver import Capability, EagerDriver

from amanda_jax.mapping_rules import standard

ATTACHED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The drivers that are attached."""


class JaxDriver(EagerDriver):
    """Declares the driver of JAX, which is in ``driver.py``."""

    name = "jax-eager"
    framework = "jax"
    packages = ("flax", "equinox", "optax")
    mode = "eager"
    interface_version = 2
    target = "amanda_jax.driver:JaxEagerDriver"
    capabilities = frozenset(Capability) - {
        Capability.COMPILED,
        Capability.IN_PLACE,
        Capability.STATIC_GRAPH,
    }

    @classmethod
    def reason_unusable(cls) -> str:
        """Why there is nothing to instrument; "" if there is."""
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed"
        version = importlib.metadata.version("jax")
        if version.startswith(("0.10.", "0.11.")):
            return ""
        return f"jax {version} is not supported, only 0.10 and 0.11"

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """The private symbols that the driver needs and this JAX lacks; for ``amanda doctor``."""
        try:
            from amanda_jax._internals import problems
        except (ImportError, AttributeError) as error:
            return [str(error)]
        return problems()


def library_imported() -> None:
    """See the modules of a library that has been imported within a scope."""
    for driver in tuple(ATTACHED):
        driver.patch_modules()


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[amanda.Driver]]:
    """The driver."""
    return [JaxDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Rules for the contexts of its namespace."""
    return {"jax": [standard]}
