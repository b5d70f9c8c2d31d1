"""The driver: where minigrad is patched, and what each patch does."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from amanda.engine.backward import BackwardExecution
from amanda.errors import RoutineResultError
from amanda.namespace import Namespace
from amanda.patching import PatchSet

import minigrad
from amanda_minigrad.execution import Claim, DriverNode, Execution
from amanda_minigrad.plugin import MinigradDriver
from minigrad import Node, Tensor

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher
    from amanda.interface.action import Action


class _Thread(threading.local):
    """What is counted in each thread on its own."""

    def __init__(self) -> None:
        self.vanilla = 0
        self.ops: collections.Counter[str] = collections.Counter()


class EagerDriver(MinigradDriver):
    """Instruments minigrad while it is attached.

    Three functions are replaced: the one that runs an operator, the one that runs a backward
    operator, and the run of a gradient graph, whose end is the end of an iteration. All
    three are looked up at each call. A function that users import by name, as they may
    import ``backward``, could not be replaced for them.

    Attributes:
        claims: which forward operator a node is a backward operator of.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.claims: weakref.WeakKeyDictionary[Node, Claim] = weakref.WeakKeyDictionary()
        self._patches = PatchSet()
        self._thread = _Thread()

    @property
    def namespace(self) -> Namespace:
        """What mapping rules and results know the framework by."""
        return Namespace("minigrad/0.1/eager")

    # -- life cycle -------------------------------------------------------

    def attach(self) -> None:
        """Patch the framework; on an error nothing stays patched."""
        try:
            self._patches.wrap(minigrad, "execute", self._executing)
            self._patches.wrap(minigrad, "run_graph", self._running_graph)
            self._patches.wrap(Node, "run", self._running_node)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Undo every patch."""
        self._patches.undo()

    def exit_thread(self) -> None:
        """The next scope of this thread counts anew."""
        self._thread.ops.clear()

    def new_iteration(self) -> None:
        """Ids are those of the last iteration again."""
        self._thread.ops.clear()

    def next_id(self, op: minigrad.Operator) -> str:
        """The id of the operator that is about to run: its name, counted in the iteration."""
        count = self._thread.ops[op.__name__]
        self._thread.ops[op.__name__] += 1
        return f"/{op.__name__}:{count}"

    # -- for the dispatcher -----------------------------------------------

    @contextlib.contextmanager
    def vanilla(self) -> Iterator[None]:
        """Within it, this thread's operators are not instrumented."""
        self._thread.vanilla += 1
        try:
            yield
        finally:
            self._thread.vanilla -= 1

    def ad_isolated(self) -> contextlib.AbstractContextManager[None]:
        """Within it, operators leave no nodes."""
        return minigrad.no_grad()

    def is_tensor(self, value: Any) -> bool:
        """Whether a routine may return it for a tensor."""
        return isinstance(value, Tensor)

    def substitute(self, old: Tensor | None, new: Tensor, action: Action) -> Tensor:
        """What a routine has returned, its gradient passed straight through to `old`."""
        if old is None or action.differentiable:
            return new
        if new.shape != old.shape:
            raise RoutineResultError(
                f"{action.routine} at op {action.op_id} must return tensors of the shapes it "
                f"got, expected {old.shape}, got {new.shape}; record it under "
                "amanda.ad_enabled() if the gradient is to follow the new shape"
            )
        value = Tensor(new.data)
        value.edge = old.edge
        return value

    # -- the patches ------------------------------------------------------

    def _is_active(self) -> bool:
        return not self._thread.vanilla and bool(self.dispatcher.scopes())

    def _is_wanted_backward(self) -> bool:
        """Whether a tool would have liked to see a backward operator that runs now."""
        scopes = () if self._thread.vanilla else self.dispatcher.scopes()
        return any(scope.analyses_backward() for scope in scopes)

    def _executing(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def execute(
            op: minigrad.Operator, inputs: Sequence[Tensor | None], attributes: dict[str, Any]
        ) -> Any:
            if not self._is_active():
                return vanilla(op, inputs, attributes)
            return Execution(self, vanilla, op, inputs, attributes).run()

        return execute

    def _running_node(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(node: Node, grads: list[Tensor | None]) -> list[Tensor | None]:
            claim = self.claims.get(node)
            if claim is None:
                if not isinstance(node, DriverNode) and self._is_wanted_backward():
                    self.dispatcher.not_seen("backward ops of no forward op in the scope")
                return vanilla(node, grads)
            execution = BackwardExecution(self.dispatcher, claim.handle, claim.call)
            if self.dispatcher.is_paused() or not any(execution.needed()):
                return vanilla(node, grads)
            grads = execution.before(grads)
            return execution.after(vanilla(node, grads), grads)

        return run

    def _running_graph(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run_graph(outputs: Sequence[Tensor]) -> None:
            try:
                vanilla(outputs)
            finally:
                self.new_iteration()

        return run_graph
