"""A driver in a hundred lines: forward operators only, no automatic differentiation."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from amanda import Driver
from amanda.interface.calls import OpCall
from amanda.interface.driver import Capability
from amanda.namespace import Namespace
from amanda.patching import PatchSet

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher


class ToyOp:
    """What ``context.get_op()`` gives."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class _Thread(threading.local):
    vanilla = 0

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()


class ToyDriver(Driver):
    """Instruments ``toyframework``."""

    name: ClassVar[str] = "toy"
    framework: ClassVar[str] = "toyframework"
    interface_version: ClassVar[int] = 1
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.REPLACE_OP})

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self._patches = PatchSet()
        self._thread = _Thread()

    @classmethod
    def self_test(cls) -> list[str]:
        """What ``amanda doctor`` asks: nothing can be wrong here."""
        return []

    @property
    def namespace(self) -> Namespace:
        return Namespace("toy/1.0/eager")

    def attach(self) -> None:
        import toyframework

        self._patches.wrap(toyframework, "execute", self._executing)

    def detach(self) -> None:
        self._patches.undo()

    def new_iteration(self) -> None:
        self._thread.counts.clear()

    @contextlib.contextmanager
    def vanilla(self) -> Iterator[None]:
        self._thread.vanilla += 1
        try:
            yield
        finally:
            self._thread.vanilla -= 1

    def ad_isolated(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _executing(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def execute(name: str, inputs: list[Any]) -> Any:
            if self._thread.vanilla or not self.dispatcher.scopes():
                return vanilla(name, inputs)
            return self._run(vanilla, name, inputs)

        return execute

    def _run(self, vanilla: Callable[..., Any], name: str, inputs: list[Any]) -> Any:
        dispatcher, counts = self.dispatcher, self._thread.counts
        op_id = f"/{name}:{counts[name]}"
        counts[name] += 1
        execution = None
        plan = dispatcher.plan(op_id)
        if plan is None:
            execution = dispatcher.begin(OpCall(ToyOp(name), op_id, inputs, ("left", "right")))
            plan = execution.plan
        for action in plan.before:
            inputs = dispatcher.run(action, inputs)
        if plan.replace is not None:
            outputs = [dispatcher.replace(plan.replace, inputs)]
        else:
            outputs = [vanilla(name, inputs)]
        if execution is not None:
            plan = execution.finish(outputs)
        for action in plan.after:
            outputs = dispatcher.run(action, outputs)
        return outputs[0]
