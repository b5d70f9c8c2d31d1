"""Amanda's plugin for PyTorch. It imports no torch."""

from __future__ import annotations

import abc
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import amanda
from amanda.interface.driver import INTERFACE_VERSION, Capability, Driver
from amanda_torch import mapping_rules

MINIMUM = (2, 13)


class TorchEagerDriver(Driver, abc.ABC):
    """PyTorch in eager mode; what can be said of the driver without importing torch."""

    name = "torch-eager"
    framework = "torch"
    mode = "eager"
    target = "amanda_torch.eager.driver:EagerDriver"
    interface_version = INTERFACE_VERSION
    capabilities = frozenset(Capability) - {Capability.STATIC_GRAPH, Capability.COMPILED}

    @classmethod
    def reason_unusable(cls) -> str:
        """Why this PyTorch cannot be instrumented; "" if it can."""
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return "PyTorch is not installed; try: pip install 'torch>=2.13'"
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if release < MINIMUM:
            return f"it needs torch>=2.13, and {version} is installed"
        return ""

    @classmethod
    def check_internals(cls) -> Sequence[str]:
        """The private symbols of PyTorch that the driver needs and this one lacks."""
        from amanda_torch import _internals

        return [f"PyTorch has no {symbol}" for symbol in _internals.missing()]

    @classmethod
    def self_test(cls) -> Sequence[str]:
        """Look at the operators of a tiny model; what went wrong, if anything."""
        problems: Sequence[str] = sys.modules[cls.loaded().__module__].self_test()
        return problems


class TorchGraphDriver(Driver, abc.ABC):
    """Compiled PyTorch; what can be said of the driver without importing torch."""

    name = "torch-graph"
    framework = "torch"
    mode = "graph"
    target = "amanda_torch.compiled.driver:GraphDriver"
    opt_in = True
    interface_version = INTERFACE_VERSION
    capabilities = frozenset(
        {
            Capability.REPLACE_OP,
            Capability.AD_IN_ROUTINES,
            Capability.MODULES,
            Capability.REPLAY,
            Capability.STATIC_GRAPH,
            Capability.COMPILED,
        }
    )

    @classmethod
    def reason_unusable(cls) -> str:
        """Why this PyTorch cannot be instrumented; "" if it can."""
        return TorchEagerDriver.reason_unusable()


@amanda.hookimpl
def amanda_register_drivers() -> Sequence[type[Driver]]:
    """The eager driver, and that for compiled functions."""
    return [TorchEagerDriver, TorchGraphDriver]


@amanda.hookimpl
def amanda_register_mapping_rules() -> Mapping[str, Sequence[Any]]:
    """Canonical types, roles and layouts for PyTorch."""
    return {"pytorch": [mapping_rules.standard]}


@amanda.hookimpl
def amanda_report_header() -> str:
    """The installed PyTorch."""
    try:
        return f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return "torch is not installed"
