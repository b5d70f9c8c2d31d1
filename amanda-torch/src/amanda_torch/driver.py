"""The base class of both drivers, in a module that imports torch: namespace, attaching, tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import amanda
from amanda.errors import CapabilityError
from amanda.interface.driver import ExportedNode, ThreadSwitches
from amanda.interface.namespace import Namespace
from amanda.state import STATE, unwind
from amanda_torch import _internals, exported
from amanda_torch.plugin import TorchDriver

TESTED = ("2.13.0", "2.14.1", "2.15.0")
"""The releases of PyTorch that are tested (README.md)."""

_RELEASE = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cpu|cu\d+))?")
"""A release in PyTorch's builds for the CPU and for CUDA."""


class _NoGradients:
    """``torch.no_grad()`` with a quarter of its Python frames: analyses of each new operator run
    in it."""

    __slots__ = ("_mark",)

    def __enter__(self) -> None:
        undo = STATE.undo
        self._mark = len(undo)
        undo.append((_internals.set_grad_enabled, (torch.is_grad_enabled(),)))
        _internals.set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        unwind(STATE.undo, self._mark)


@functools.cache
def namespace_of(version: str, mode: str) -> Namespace:
    """The namespace of an execution mode, which the contexts of all its operators share."""
    return Namespace(f"pytorch/{'.'.join(version.split('.')[:2])}/{mode}")


class LoadedDriver(TorchDriver):
    """A driver for PyTorch that can be attached."""

    thread_switches = ThreadSwitches(
        is_recording=torch.is_grad_enabled,
        set_recording=_internals.set_grad_enabled,
        mode_depth=_internals.mode_depth,
        leave_modes=_internals.leave_modes,
    )

    @property
    def namespace(self) -> Namespace:
        """``pytorch/<major>.<minor>/<mode>``."""
        return namespace_of(torch.__version__, self.mode)

    @classmethod
    def untested_version(cls) -> str:
        """The version of an untested PyTorch; "" for a tested release, for the CPU or CUDA."""
        found = _RELEASE.fullmatch(torch.__version__)
        return "" if found and found[1] in TESTED else f"PyTorch {torch.__version__}"

    def attach(self) -> None:
        """Check PyTorch's private symbols, then make the patches.

        Raises:
            CapabilityError: this PyTorch lacks a private symbol; it is named.
        """
        # A compiled function may open the scope: Dynamo (2.13) would fail on the following code.
        uncompiled = _internals.Uncompiled()
        uncompiled.begin()
        try:
            self._attach()
        finally:
            uncompiled.end()

    def _attach(self) -> None:
        gone = self.missing_symbols()
        if gone:
            raise CapabilityError(
                f"PyTorch {torch.__version__} has no {', '.join(gone)}, which amanda-torch "
                f"{amanda.__version__} needs; install a release of amanda-torch for it"
            )
        super().attach()

    def ad_isolated(self) -> AbstractContextManager[Any]:
        """A context in which no gradient is recorded, as ``torch.no_grad()``."""
        return _NoGradients()

    def exported_nodes(
        self, target: Any, modules: Collection[str]
    ) -> Sequence[ExportedNode] | None:
        """The nodes of a program of ``torch.export`` or ``torch.onnx``, or of its file."""
        return exported.nodes_of(target)

    def is_tensor(self, value: Any) -> bool:
        """True if `value` is a ``torch.Tensor``."""
        return isinstance(value, torch.Tensor)
