"""The driver: what of ONNX Runtime is replaced, and how the nodes of a model run one by one."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from amanda.driver import Namespace, OpIds, PatchSet
from amanda.errors import CoverageWarning

from amanda_onnx.plugin import OnnxDriver
from amanda_onnx.program import OPAQUE, Block, Node, Program

INSIDE = "operators inside of If, Loop and Scan"
UNSEEN = {
    "run_with_iobinding": "runs with an IOBinding",
    "run_with_ort_values": "runs with OrtValues",
    "run_with_ortvaluevector": "runs with an OrtValueVector",
    "run_async": "asynchronous runs",
}
"""Methods of sessions whose operators are not seen, and the reason."""


class NodeIds(OpIds):
    """Ids, and those that the last run of each session has had in this thread."""

    def forget(self) -> None:
        """Forget them, for the next scope of this thread."""
        super().forget()
        self.made: list[str] = []
        self.of_session: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()

    def next(self, *args: Any) -> str:
        """The id of the operator that is about to run."""
        op_id = super().next(*args)
        self.made.append(op_id)
        return op_id


class Run:
    """One run of a session, node by node.

    Attributes:
        values: by name.
        last: inputs and result of the node that has run last.
        has_changed: True if a tool has changed a value.
    """

    def __init__(self, driver: OnnxNodeDriver, program: Program, feed: Any) -> None:
        self._driver, self._program = driver, program
        self.values = program.feed(feed)
        self.last: list[Any] = []
        self.has_changed = False

    def vanilla(self) -> list[Any]:
        """Run all nodes without tools."""
        for node in self._program.nodes:
            self._keep(node, node.compute(self.captured(node), *self._given(node)))
        return self._listed(self._program.outputs)

    def block(self, block: Block) -> list[Any]:
        """Run a call of a module."""
        named, inputs = self._program.places.items, self._listed(block.inputs)
        with self._driver.module_call(block.place, named, inputs) as returned:
            return self.within(block, returned)

    def within(self, block: Block, returned: Callable[[Any], Any]) -> list[Any]:
        """Run what is in a call of a module."""
        for item in block.items:
            if isinstance(item, Block):
                self.block(item)
            else:
                self._node(item)
        return returned(self._listed(block.outputs))

    def _node(self, node: Node) -> None:
        driver, given, run = self._driver, self._given(node), weakref.ref(self)

        def function(*inputs: Any, **attributes: Any) -> Any:
            # Tools may keep this function, which keeps no values.
            current = run()
            captured = [] if current is None else current.captured(node)
            found = node.compute(captured, *inputs)
            if current is not None:
                current.last = [list(inputs), found]
            return found

        self.last = []
        signature = driver.signature(node, node.tensors, node.signature)
        result = driver.run_operator(
            node.op, node.label, signature, given, node.attributes, function
        )
        self.has_changed |= not _same([given, result], self.last)
        self._keep(node, result)
        if node.op.__name__ in OPAQUE:
            driver.dispatcher.not_seen(INSIDE)

    def _given(self, node: Node) -> list[Any]:
        return [self.values.get(name) for name in node.inputs]

    def captured(self, node: Node) -> list[Any]:
        """The values that graphs within a node read from outside."""
        return [self.values.get(name) for name in node.captured]

    def _keep(self, node: Node, result: Any) -> None:
        results = result if len(node.outputs) > 1 else (result,)
        self.values.update(zip(node.outputs, results, strict=True))

    def _listed(self, names: Sequence[str]) -> list[Any]:
        return [self.values.get(name) for name in names]

    def outputs(self, names: Sequence[str]) -> list[Any]:
        """What the session returns, once all nodes have run."""
        return self._listed(names or self._program.outputs)


class OnnxNodeDriver(OnnxDriver):
    """Instruments ``InferenceSession.run`` while it is attached.

    The session runs first, as without Amanda: it checks what it is given, and raises its own
    errors. Then its nodes run one by one, each in a session of its own. If no tool has changed a
    value, the program gets what the session has returned.
    """

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self.ids: NodeIds = NodeIds(self.framework)
        self._programs: weakref.WeakKeyDictionary[Any, Program | None] = weakref.WeakKeyDictionary()

    @property
    def namespace(self) -> Namespace:
        """The name of the framework for mapping rules and results."""
        return Namespace(f"onnx/{'.'.join(ort.__version__.split('.')[:2])}/nodes")

    def patch(self, patches: PatchSet) -> None:
        """Replace the methods that run a session."""
        patches.wrap(ort.InferenceSession, "run", self._running)
        for name, reason in UNSEEN.items():
            if hasattr(ort.InferenceSession, name):
                patches.wrap(ort.InferenceSession, name, functools.partial(self._counting, reason))

    def is_tensor(self, value: Any) -> bool:
        """True if a routine may return it for a tensor."""
        return isinstance(value, (np.ndarray, np.generic))

    def ad_isolated(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: nothing is differentiated."""
        return contextlib.nullcontext()

    def trains(self, module: Any) -> bool:
        """False: sessions infer."""
        return False

    def current_value(self, tensor: Any) -> Any:
        """The value of a constant of a model, which is the tensor itself."""
        return None if self._name(tensor) is None else tensor

    def parameter_name(self, tensor: Any) -> str | None:
        """The name of a constant of a model."""
        return self._name(tensor) or None

    def _name(self, tensor: Any) -> str | None:
        programs = [program for program in list(self._programs.values()) if program is not None]
        return next((p.names[id(tensor)] for p in programs if id(tensor) in p.names), None)

    def _counting(self, reason: str, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(vanilla)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_active:
                self.dispatcher.not_seen(reason)
            return vanilla(*args, **kwargs)

        return run

    def _running(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(vanilla)
        def run(session: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            outputs = vanilla(session, output_names, input_feed, run_options)
            if not self.is_active:
                return outputs
            program = self._program(session, vanilla, input_feed, output_names, outputs)
            if program is None:
                self.dispatcher.not_seen("runs of sessions whose nodes cannot run one by one")
                return outputs
            given = [input_feed.get(name) for name in program.inputs]
            with self.module_call(program.root.place, program.places.items, given) as returned:
                if self._is_idle(session):
                    if program.opaque:
                        self.dispatcher.not_seen(INSIDE, program.opaque)
                    return returned(outputs)
                self.ids.made.clear()
                found = Run(self, program, input_feed)
                found.within(program.root, returned)
                self.ids.of_session[session] = list(self.ids.made)
            return found.outputs(output_names) if found.has_changed else outputs

        return run

    def _is_idle(self, session: Any) -> bool:
        """True if no tool has a routine in the session, all of whose operators are analysed."""
        ids, scopes = self.ids.of_session.get(session), self.dispatcher.scopes()
        if ids is None or self.dispatcher.points.wants_modules(scopes):
            return False
        plans = (self.dispatcher.plan(op_id, scopes) for op_id in ids)
        return all(plan is not None and not plan for plan in plans)

    def _program(
        self, session: Any, run: Any, feed: Any, names: Sequence[str], outputs: Sequence[Any]
    ) -> Program | None:
        """What a session runs, from the first run on; None if it cannot run node by node."""
        if session in self._programs:
            return self._programs[session]
        program: Program | None = None
        with self.vanilla():
            try:
                read = Program(session, run)
                first = Run(self, read, feed)
                first.vanilla()
                self._compare(first.outputs(names), outputs)
                program = read
            except CoverageWarning:
                raise
            except Exception as error:  # noqa: BLE001
                # A model that is gone, a library of custom operators, a type that NumPy lacks.
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                warnings.warn(
                    f"an ONNX Runtime session is not seen, for its nodes cannot run one by one: "
                    f"{text}",
                    CoverageWarning,
                    stacklevel=3,
                )
        self._programs[session] = program
        return program

    def _compare(self, found: Sequence[Any], expected: Sequence[Any]) -> None:
        """Warn if nodes that run one by one give other outputs than the session."""
        pairs = list(zip(found, expected, strict=True))
        if all(np.array_equal(a, b, equal_nan=_is_float(a)) for a, b in pairs):
            return
        largest = max(
            (float(np.nanmax(np.abs(a - b), initial=0)) for a, b in pairs if _is_float(a)),
            default=0.0,
        )
        warnings.warn(
            f"the nodes of an ONNX Runtime session, run one by one, give outputs that differ by up "
            f"to {largest:.1e} from the session's: its optimizer has rewritten the graph, or the "
            "model draws random numbers; tools see the values of single nodes",
            CoverageWarning,
            stacklevel=4,
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _same(one: Any, other: Any) -> bool:
    """True if two values, or lists of values, are the same objects; absent ones may be left out."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        size = max(len(one), len(other))
        padded = ([*items, *[None] * (size - len(items))] for items in (one, other))
        return all(map(_same, *padded))
    return one is other
