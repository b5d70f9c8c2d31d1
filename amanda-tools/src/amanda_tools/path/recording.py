"""Records one pass of a model: its operators, their values, and how they are connected.

:class:`PassRecorder` is a tool; it calls a function with the :class:`RecordedPass` of each pass
that has ended.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda import OpContext, Tool
from amanda.errors import CapabilityError
from amanda.tools.description import OpDescription, describe
from amanda.tools.graph_tracing import Graph, GraphTracingTool, TracedTensor
from amanda.tools.mapping import MappingTool
from amanda_tools._operators.op_table import row_of
from amanda_tools._operators.signature import OpSignature
from amanda_tools._values.shapes import Shape, shape_of
from amanda_tools._values.tensors import Array, arithmetic_of, reader_of

_NUMBERS = re.compile(r"float|bfloat|u?int|bool")
"""Element types that are recorded."""

_DRAWING = re.compile(
    r"(stateless_)?(rand|randn|randint|randperm|\w*truncated_normal|random_(uniform|normal)\w*)(_v\d)?"
)
"""Types that draw random numbers; they may be given a shape and a state."""

_FEEDING = re.compile(
    r"get_next|dequeue|unstage|py_func|placeholder|decode_|parse_example|tensor_list"
)
"""Types that bring data from outside of the program's operators."""

_JUDGING = re.compile(r"loss|metric|accuracy|criterion", re.IGNORECASE)
"""Matches ids of operators that judge a model."""

_LOSS = re.compile(r"loss|entropy")
"""Matches types of operators that judge a model; TensorFlow's may return gradients as well."""

_COUNTED = re.compile(r"(?!step/).*:\d+$")
"""Matches ids of operators that are counted in their module, ``net/dense/BiasAdd:0``, without those
of Keras' steps outside of layers, ``step/Pow:0``."""

_BODY = re.compile(r"/(?=(body|cond|then_branch|else_branch|branches\d+)/)")
"""Where the name of a loop or branch may end in that of an operator within it."""


@attrs.frozen(eq=False)
class RecordedOp:
    """Facts that all executions of an operator share.

    Attributes:
        about: the operator, as in the rows of all tools.
        signature: names of inputs, attributes, weight and layouts.
        parameters: shapes of the inputs that are parameters, variables or constants, by position;
            None of a nested tensor.
        run: runs it again on tensors, None where the driver cannot.
        tensors: for each input a function that makes a tensor of its type from an array, or None.
        types: for each input the name of its element type.
        runs_at_once: tensors keep their identity while the program runs.
        node: its name in its graph.
    """

    about: OpDescription
    signature: OpSignature
    parameters: Mapping[int, Shape | None]
    run: Callable[..., Any] | None
    tensors: Sequence[Callable[[Array], Any] | None]
    types: Sequence[str]
    runs_at_once: bool
    node: str

    @property
    def is_in_module(self) -> bool:
        """True if a module, an outermost one included, or a graph runs it."""
        return bool(self.about.module) or self.about.id.find("/") > 0

    @classmethod
    def of(cls, context: OpContext, graph: Graph, made: Container[str]) -> RecordedOp:
        """Read the facts in an analysis.

        Args:
            context: the operator's context.
            graph: operators that have run before.
            made: ids of the operators that have run in this pass.
        """
        inputs = context.get_inputs()
        # Asking whether a tensor is a parameter may be slow. Results of the model in this pass are
        # none; those of another pass or of a script may be: optimizers write into parameters.
        links = [None if t is None else graph.tensor_of(t) for t in inputs]
        values = {
            i: context.get_value(i)
            for i, (tensor, link) in enumerate(zip(inputs, links, strict=True))
            if tensor is not None and _may_be_parameter(graph, link, made)
        }
        try:
            run = context.get_function()
        except CapabilityError:
            run = None
        about = describe(context)
        return cls(
            about,
            OpSignature.of(context, about.type),
            {i: _shape_of(v) for i, v in values.items() if hasattr(v, "shape")},
            run,
            [None if t is None else _maker(t) for t in inputs],
            ["" if t is None else reader_of(t).dtype(t) for t in inputs],
            context.runs_at_once,
            context.get_node_name(),
        )


def _may_be_parameter(graph: Graph, link: TracedTensor | None, made: Container[str]) -> bool:
    """Return False for a result of the model, unless an operator has read a variable, or may have
    written one, as a script's own may."""
    if link is None or link.producer not in made:
        return True
    return link.producer.startswith("/") or "read_variable" in graph.op(link.producer).type


def _shape_of(value: Any) -> Shape | None:
    """Return a shape; None of a nested tensor, which has none in numbers."""
    try:
        return shape_of(value)
    except TypeError:
        return None


@attrs.define(eq=False)
class RecordedExecution:
    """One execution of an operator.

    Attributes:
        op: the operator.
        inputs, outputs: copies of the values; None for absent tensors and those without numbers.
        sources: for each input the execution and output that it comes from, if known.
        is_data: for each input whether it depends on the model's input.
        written: positions of inputs that differ from what their source gave: something wrote into
            them.
        depth: number of executions on the longest path from the model's input.
    """

    op: RecordedOp
    inputs: list[Array | None]
    sources: list[tuple[RecordedExecution, int] | None]
    is_data: list[bool]
    outputs: list[Array | None] = attrs.field(factory=list)
    written: list[int] = attrs.field(factory=list)
    depth: int = 1

    def is_fed(self, position: int) -> bool:
        """Decide whether an input that no operator has made is an input of the model.

        Scalars are none: the program has written them. Integers beside real numbers are arguments,
        such as a shape, unless they select elements.
        """
        array = self.inputs[position]
        if array is None or array.ndim == 0 or position in self.op.parameters:
            return False
        is_alone = not any("float" in name for name in self.op.types)
        traits = row_of(self.op.about.type).traits
        return is_real(array) or is_alone or "selects_rows" in traits

    def gives_data(self, position: int) -> bool:
        """Decide whether an output depends on the model's input.

        Tensors made from nothing do where no module makes them: a script makes its inputs so, a
        module its constants. Data sets' tensors do everywhere.
        """
        kind, array = self.op.about.type, self.outputs[position]
        is_drawn = bool(_DRAWING.fullmatch(kind))
        if not is_drawn and (any(self.is_data) or _FEEDING.search(kind)):
            return "takes_sizes" not in row_of(kind).traits
        nothing = not self.op.parameters and all(source is None for source in self.sources)
        is_made = (nothing or is_drawn) and not self.op.is_in_module
        return is_made and array is not None and array.ndim > 0

    def data_sources(self) -> list[tuple[RecordedExecution, int]]:
        """Return the known sources of the inputs that depend on the model's input."""
        sources = zip(self.sources, self.is_data, strict=True)
        return [source for source, is_data in sources if source is not None and is_data]

    def real_outputs(self) -> list[int]:
        """Return the positions of outputs of real numbers."""
        return [i for i, array in enumerate(self.outputs) if is_real(array)]

    def gives_more_than(self, count: int) -> bool:
        """True if an output of real numbers has more axes than `count`, and more entries along the
        last one. Scores of classes, for each input of a batch, have more than 1."""
        arrays = [array for array in self.outputs if array is not None and is_real(array)]
        return any(array.ndim > count and array.shape[-1] > count for array in arrays)


@attrs.define(eq=False)
class RecordedPass:
    """The executions of one pass, in order; of a graph in the graph's.

    Attributes:
        labels: labels that were set when it began.
        executions: operator id to its last execution.
    """

    labels: Any = None
    executions: dict[str, RecordedExecution] = attrs.field(factory=dict)


class PassRecorder(Tool):
    """Records each pass; an operator that runs again in a thread begins the next one of it.

    Args:
        finished: called with each pass that has ended.

    Attributes:
        labels: labels for the passes that begin from now on.
        tracing: the tool that follows tensors.
    """

    only_watches = True

    def __init__(self, finished: Callable[[RecordedPass], None]) -> None:
        super().__init__()
        self.labels: Any = None
        self._finished = finished
        self._passes: dict[int, RecordedPass] = {}
        self._latest = threading.get_ident()
        # After this tool: tensors are followed as its routines leave them.
        self.tracing = GraphTracingTool()
        self.tracing.depends_on(self)
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)

    def finish(self) -> None:
        """End the current passes."""
        for thread in tuple(self._passes):
            self._finish(thread)

    def _finish(self, thread: int) -> None:
        finished = self._passes.pop(thread, None)
        if finished is None:
            return
        executions = list(finished.executions.values())
        if not all(execution.op.runs_at_once for execution in executions):
            # Routines beside the operators of a graph run in any order.
            order = {op.id: place for place, op in enumerate(self.tracing.graph.ops)}
            executions.sort(key=lambda e: order.get(e.op.about.id, -1))
            finished.executions = {e.op.about.id: e for e in executions}
        for execution in executions:
            if not execution.op.runs_at_once:
                given, execution.inputs = execution.inputs, []
                self._connect(finished, execution, given)
        self._finished(finished)

    def _analyse(self, context: OpContext) -> None:
        thread = self._thread_of(context.runs_at_once)
        running = self._passes.get(thread)
        made = {} if running is None else running.executions
        # When a graph's operator is analysed, it is not known yet when it runs.
        if context.get_op_id() in made and context.runs_at_once:
            self._finish(thread)
            made = {}
        op = RecordedOp.of(context, self.tracing.graph, made)
        context.insert_before_op(self._before, op=op)
        context.insert_after_op(self._after, op=op)

    def _thread_of(self, runs_at_once: bool) -> int:
        """Return the thread whose pass an execution belongs to.

        In the framework's own threads, such as those of a graph's operators, it is the one in which
        the program ran an operator last.
        """
        current = threading.get_ident()
        if runs_at_once and any(thread.ident == current for thread in threading.enumerate()):
            self._latest = current
        return self._latest

    def _before(self, *tensors: Any, op: RecordedOp) -> None:
        thread = self._thread_of(op.runs_at_once)
        running = self._passes.get(thread)
        # All iterations of a loop are one pass.
        may_end = op.runs_at_once or not _BODY.search(op.node)
        known = None if running is None else running.executions.get(op.about.id)
        # An operator that runs at once may have the id of one in a graph.
        if (
            may_end
            and known
            and (known.op is op or op.runs_at_once is known.op.runs_at_once is True)
        ):
            self._finish(thread)
            running = None
        if running is None:
            for ended in self._passes.keys() - {one.ident for one in threading.enumerate()}:
                self._finish(ended)
            running = self._passes[thread] = RecordedPass(self.labels)
        execution = RecordedExecution(op, [], [], [])
        if op.runs_at_once:
            self._connect(running, execution, tensors)
        else:
            execution.inputs = [None if tensor is None else _array(tensor) for tensor in tensors]
        running.executions[op.about.id] = execution

    def _connect(
        self, running: RecordedPass, execution: RecordedExecution, given: Sequence[Any]
    ) -> None:
        """Note the inputs of an execution: tensors, in a graph their values."""
        for link, tensor in zip(self._links(execution.op, given), given, strict=True):
            self._read(running, execution, link, tensor)
        sources = execution.data_sources()
        execution.depth = 1 + max((source.depth for source, _ in sources), default=0)

    def _read(
        self,
        running: RecordedPass,
        execution: RecordedExecution,
        link: TracedTensor | None,
        tensor: Any,
    ) -> None:
        """Note an input: its value and its source."""
        position = len(execution.inputs)
        source = _source(running, execution.op, link, position)
        made = now = None if source is None else source[0].outputs[source[1]]
        if not execution.op.runs_at_once:
            now = tensor if source is None else made
        elif source is None or made is not None:
            now = None if tensor is None else _array(tensor)
        if made is not None and now is not None and now.shape != made.shape:
            # It comes from an earlier pass, in which another operator had this id: an optimizer
            # that skips a parameter renumbers the operators of the others.
            source = None
        elif made is not None and made is not now and not _are_same(made, now):
            execution.written.append(position)
        execution.inputs.append(now)
        execution.sources.append(source)
        is_data = execution.is_fed(position) if source is None else source[0].gives_data(source[1])
        execution.is_data.append(is_data)

    def _after(self, *tensors: Any, op: RecordedOp) -> None:
        running = self._passes.get(self._thread_of(op.runs_at_once))
        execution = None if running is None else running.executions.get(op.about.id)
        if execution is not None:
            execution.outputs = [None if t is None else _array(t) for t in tensors]
        if op.runs_at_once:
            # The arguments may differ at the next execution.
            self.reanalyse(op.about.id)

    def _links(self, op: RecordedOp, tensors: Sequence[Any]) -> Sequence[TracedTensor | None]:
        if op.runs_at_once:
            return [None if t is None else self.tracing.graph.tensor_of(t) for t in tensors]
        # Routines in graphs get other tensors at each run.
        known = op.about.id in self.tracing.graph
        return self.tracing.graph.op(op.about.id).inputs if known else [None] * len(tensors)


def _source(
    running: RecordedPass, op: RecordedOp, link: TracedTensor | None, position: int
) -> tuple[RecordedExecution, int] | None:
    """Return the execution of the pass that has made an input, and the position of the output."""
    source = None if link is None else running.executions.get(link.producer)
    if source is None or link is None or link.position >= len(source.outputs):
        return None
    # A script's operator that wrote a parameter, as an optimizer or an initializer does, is not
    # part of the model.
    is_written = position in op.parameters and not source.op.is_in_module
    return None if is_written else (source, link.position)


def find_bodies(executions: Sequence[RecordedExecution]) -> dict[str, set[RecordedExecution]]:
    """Find the loops and branches of graphs that have run: name to the executions within.

    A graph's body exchanges tensors with the outside through the operator that runs it only; a name
    scope of the same form does so directly.
    """
    found: dict[str, set[RecordedExecution]] = {}
    parts: dict[str, set[str]] = {}
    for execution in executions:
        node = execution.op.node
        for match in () if execution.op.runs_at_once else _BODY.finditer(node):
            name = node[: match.start()]
            found.setdefault(name, set()).add(execution)
            parts.setdefault(name, set()).add(match[1])
    edges = [(e, source) for e in executions for source, _ in filter(None, e.sources)]
    return {
        name: body
        for name, body in found.items()
        # A loop has both, a condition and a body; a branch has a name of its own.
        if len(parts[name] & {"body", "cond"}) != 1
        and all((execution in body) == (source in body) for execution, source in edges)
    }


def find_scores(executions: Sequence[RecordedExecution]) -> RecordedExecution | None:
    """Find the output to explain: the end of the longest path through a model that may be scores.

    Of several the last. Operators of other phases than the forward pass are none; those of a loss,
    by name or type, and those outside of modules and Keras layers count only if there is nothing
    else: this leaves out a script's own arithmetic. Where loops or branches of a graph interrupt
    the path, the last candidate counts.
    """
    inside = {execution for body in find_bodies(executions).values() for execution in body}
    passed = [e for e in executions if e.op.about.phase == "forward" and any(e.is_data)]
    found = [e for e in passed if e.gives_more_than(1) and e not in inside]
    for is_preferred in _PREFERRED:
        found = [e for e in found if is_preferred(e.op)] or found
    if inside:
        return found[-1] if found else None
    return max(reversed(found), key=operator.attrgetter("depth"), default=None)


_PREFERRED: Sequence[Callable[[RecordedOp], object]] = (
    lambda op: op.is_in_module,
    # In Keras' training functions the operators of losses and metrics are named as in a graph.
    lambda op: op.is_in_module and _COUNTED.match(op.about.id),
    lambda op: not _LOSS.search(op.about.type),
    lambda op: not _JUDGING.search(op.about.id),
)
"""Operators whose outputs are scores rather than those of others, one condition after the other."""


def is_real(array: Array | None) -> bool:
    """True for real numbers: neither integers nor booleans."""
    return array is not None and array.dtype.kind not in "biu"


def _array(tensor: Any) -> Array | None:
    """Copy the values; None without real numbers."""
    reader = reader_of(tensor)
    # PyTorch warns as it copies a sparse or a nested tensor, of which there would be no array.
    if not (_NUMBERS.match(reader.dtype(tensor)) and reader.is_readable(tensor)):
        return None
    try:
        # Not ascontiguousarray, which turns a scalar into an array of one axis.
        return np.asarray(reader.wide_numpy(tensor), order="C")
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def _are_same(one: Array, other: Array | None) -> bool:
    """True if two arrays have equal elements, NaN included."""
    return other is not None and np.array_equal(one, other, equal_nan=True)


def _maker(tensor: Any) -> Callable[[Array], Any] | None:
    """Return a function that makes tensors of this type from arrays; None for types without
    numbers."""
    if not _NUMBERS.match(reader_of(tensor).dtype(tensor)):
        return None
    try:
        arithmetic = arithmetic_of(tensor)
        # Not the tensor itself, which must not be kept alive.
        like = arithmetic.constant(np.zeros(0), like=tensor)
    except (TypeError, ValueError, RuntimeError):
        return None
    return lambda array: arithmetic.stop_gradient(arithmetic.constant(array, like))
