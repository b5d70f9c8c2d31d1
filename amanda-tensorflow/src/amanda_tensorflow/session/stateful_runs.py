"""Session runs that need state other than variables: they run a function in the user's session.

Tables, iterators, queues and random generators belong to a session and cannot be copied to the
shadow. The operators that tools act on become one function instead, which one node per run calls in
the user's graph; operators that make such state, or draw from it, stay where they are. The node is
left out of whatever is written of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.instrument import Instrument
from amanda_tensorflow.graphs.replay import Replay
from amanda_tensorflow.graphs.running_vanilla import NotInstrumentableError
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.graphs.topological_order import ordered
from amanda_tensorflow.operators.types import ROUTING, is_random
from amanda_tensorflow.operators.variables import VARIABLES
from amanda_tensorflow.session.random_ops import draws_from
from amanda_tensorflow.session.runs import SessionRun

NODE = "amanda/run"
"""Name of the nodes in the user's graph."""

_FROM_HANDLES = frozenset(
    """IteratorFromStringHandle IteratorFromStringHandleV2 MultiDeviceIteratorFromStringHandle
    GetSessionTensor DeleteSessionTensor""".split()
)
"""Operators that find state of the session by a handle that they are given as a value."""

_TO_HANDLES = frozenset({"GetSessionHandle", "GetSessionHandleV2"})
"""Operators that keep a value in the session and give a handle to it. Functions have no access to
the place where it is kept (TensorFlow 2.16 to 2.21)."""

_STAGES = re.compile(
    r"Stage|Unstage|Stage(Peek|Size|Clear)"
    r"|(Ordered)?Map(Stage|Unstage|UnstageNoKey|Peek|Size|IncompleteSize|Clear)"
)
"""Operators that find state of the session by their attribute ``shared_name``, or by their name."""

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
"""Operators that read a resource variable."""


def keeps_state(op: Any) -> bool:
    """True if an operator makes state that belongs to a session and is not a variable."""
    if op.inputs or op.type in VARIABLES or not op.outputs or not _internals.is_stateful(op):
        return False
    return all(t.dtype == tf.resource or _internals.is_reference(t.dtype) for t in op.outputs)


def needs_inline(operations: Sequence[Any]) -> bool:
    """True if some operators of a graph have to run in the user's own session.

    Random operators count only where variables are read as well. In other runs the nodes of the
    shadow that draw the numbers are few.
    """
    if any(keeps_state(op) for op in operations):
        return True
    kinds = {op.type for op in operations}
    if kinds & _FROM_HANDLES or kinds & _TO_HANDLES or any(map(_STAGES.fullmatch, kinds)):
        return True
    return any(map(is_random, kinds)) and bool(kinds & _READS) and "VariableV2" not in kinds


class InlineFunction:
    """The instrumented function of one run, and the node in the user's graph that calls it.

    Args:
        session: the user's session.
        site: where its graph is replayed.
        make: gives the instrument that creates the operators of a graph.
        apart: see :func:`~amanda_tensorflow.session.random_ops.draws_from`.

    Attributes:
        function: the function's graph.
        run: the run in terms of the node, once that is inserted.
    """

    def __init__(
        self, session: Any, site: OpSite, make: Callable[[Any], Instrument], apart: dict[str, str]
    ) -> None:
        self._graph = session.graph
        self._site = site
        self.function = _internals.FuncGraph("amanda_inline")
        for known in _internals.functions_of(session.graph):
            _internals.add_function(self.function, known)
        self._instrument = make(self.function)
        self._replay = Replay(self.function, self._instrument, draws_from(session, apart))
        self._inputs: list[Any] = []
        self._vanilla: SessionRun | None = None
        self._fetched: list[Any] = []
        self.run = SessionRun((), (), ())
        self.is_inserted = False

    def build(self, run: SessionRun) -> None:
        """Replay the operators that a run needs into the function.

        Raises:
            NotInstrumentableError: it needs a variable of TensorFlow 1's reference kind, or state
                that a function cannot reach.
        """
        site = self._site
        self._vanilla = run
        outside = [op for op in self._graph.get_operations() if _stays(op)]
        for op in outside:
            site.ops[op.name] = None
        site.fed = {id(tensor) for tensor, _ in run.feeds}
        order = ordered(site, run.roots())
        for op in order:
            _check_reach(op)
            for tensor in op.inputs:
                if id(tensor) not in site.tensors and (
                    tensor.op.name in site.ops or id(tensor) in site.fed
                ):
                    self._enter(tensor)
        with self._instrument.building_copy():
            self._replay.body(site, [op for op in run.roots() if op.name not in site.ops])
            self._leave(run)

    def _enter(self, tensor: Any) -> None:
        """Make a tensor of the user's graph an input of the function."""
        if _internals.is_reference(tensor.dtype):
            raise NotInstrumentableError(
                f"a run needs both {tensor.op.name}, a variable of TensorFlow 1's reference "
                "kind, and tables, iterators or queues, which cannot be instrumented together; "
                "make the variable with use_resource=True"
            )
        with self.function.as_default(), tf.name_scope(""):
            inner = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=tensor.op.name)
        _internals.copy_handle_data(tensor, inner)
        self.function.inputs.append(inner)
        self._inputs.append(tensor)
        self._site.tensors[id(tensor)] = inner

    def _leave(self, run: SessionRun) -> None:
        """Make the fetches outputs of the function, and the targets its side effects."""
        inside = [t for t in run.fetches if not self._is_outside(t)]
        unique = list({id(tensor): tensor for tensor in inside}.values())
        with self.function.as_default():
            self.function.outputs = [self._replay.final(self._site, tensor) for tensor in unique]
        self._fetched = unique
        ends = [new for op in run.targets for new in self._site.controls(op)]
        ends += self._instrument.building.late_nodes(self.function.outputs)
        roots = [*(tensor.op for tensor in self.function.outputs), *ends]
        last = self._replay.module_marks(self._site, roots)
        ends += [] if last is None else [last]
        self.function.control_outputs = list(dict.fromkeys(ends))

    def _is_outside(self, tensor: Any) -> bool:
        """True if a tensor is fed, or computed by an operator that stays in the user's graph."""
        fed = id(tensor) in self._site.fed
        return fed or self._site.ops.get(tensor.op.name, True) is None

    def insert(self) -> None:
        """Add the node that calls the function to the user's graph."""
        name = _internals.unique_function_name("amanda_inline")
        function = _internals.function_from_graph(name, self.function, {})
        with _internals.unfinalized(self._graph):
            _internals.add_function(self._graph, function)
            node = _internals.call_node(
                self._graph, NODE, function, self._inputs, self.function.outputs
            )
        _internals.hide(self._graph)
        outputs = zip(self._fetched, node.outputs, strict=True)
        self.run = self._translated(node, {id(tensor): output for tensor, output in outputs})
        self.is_inserted = True

    def _translated(self, node: Any, outputs: dict[int, Any]) -> SessionRun:
        """The run in terms of the node.

        Args:
            outputs: the node's outputs, by ``id`` of the vanilla tensor.
        """
        run = self._vanilla
        assert run is not None
        outside = [op for op in run.targets if self._site.ops.get(op.name, True) is None]
        fetches = [outputs.get(id(tensor), tensor) for tensor in run.fetches]
        return SessionRun(run.feeds, fetches, [*outside, node])


def _stays(op: Any) -> bool:
    """True if an operator runs in the user's graph, as it is."""
    if op.type in VARIABLES or op.type.startswith("Placeholder") or keeps_state(op):
        return True
    can_stay = is_random(op.type) or op.type in _FROM_HANDLES
    return can_stay and not op.control_inputs and _is_simple(op.inputs)


def _check_reach(op: Any) -> None:
    """Check that an operator finds its state from within a function.

    Raises:
        NotInstrumentableError: it does not.
    """
    is_unnamed = _STAGES.fullmatch(op.type) and not op.get_attr("shared_name")
    if is_unnamed or op.type in _TO_HANDLES or op.type in _FROM_HANDLES:
        raise NotInstrumentableError(
            f"{op.name} ({op.type}) finds state of the session that an instrumented copy has not"
        )


def _is_simple(tensors: Iterable[Any]) -> bool:
    """True if tensors are computed from constants and placeholders, and nothing else."""
    waiting, seen = [tensor.op for tensor in tensors], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen or op.type.startswith("Placeholder"):
            continue
        seen.add(op.name)
        if _internals.is_stateful(op) or op.control_inputs or op.type in ROUTING:
            return False
        waiting += [tensor.op for tensor in op.inputs]
    return True
