"""Calls of modules: they determine the paths of operators, and are reported to tools with routines
at modules."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amanda.engine.dispatch import Dispatcher
from amanda.interface.points import Point
from amanda.python.patching import PatchSet, named_as
from amanda.state import Lock
from amanda_torch import _internals
from amanda_torch.eager.fused_modules import FUSED
from amanda_torch.eager.interceptors import LOCAL, Interceptor
from amanda_torch.eager.keras_layers import is_symbolic
from amanda_torch.eager.module_frames import Frame
from amanda_torch.eager.op_ids import Tracker
from amanda_torch.operators.calls import tensors_in

_graph_task = _internals.graph_task
_is_grad_enabled = torch.is_grad_enabled


class VanillaCall:
    """A call of a module without anything before or after it.

    Attributes:
        run: the function to call with the arguments of the module.
        result: its return value, to be set by the caller.
    """

    __slots__ = ("result", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.result: Any = None

    def __enter__(self) -> VanillaCall:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class NamedCall(VanillaCall):
    """A call of a module that gives the operators in it their path.

    Attributes:
        parent: the frame of the calling module.
    """

    __slots__ = ("_module", "_tracker", "parent")

    def __init__(self, run: Callable[..., Any], tracker: Tracker, module: nn.Module) -> None:
        # As in the base class, without the call: at each call of a module.
        self.run, self.result = run, None
        self._tracker = tracker
        # A wrapper that PyTorch calls, if ids name the module in it.
        self._module = module
        self.parent: Frame = tracker.frame

    def __enter__(self) -> NamedCall:
        self.parent = self._tracker.enter_module(self._module)
        return self

    def __exit__(self, *raised: object) -> None:
        tracker, frame = self._tracker, self._tracker.frame
        if frame is not self.parent:
            frame.caller = None
            tracker.frame, tracker.cells = self.parent, self.parent.cells


class ReportedCall(NamedCall):
    """A call of a module that is an outermost one, or is reported to tools.

    Args:
        inputs: the arguments of the module.
    """

    __slots__ = ("_dispatcher", "_frame", "_has_begun", "_inputs", "_scopes", "_tells")

    def __init__(
        self,
        run: Callable[..., Any],
        tracker: Tracker,
        module: nn.Module,
        dispatcher: Dispatcher,
        inputs: Sequence[Any],
    ) -> None:
        super().__init__(run, tracker, module)
        self._dispatcher = dispatcher
        self._inputs = inputs
        self._scopes: Sequence[Any] = ()
        self._frame: Frame = tracker.frame
        self._has_begun = self._tells = False

    def __enter__(self) -> ReportedCall:
        tracker = self._tracker
        # Recomputation by a checkpoint in a backward pass is not a forward pass.
        is_outermost = tracker.frame.phase is not None and _graph_task() == -1
        super().__enter__()
        self._frame = tracker.frame
        if self._frame is self.parent or is_symbolic(self._module, self._inputs):
            # A wrapper that leaves no trace, in which the module is the outermost one; or no call
            # of the program.
            return self
        try:
            self._begin(is_outermost)
        except BaseException:
            # A routine at the entry has raised: the forward pass and the call end for tools.
            self._end(None)
            raise
        return self

    def _begin(self, is_outermost: bool) -> None:
        tracker, module = self._tracker, self._module
        # The scopes of the last look-up, unless something has changed since.
        self._scopes = self._dispatcher.scopes() if tracker.stale else tracker.active
        if is_outermost:
            trains = _is_grad_enabled() and getattr(module, "training", True)
            points, path = self._dispatcher.points, self._frame.path
            self._scopes = points.forward_begins(self._scopes, path, trains, facts=self._facts)
            self._has_begun = True
        if tracker.tells_modules:
            self._tell(Point.MODULE_ENTRY)
            self._tells = True

    def __exit__(self, *raised: object) -> None:
        outputs = None
        try:
            if raised[0] is None and (self._has_begun or self._tells):
                outputs = tensors_in(self.result)
            if self._tells:
                self._tell(Point.MODULE_EXIT, outputs)
        finally:
            self._end(outputs)

    def _end(self, outputs: Sequence[Any] | None) -> None:
        """End the forward pass, also where a routine at the exit has raised, and leave the module.

        Args:
            outputs: the tensors that the module has returned; None if it has raised.
        """
        try:
            if self._has_begun:
                self._tracker.note_results(outputs or ())
                told, facts = (self._scopes, self._frame.path), {"outputs": outputs}
                self._dispatcher.points.forward_ends(*told, outputs is None, facts)
        finally:
            super().__exit__()

    def _facts(self) -> Mapping[str, Any]:
        entered = self._frame.module
        target = self._module if entered is None else entered()
        return {"target": target, "inputs": tensors_in(self._inputs)}

    def _tell(self, point: Point, outputs: Sequence[Any] | None = None) -> None:
        self._dispatcher.points.module(
            self._scopes,
            point,
            module=self._tracker.module_path(),
            id=self._frame.path,
            outputs=outputs,
            **self._facts(),
        )


def called_modules(dispatcher: Dispatcher, vanilla: Any) -> Any:
    """Return the replacement of ``nn.Module.__call__``.

    It takes as many Python frames as PyTorch's own, so that modules can be nested as deep.

    Args:
        dispatcher: the driver's.
        vanilla: PyTorch's own method, or another library's replacement.
    """

    def enter(module: Any, args: Any, kwargs: Any) -> VanillaCall:
        interceptor = LOCAL.interceptor
        if interceptor is None or interceptor.is_quiet() or not isinstance(module, nn.Module):
            return VanillaCall(functools.partial(vanilla, module))
        if isinstance(module, FUSED) and not (module.training or interceptor.fused.is_busy):
            fused = functools.partial(_run_fused, dispatcher, interceptor, vanilla, module)
            return VanillaCall(fused)
        if interceptor.stale:
            interceptor.refresh()
        run = _forward_of(vanilla, module)
        is_outermost = interceptor.frame.phase is not None
        if interceptor.tells and (interceptor.tells_modules or is_outermost):
            given = (*args, *kwargs.values())
            return ReportedCall(run, interceptor, module, dispatcher, given)
        return NamedCall(run, interceptor, module)

    return named_as(vanilla, _internals.make_module_call(enter))


def _run_fused(
    dispatcher: Dispatcher,
    interceptor: Interceptor,
    vanilla: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a module that may run as one fused operator, once or more often."""

    def run() -> Any:
        given = (*args, *kwargs.values())
        called = functools.partial(vanilla, module)
        with ReportedCall(called, interceptor, module, dispatcher, given) as call:
            call.result = call.run(*args, **kwargs)
            return call.result

    return interceptor.fused.call(module, run)


def _forward_of(vanilla: Any, module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls the forward pass of a module with the fewest Python frames."""
    if (
        vanilla is _internals.MODULE_CALL
        and _internals.COMPILED_CALL(module) is None
        # PyTorch's profiler recognizes calls of modules by the frame of `MODULE_CALL`.
        and sys.getprofile() is None
    ):
        return _internals.PLAIN_CALL(module)  # type: ignore[no-any-return]
    return functools.partial(vanilla, module)


class CallPatch:
    """The replacement of ``nn.Module.__call__`` in a scope.

    ``torch.fx`` also replaces the method, for all threads, while one of them traces a model, and
    restores the method that it has found. So a scope does not begin during a trace of another
    thread, and a scope that ends during a trace leaves the restoration to the end of the trace.

    Attributes:
        call: the replacement; PyTorch's own method before.
    """

    def __init__(self) -> None:
        self._patches = PatchSet()
        self.call: Any = _internals.MODULE_CALL

    def replace(self, wrapper: Callable[[Any], Any]) -> None:
        """Replace the method by ``wrapper(method)``; traces must run by :func:`trace` already.

        If a trace of another thread does not end, the method stays, with a ``CoverageWarning``.
        """
        latest = time.monotonic() + _LONGEST_TRACE
        while not _LOCK.hold(self._replace, wrapper):
            if time.monotonic() > latest:
                _internals.warn_program(
                    "another thread traces a model with torch.fx, and has not ended in "
                    f"{_LONGEST_TRACE:.0f} seconds: op ids have no module paths in this scope"
                )
                return
            time.sleep(0.001)

    def _replace(self, wrapper: Callable[[Any], Any]) -> bool:
        this = threading.get_ident()
        if any(thread != this for thread in _tracing()):
            return False
        _remove_left()
        self._patches.wrap(nn.Module, "__call__", wrapper)
        self.call = vars(nn.Module)["__call__"]
        return True

    def restore(self) -> None:
        """Restore the method; harmless when called twice."""
        _LOCK.hold(self._restore)

    def _restore(self) -> None:
        if len(self._patches) and _tracing():
            _LEFT.append((self._patches, self.call))
            self._patches = PatchSet()
        self._patches.undo()


def trace(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that traces with ``torch.fx``."""
    try:
        return _run(function, *args, **kwargs)
    finally:
        _LOCK.hold(_remove_left)


def _run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that traces; the frame of this call shows that the thread traces."""
    # Wait for code that is replacing the method: it has checked for traces before this one began.
    _LOCK.hold(lambda: None)
    return function(*args, **kwargs)


def _tracing() -> Sequence[int]:
    """The threads that trace, by their frames: after an interrupt a list of them would be wrong."""
    return _internals.threads_in(_run.__code__)


_LOCK = Lock()
"""Held while ``nn.Module.__call__`` is replaced or put back."""

_LEFT: list[tuple[PatchSet, Any]] = []
"""The replacements that ended scopes have left in place until the end of a trace."""

_LONGEST_TRACE = 30.0
"""Seconds that a scope waits for a trace, which may itself wait for the thread of the scope."""


def _remove_left() -> None:
    """Restore, after all traces, the methods that ended scopes have left in place."""
    while _LEFT and vars(nn.Module)["__call__"] is _LEFT[-1][1] and not _tracing():
        patches, _ = _LEFT.pop()
        patches.undo()
