"""Amanda's plugin for PyTorch. It imports no torch."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

import amanda
from amanda.interface.driver import Capability, Driver
from amanda.interface.settings import mistake
from amanda_torch import mapping_rules

MINIMUM = (2, 13)

COMPILER_VARIABLE = "AMANDA_TORCH_COMPILER"
"""The environment variable that names the compiler of captured graphs."""

COMPILERS = ("auto", "own", "eager", "inductor", "aot_eager", "aot_eager_decomp_partition")
"""The compilers that it may name, beside Dynamo backends that packages register by entry points."""


class TorchDriver(Driver, abc.ABC):
    """The properties of a driver for PyTorch that need no import of torch."""

    framework = "torch"
    # Keras may compute with PyTorch; it walks through nested structures by optree.
    packages = ("keras", "optree")
    interface_version = 2
    mesh: ClassVar[dict[str, int]] = {}
    dropped_types = frozenset(
        "alias clone contiguous detach dropout float getitem long reshape reshape_as to "
        "type".split()
    )

    @classmethod
    def reason_unusable(cls) -> str:
        """Why this PyTorch cannot be instrumented; "" if it can."""
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return "PyTorch is not installed; try: pip install 'torch>=2.13,<2.16'"
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if release < MINIMUM:
            return f"it needs torch>=2.13, and {version} is installed"
        return ""

    @classmethod
    def reason_against_settings(cls) -> str:
        """Explain an environment variable that names an unknown interceptor or compiler."""
        reason = super().reason_against_settings()
        if reason or not mistake(COMPILER_VARIABLE, COMPILERS):
            return reason
        others = {entry.name for entry in metadata.entry_points(group="torch_dynamo_backends")}
        return mistake(COMPILER_VARIABLE, (*COMPILERS, *sorted(others)))

    @classmethod
    def missing_symbols(cls) -> list[str]:
        """The private symbols of PyTorch that the driver needs and this PyTorch lacks."""
        from amanda_torch import _internals

        return _internals.missing()

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """A line for each private symbol that is missing."""
        return [f"PyTorch has no {symbol}" for symbol in cls.missing_symbols()]


class TorchEagerDriver(TorchDriver):
    """PyTorch in eager mode; the class that runs is what ``target`` names."""

    name = "torch-eager"
    mode = "eager"
    interceptors = ("auto", "gate", "mode")
    interceptor_variable = "AMANDA_TORCH_INTERCEPTOR"
    target = "amanda_torch.compiled.driver:CapturingDriver"
    capabilities = frozenset(Capability) - {Capability.STATIC_GRAPH, Capability.COMPILED}


class TorchGraphDriver(TorchDriver):
    """``torch-graph``: sees operators in compiled functions, too; used only on request."""

    name = "torch-graph"
    mode = "graph"
    target = "amanda_torch.compiled.driver:GraphDriver"
    opt_in = True
    capabilities = TorchEagerDriver.capabilities | {Capability.COMPILED}

    @classmethod
    def missing_symbols(cls) -> list[str]:
        """The missing symbols of the eager driver, whose code it shares, and of the compiler."""
        from amanda_torch import _internals

        return [*super().missing_symbols(), *_internals.missing(compiler=True)]


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[Driver]]:
    """The drivers for eager mode and for compiled functions."""
    return [TorchEagerDriver, TorchGraphDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Canonical types, roles and layouts for PyTorch."""
    return {"pytorch": [mapping_rules.standard]}
