"""The drivers that run compiled functions as Dynamo captures them.

Both are the eager driver. A function or module made by ``torch.compile`` is captured once more, for
Amanda. The captured graphs run operator by operator, with the ids, the actions and the backward
operators of eager mode::

    with amanda.apply(tool):
        compiled(x)

``torch-graph``, which is used only on request, does not warn about it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from amanda.errors import CapabilityError
from amanda.interface.namespace import Namespace
from amanda.interface.points import Point
from amanda.interface.proofs import Proof
from amanda.registry.proofs import is_proving
from amanda.state import ATTACHED
from amanda_torch import _internals
from amanda_torch.compiled import proofs
from amanda_torch.compiled.capture import callback_for, say_captured
from amanda_torch.compiled.compilers import AUTO, asked_compiler
from amanda_torch.compiled.deferred import is_marked_deferrable
from amanda_torch.driver import namespace_of
from amanda_torch.eager.driver import InterceptingDriver
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.plugin import TorchGraphDriver


class CapturingDriver(InterceptingDriver):
    """Instruments the captured graphs of compiled functions, and all other code eagerly."""

    mode_of_graphs = "graph"

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._has_said = False
        # Asked for each operator that is new, and the environment answers slowly.
        is_eager = asked_compiler() in (AUTO, "eager")
        mode = "eager" if is_eager else self.mode_of_graphs
        self._namespace = namespace_of(torch.__version__, mode)

    @property
    def namespace(self) -> Namespace:
        """The mode is ``eager`` where operators run one by one, and ``graph`` with a compiler."""
        return self._namespace

    def capture_compiled(self, callback: Any, interceptor: Interceptor) -> Any:
        """See :mod:`amanda_torch.compiled.capture`."""
        marks = interceptor.tells_modules
        if interceptor.stale:
            marks = self.dispatcher.points.wants_modules(self.dispatcher.scopes())
        reason = self._reason_against(interceptor, marks)
        if reason:
            return reason
        return callback_for(callback, self._tracers.suspended, self._say_captured, marks)

    def _say_captured(self, compiler: Any, reason: str) -> None:
        """Warn, once, that a graph runs operator by operator."""
        if not (self._has_said or is_proving()):
            self._has_said = True
            say_captured(compiler, reason)

    def _reason_against(self, interceptor: Interceptor, marks: bool) -> str:
        """The reason why a function cannot be captured now; "" if it can.

        Args:
            marks: True to capture the calls of modules, too.
        """
        if not interceptor.is_alone():
            # Dynamo would write another function mode into the graph, which would act twice.
            return "another TorchFunctionMode is on"
        if _internals.has_global_hooks():
            # Dispatch modes of a tool must not be captured; with those of the program functions run
            # eagerly.
            return "there are hooks on all modules"
        if marks and not self._defers_modules():
            return "a tool has routines at modules that are not deferrable"
        return _missing_said()

    def _defers_modules(self) -> bool:
        """True if all routines at modules may be called when compiled code has run."""
        points = Point.MODULE_ENTRY, Point.MODULE_EXIT
        found = [
            one for s in self.dispatcher.scopes() for p in points for _, one in s.routines_at(p)
        ]
        return all(map(is_marked_deferrable, found))


class GraphDriver(TorchGraphDriver, CapturingDriver):
    """``torch-graph``, the driver that a program chooses by name."""

    takes_gate = False

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._has_said = True

    def attach(self) -> None:
        """Attach in place of the eager driver.

        Raises:
            CapabilityError: the eager driver is attached.
        """
        for driver in tuple(ATTACHED.values()):
            if isinstance(driver, InterceptingDriver):
                raise CapabilityError(
                    f"torch-graph sees all that {driver.name} sees, which is in use already: "
                    "apply all tools with one of the two drivers"
                )
        super().attach()

    @classmethod
    def remarks(cls) -> Sequence[str]:
        """No remarks: the interceptor cannot be chosen."""
        return []

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """See :mod:`amanda_torch.compiled.proofs`."""
        return [proofs.proof()]


@functools.cache
def _missing_said() -> str:
    gone = _internals.missing(compiler=True)
    return f"PyTorch has no {', '.join(gone)}" if gone else ""
