"""Finds out whether tools act inside of modules that run as one fused operator in eval mode.

``nn.TransformerEncoder``, its layers and ``nn.MultiheadAttention`` have a native fast path. A tool
that masks or rounds what ``linear`` computes sees no ``linear`` there. So for the tools of a scope
that do not declare ``only_watches``, the operators of the other path are analysed first, in a run
that calls no routine and whose result is dropped. Where routines were recorded that may return
something, the other path runs, and its result is taken if some routine has changed a value.
Everywhere else the fused operator runs, so that watching changes nothing. Tools that only watch
are not asked in that run: they would list operators that do not run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from amanda.engine.records import OpRecord
from amanda.interface.action import ActionKind
from amanda.python.bytecode import returns_something
from amanda_torch import _internals
from amanda_torch.routines import RoutineDispatcher

FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

ASKING = frozenset({"torch.nn.modules.activation", "torch.nn.modules.transformer"})
"""The modules of PyTorch that ask for overrides of ``__torch_function__`` before the path."""


class _Interceptor(Protocol):
    """The used methods of a thread's :class:`~amanda_torch.eager.interceptors.Interceptor`."""

    stale: bool

    @property
    def active(self) -> tuple[Any, ...]: ...

    def refresh(self) -> bool: ...

    def forget_plans(self) -> None: ...

    def path_of(self, module: nn.Module) -> str | None: ...

    def forget_call(self, module: nn.Module) -> None: ...


class FusedModules:
    """The fused modules that one thread calls.

    Args:
        interceptor: the thread's interceptor.

    Attributes:
        is_trial: True while operators are analysed without calling routines.
        watching: tools whose analyses do not run meanwhile.
        is_busy: True while a fused module is called; fused modules in it are treated alike.
        is_denied: True to prevent the fast path.
        was_asked: True if the fast path would have been taken.
    """

    def __init__(self, interceptor: _Interceptor, dispatcher: RoutineDispatcher) -> None:
        # The interceptor holds this object.
        self._interceptor = weakref.proxy(interceptor)
        self._dispatcher = dispatcher
        self.is_trial = False
        self.watching: frozenset[Any] = frozenset()
        self.is_busy = False
        self.is_denied = False
        self.was_asked = False
        self._acted: dict[str, bool] = {}

    def forget(self) -> None:
        """Forget the results for all modules, since scopes or actions have changed."""
        self._acted.clear()

    def call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Call a module by `run`: fused, or by the other path if a tool acts there."""
        if not self._concerns(module):
            return run()
        self.is_busy = True
        try:
            if self._acts(module, run):
                changes = self._dispatcher.changes
                result = self._unfused(run)
                if self._dispatcher.changes != changes or not self.was_asked:
                    return result
                self._interceptor.forget_call(module)
            return run()
        finally:
            self.is_busy = False

    def _concerns(self, module: nn.Module) -> bool:
        """True if the fast path may be taken, and a tool may act inside."""
        interceptor = self._interceptor
        if not torch.backends.mha.get_fastpath_enabled():
            return False
        if _internals.is_traced() or _internals.in_backward() or _internals.has_hooks(module):
            return False
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            return False
        if interceptor.stale and not interceptor.refresh():
            return False
        return any(_may_act(tool) for scope in interceptor.active for tool in scope.tools)

    def _acts(self, module: nn.Module, run: Callable[[], Any]) -> bool:
        """True if routines that may return something are recorded for operators inside."""
        interceptor = self._interceptor
        path = interceptor.path_of(module)
        acted = self._acted.get(path) if path is not None else None
        if acted is None:
            self.is_trial = True
            self.watching = _watching([t for scope in interceptor.active for t in scope.tools])
            interceptor.forget_plans()
            try:
                self._unfused(run)
            finally:
                self.is_trial = False
                self.watching = frozenset()
                interceptor.forget_plans()
            interceptor.forget_call(module)
            path = interceptor.path_of(module)
            acted = self.was_asked and path is not None and self._has_actions(path)
            if path is not None:
                self._acted[path] = acted
        return acted

    def _unfused(self, run: Callable[[], Any]) -> Any:
        self.is_denied, self.was_asked = True, False
        try:
            return run()
        finally:
            self.is_denied = False

    def _has_actions(self, path: str) -> bool:
        inside = (f"{path}/", f"{path}.")
        return any(
            record.state.op_id.startswith(inside) and _has_action(record)
            for scope in self._interceptor.active
            for record in scope.cache
        )


def _has_action(record: OpRecord) -> bool:
    """True if a routine of an operator may change a value; routines of fused operators do not
    count."""
    if record.state.op_id.rpartition("/")[2].startswith(_internals.FUSED_OPERATORS):
        return False
    if record.actions(ActionKind.REPLACE_OP):
        return True
    return any(
        action.select != () and returns_something(action.func)
        for kind in (ActionKind.BEFORE_OP, ActionKind.AFTER_OP)
        for action in record.actions(kind)
    )


def _may_act(tool: Any) -> bool:
    """True unless a tool or its own class declares that it only watches."""
    return not any(vars(one).get("only_watches") for one in (tool, type(tool)))


def _watching(tools: Iterable[Any]) -> frozenset[Any]:
    """The tools that only watch and that no acting tool depends on."""
    rest, asked = list(tools), list[Any]()
    wanted = [tool for tool in rest if _may_act(tool)]
    while wanted:
        tool = wanted.pop()
        asked.append(tool)
        wanted += [one for one in tool.dependencies if not any(one is known for known in asked)]
    # A tool that cannot be hashed cannot be marked as waiting.
    if any(type(tool).__hash__ is None for tool in rest):
        return frozenset()
    return frozenset(tool for tool in rest if not any(tool is known for known in asked))
