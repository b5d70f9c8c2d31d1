"""The driver of the toy framework: where it is patched, and what each patch does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.engine.backward import BackwardExecution
from amanda.errors import RoutineResultError
from amanda.interface.driver import Capability, Driver
from amanda.namespace import Namespace
from amanda.patching import PatchSet
from amanda.testing.loopback import nn, ops, tape
from amanda.testing.loopback.execution import Claim, DriverNode, Execution
from amanda.testing.loopback.op_ids import OpIds
from amanda.testing.loopback.tape import Node, Tensor

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher
    from amanda.interface.action import Action


class _Thread(threading.local):
    vanilla: int = 0
    graph_runs: int = 0


class LoopbackDriver(Driver):
    """Instruments the toy framework of :mod:`amanda.testing.loopback`.

    Four functions of the framework are replaced while it is attached: the one
    that runs an operator, the one that runs a backward operator, the call of a
    module (for ids) and the run of a gradient graph (its end is the end of an
    iteration).

    Attributes:
        claims: which operator a node of the gradient graph belongs to.
        ids: forms operator ids.
        execution_cls: runs one operator with its plan.
    """

    execution_cls: ClassVar[type[Execution]] = Execution
    name: ClassVar[str] = "loopback"
    framework: ClassVar[str] = "amanda.testing.loopback"
    interface_version: ClassVar[int] = 1
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.STATIC_GRAPH,
        Capability.COMPILED,
    }

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.claims: weakref.WeakKeyDictionary[Node, Claim] = weakref.WeakKeyDictionary()
        self.ids = OpIds()
        self._patches = PatchSet()
        self._thread = _Thread()

    @property
    def namespace(self) -> Namespace:
        return Namespace("loopback/1.0/eager")

    # -- life cycle -------------------------------------------------------

    def attach(self) -> None:
        try:
            self._patches.wrap(ops, "execute", self._executing)
            self._patches.wrap(Node, "run", self._running_backward_op)
            self._patches.wrap(nn.Module, "__call__", self._calling_module)
            self._patches.wrap(tape, "run_graph", self._running_graph)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        self._patches.undo()

    def exit_thread(self) -> None:
        self.ids.forget()

    def new_iteration(self) -> None:
        self.ids.restart()

    # -- for the dispatcher -----------------------------------------------

    @contextmanager
    def vanilla(self) -> Iterator[None]:
        self._thread.vanilla += 1
        try:
            yield
        finally:
            self._thread.vanilla -= 1

    def ad_isolated(self) -> AbstractContextManager[Any]:
        return tape.no_grad()  # type: ignore[no-any-return]

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def substitute(self, old: Tensor | None, new: Tensor, action: Action) -> Tensor:
        """`new`, whose gradient passes straight through to `old` (design rule 7).

        Raises:
            RoutineResultError: the shapes differ.
        """
        if old is None or action.differentiable:
            return new
        if new.shape != old.shape:
            raise RoutineResultError(
                f"{action.routine} at op {action.op_id} must return tensors of the shapes it "
                f"got, expected {old.shape}, got {new.shape}; record it under "
                "amanda.ad_enabled() if the gradient is to follow the new shape"
            )
        value = new.alias()
        if old.requires_grad and tape.grad_enabled():
            node = DriverNode("StraightThrough", [old.edge()], lambda grads: grads)
            tape.attach(node, [value])
        return value

    # -- the four patches -------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether the current thread's operators are instrumented."""
        return not self._thread.vanilla and bool(self.dispatcher.scopes())

    @property
    def is_wanted_backward(self) -> bool:
        """Whether a tool would see the backward operators that the current thread runs."""
        scopes = () if self._thread.vanilla else self.dispatcher.scopes()
        return any(scope.analyses_backward() for scope in scopes)

    def _executing(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def execute(op: ops.Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if not self.is_active:
                return vanilla(op, args, kwargs)
            return self.execution_cls(self, op, args, kwargs).run()

        return execute

    def _running_backward_op(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(node: Node, grads: list[Any]) -> list[Any]:
            claim = self.claims.get(node)
            if claim is None:
                if not isinstance(node, DriverNode) and self.is_wanted_backward:
                    self.dispatcher.not_seen("backward ops of no forward op in the scope")
                return vanilla(node, grads)  # type: ignore[no-any-return]
            execution = BackwardExecution(self.dispatcher, claim.handle, claim.call)
            if self.dispatcher.is_paused() or not any(execution.needed()):
                return vanilla(node, grads)  # type: ignore[no-any-return]
            grads = execution.before(grads)
            return execution.after(vanilla(node, grads), grads)

        return run

    def _calling_module(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.is_active:
                return vanilla(module, *args, **kwargs)
            with self.ids.within(module):
                return vanilla(module, *args, **kwargs)

        return call

    def _running_graph(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run_graph(*args: Any, **kwargs: Any) -> Any:
            self._thread.graph_runs += 1
            try:
                return vanilla(*args, **kwargs)
            finally:
                self._thread.graph_runs -= 1
                if not self._thread.graph_runs:
                    self.ids.restart()

        return run_graph
