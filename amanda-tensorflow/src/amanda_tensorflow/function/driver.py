"""The driver ``tensorflow-function``: runs instrumented copies of traced functions."""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

import amanda
from amanda.engine.points import Points
from amanda.errors import CapabilityError, CoverageWarning
from amanda.interface.points import Point
from amanda.interface.proofs import Proof
from amanda.python.patching import PatchSet, named_as
from amanda.state import STATE, LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.base_driver import GraphModeDriver, raise_original
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.copies import Copy, Report
from amanda_tensorflow.graphs.dispatcher import GraphDispatcher
from amanda_tensorflow.graphs.error_texts import reworded
from amanda_tensorflow.graphs.evaluation import evaluate
from amanda_tensorflow.graphs.executions import Executions
from amanda_tensorflow.graphs.instrument import Instrument
from amanda_tensorflow.graphs.iterations import GraphIterations, sets_variables_only
from amanda_tensorflow.graphs.model_inputs import ModelInputs
from amanda_tensorflow.graphs.module_marks import calls_modules
from amanda_tensorflow.graphs.passes import GraphRun, InnerPasses, RunningModules
from amanda_tensorflow.graphs.random_state import first_seeded
from amanda_tensorflow.graphs.replay import Replay
from amanda_tensorflow.graphs.run_time_routines import may_wait_for_tools
from amanda_tensorflow.graphs.running_vanilla import falling_back
from amanda_tensorflow.graphs.self_test import Doubler
from amanda_tensorflow.graphs.sites import OpSite
from amanda_tensorflow.graphs.xla import refuse_compiled_only, warn_about_xla
from amanda_tensorflow.keras_layers import recording as layers
from amanda_tensorflow.plugin import TensorFlowFunctionDriver

_DERIVED = re.compile(r"__(backward|forward)_(.+?)(?:_\d+)?$")
"""A function that TensorFlow derives for a gradient, and the original's name in its name."""

_XLA = ("_XlaMustCompile", "_XlaHasReferenceVars", "_XlaScope")
"""Attributes of functions that ask for XLA."""


class FunctionDriver(TensorFlowFunctionDriver, GraphModeDriver):
    """Runs instrumented copies of functions in place of the vanilla ones.

    A function is instrumented at its first call under a scope, without being traced again, and is
    vanilla afterwards. The functions that compute gradients are called in the same way, and are
    instrumented likewise.
    """

    def __init__(self, dispatcher: GraphDispatcher) -> None:
        super().__init__(dispatcher)
        self._attached_at = 0
        self._has_told_saving = False
        self._drawing: weakref.WeakSet[Any] = weakref.WeakSet()

    def patch(self, patches: PatchSet) -> None:
        self._attached_at = _internals.uid()
        patches.wrap(_internals.ConcreteFunction, "_call_flat", self._calling)
        patches.wrap(_internals.AtomicFunction, "call_flat", _calling_in_tool_code)
        patches.wrap(_internals.TapeGradientFunctions, "record", _recording_call)
        patches.wrap(tf.saved_model, "save", self._saving)
        # Keras itself imports TensorFlow, before it defines its classes.
        if model := getattr(sys.modules.get("keras"), "Model", None):
            patches.wrap(model, "save", self._saving)

    def _saving(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """The patch of functions that save a model: without what tools change, which is told."""

        def save(*args: Any, **kwargs: Any) -> Any:
            tools = [tool for scope in self.dispatcher.scopes() for tool in scope.tools]
            named = [type(tool).__name__ for tool in tools if hasattr(tool, "export_model")]
            if named and not self._has_told_saving:
                self._has_told_saving = True
                warnings.warn(
                    f"the model is saved without the changes of {', '.join(named)}; "
                    "tool.export_model(model, example_inputs, path) writes it with them",
                    CoverageWarning,
                    stacklevel=2,
                )
            return vanilla(*args, **kwargs)

        return named_as(vanilla, save)

    def with_routines(self, function: Any) -> Any:
        """A concrete function that has run in the scopes, with its routines."""
        copy = self.copies.find(function, self.dispatcher.scopes())
        if copy is None:
            return None
        if copy.building.has_python:
            raise CapabilityError(
                f"function {function_name(function.graph)} calls a routine of Python at run time; "
                "mark it @amanda.traceable"
            )
        called, used = (function, ()) if copy.payload is None else copy.payload

        def call(*tensors: Any) -> Any:
            return _internals.call_flat(called, tensors, [*function.captured_inputs, *used])

        return call

    def _calling(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        """The patch of ``ConcreteFunction._call_flat``, which runs every concrete function."""
        find, scopes_now = self.copies.find, self.dispatcher.scopes

        def call_flat(function: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
            scopes = scopes_now()
            if not scopes or not _internals.executing_eagerly():
                return vanilla(function, tensor_inputs, captured_inputs)
            copy = find(function, scopes)
            if copy is None:
                if _internals.is_instrumented(function):
                    # It is derived from a copy, and has its routines.
                    return self._call_shown(vanilla, function, tensor_inputs, captured_inputs)
                count = len(_internals.graph_of(function).inputs)
                if count != len(tensor_inputs) + len(captured_inputs):
                    # TensorFlow refuses the call.
                    return vanilla(function, tensor_inputs, captured_inputs)
                make = self._found_or_made
                copy = self.lock.hold(make, function, scopes, tensor_inputs, captured_inputs)
            ready, executions, report = copy.payload, copy.executions, copy.report
            called, given = function, captured_inputs
            if ready is not None:
                called, given = ready[0], [*captured_inputs, *ready[1]]
            if report is not None:
                with report(scopes):
                    return self._call_shown(vanilla, called, tensor_inputs, given)
            try:
                result = vanilla(called, tensor_inputs, given)
            except Exception as error:
                self._raise_shown(error, called)
            if executions is not None:
                executions.add()
            return result

        return named_as(vanilla, call_flat)

    def _call_shown(self, vanilla: Any, function: Any, tensors: Any, captured: Any) -> Any:
        """Call a function that may have routines; raise what the program is to see."""
        try:
            return vanilla(function, tensors, captured)
        except Exception as error:
            self._raise_shown(error, function)

    def _raise_shown(self, error: Exception, function: Any) -> NoReturn:
        """Count a failed run, and raise the error that the program sees: the exception of a
        routine, or TensorFlow's own with the function's name."""
        self.count_failed_run(error)
        raise_original(error)
        shown = reworded(error, _internals.graph_of(function))
        if shown is error:
            raise error
        raise shown from None

    def _found_or_made(self, function: Any, scopes: tuple[LiveScope, ...], *tensors: Any) -> Copy:
        """The instrumented copy of a function, made unless another thread has just done so."""
        return self.copies.find(function, scopes) or self._made(function, scopes, *tensors)

    def _made(self, function: Any, scopes: tuple[LiveScope, ...], *tensors: Any) -> Copy:
        """A new instrumented copy, which is kept for later calls.

        Args:
            tensors: those that the function is called with, and those that it captures.
        """
        # Read first: what an analysis drops while the copy is made makes it out of date.
        generation = self.copies.generation
        source = _internals.graph_of(function)
        # By the name of the function: errors of the runtime show it.
        building = Building(_internals.FuncGraph(source.name), scopes, needs_gradient=True)
        iterations = self._iterations(source, building)
        building.modules = self._modules(source, scopes)
        instrument = Instrument(self.dispatcher, building, self.ids, read_variable)
        site = self._site(source, *tensors)
        if building.inner_passes is not None:
            site.iterations = iterations
        name = f"function {function_name(source)}"
        count = _internals.output_count(function)
        model = self._model_inputs(scopes, iterations)
        with falling_back(self.dispatcher, building, name) as made, instrument.building_copy():
            Replay(building.graph, instrument, model=model).function(site, count)
            if building.has_python and _internals.is_compiled(_internals.function_attrs(function)):
                refuse_compiled_only(source, building)
        instrument.warn(site.ids)
        payload = None
        if made.is_made and building.is_changed:
            self._warn_about_seeds(name, source)
            payload = self._payload(function, building)
        copy = Copy.of(scopes, building, payload, generation)
        if made.is_made:
            copy.executions = Executions.of_function(building)
        is_told_inside = made.is_made and iterations is not None and iterations.is_inside
        name = "" if is_told_inside else function_name(source)
        copy.report = _report(self.dispatcher.points, copy, building, iterations, name, model)
        building.forget()
        copy.remember(list(instrument.keys))
        self.copies.keep(function, copy, scopes)
        return copy

    def _payload(self, function: Any, building: Building) -> tuple[Any, Sequence[Any]]:
        """Return the concrete function of an instrumented copy, and the tensors that traced
        routines use, which follow the vanilla inputs."""
        attributes = self._attributes(function, building)
        instrumented = _internals.instrumented(function, building.graph, attributes)
        return instrumented, list(building.graph.external_captures)

    def _modules(self, source: Any, scopes: Sequence[LiveScope]) -> RunningModules | None:
        """What reports the modules that a function calls; None if they are not reported.

        Args:
            source: its graph.
        """
        points = self.dispatcher.points
        is_wanted = points.wants_modules(scopes)
        if is_wanted and calls_modules(source) and not sets_variables_only(source):
            return RunningModules(points)
        return None

    def _site(self, source: Any, given: Sequence[Any], captured: Sequence[Any]) -> OpSite:
        """The site of a function.

        Args:
            source: its graph.
            given: the tensors that it is called with.
            captured: the tensors that it captures.
        """
        concrete = {
            id(tensor): value
            for tensor, value in zip(source.inputs, [*given, *captured], strict=True)
            # An argument tensor changes from call to call; a variable stays the same.
            if tensor.dtype == tf.resource
        }
        inputs = source.inputs[len(given) :]
        concrete |= {id(tensor): value for tensor, value in zip(inputs, captured, strict=True)}
        ids = self.ids.ids_of(source, function_name(source), concrete)
        layer_ids = self.ids.layer_ids(source, layers.EAGER.place())
        return OpSite(source, ids, layer_ids, captured=concrete)

    def _warn_about_seeds(self, name: str, source: Any) -> None:
        """Warn that a copy draws other random numbers than a vanilla run (CoverageWarning).

        One of a function that was traced under the scopes draws what the function would have drawn,
        unless there was another copy before.
        """
        drawing = first_seeded(source.get_operations())
        if drawing is None:
            return
        is_first = source not in self._drawing
        self._drawing.add(source)
        if is_first and _internals.is_made_since(source, self._attached_at):
            return
        warnings.warn(
            f"{name} draws random numbers by a seed ({drawing.name}) and was there before this "
            "scope: its instrumented copy begins their sequence anew. Stateless random operators "
            "and a tf.random.Generator go on",
            CoverageWarning,
            stacklevel=4,
        )

    def _iterations(self, source: Any, building: Building) -> GraphIterations | None:
        """The iterations in the runs of a function; None if they are not reported.

        Args:
            source: its graph.
            building: the copy, which reports those within its runs.
        """
        points = self.dispatcher.points
        if not points.is_wanted(building.scopes) or sets_variables_only(source):
            return None
        if function_name(source).endswith(".backward") or _internals.is_tangent(source.name):
            return None
        found = GraphIterations.of(source)
        if not found.is_plain:
            building.inner_passes = InnerPasses(points)
        return found

    def _model_inputs(
        self, scopes: Sequence[LiveScope], iterations: GraphIterations | None
    ) -> ModelInputs | None:
        """What the runs of a copy give to a model, if a tool has a routine where a pass ends.

        Args:
            iterations: those in its runs; None if they are not reported.
        """
        is_wanted = any(scope.routines_at(Point.FORWARD_END) for scope in scopes)
        is_plain = iterations is not None and iterations.is_plain
        return ModelInputs() if is_wanted and is_plain else None

    def _attributes(self, function: Any, building: Building) -> dict[str, Any]:
        """The attributes of the copy: those of the function, without XLA if it runs Python."""
        attributes = _internals.function_attrs(function)
        if building.has_python and _internals.is_compiled(attributes):
            warn_about_xla(function_name(_internals.graph_of(function)))
            attributes = {k: v for k, v in attributes.items() if k not in _XLA}
        return attributes

    @classmethod
    def remarks(cls) -> Sequence[str]:
        """Return what is noted outside of scopes."""
        return ["graphs built after `import amanda` note gradients and layers"]

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """Return one proof; if it fails, the driver is of no use."""
        return [Proof("functions", _prove)]


def _calling_in_tool_code(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    """The patch of ``AtomicFunction.call_flat``: what a tool calls runs in the tool's thread.

    The threads of the runtime, in which functions run otherwise, may all wait for the tool.
    """

    def call_flat(function: Any, *args: Any) -> Any:
        if not STATE.paused or not may_wait_for_tools() or not _internals.executing_eagerly():
            return vanilla(function, *args)
        # XLA uses none of these threads.
        if _internals.is_compiled(function.cached_definition.attr):
            return vanilla(function, *args)
        with _internals.stop_recording():
            outputs = evaluate(function.graph, args)
        if outputs is None:
            return vanilla(function, *args)
        _internals.note_handles(function, outputs)
        return outputs

    return named_as(vanilla, call_flat)


def _recording_call(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    """The patch of ``_TapeGradientFunctions.record``: what is recorded of an eager call can be
    instrumented as long as the tape has it, also where the program has dropped the function."""

    def record(functions: Any, flat_outputs: Any, inference_args: Any, input_tangents: Any) -> None:
        _internals.keep_differentiated(functions)
        vanilla(functions, flat_outputs, inference_args, input_tangents)

    return named_as(vanilla, record)


def _report(
    points: Points,
    copy: Copy,
    building: Building,
    iterations: GraphIterations | None,
    name: str,
    model: ModelInputs | None,
) -> Report | None:
    """A function of scopes that reports the start of a run of a copy to the tools; None if there is
    nothing to report.

    Args:
        iterations: those in its runs; None where none is reported.
        name: the function's name to report them by; "" where they are reported from within a run.
    """
    found, inner = iterations or GraphIterations(), building.inner_passes
    modules = building.modules if building.tells_modules else None
    name = "" if iterations is None else name
    if not name and modules is None and inner is None:
        return None
    count = None if copy.executions is None else copy.executions.add
    take = dict if model is None else model.take
    told = name, found.trains, found.differentiates, count, modules, inner, take
    return lambda scopes: GraphRun(points, scopes, *told)


def function_name(graph: Any) -> str:
    """A function's name in ids, without the counter that TensorFlow adds to it."""
    derived = _DERIVED.match(graph.name)
    if derived:
        return f"{derived[2]}.{derived[1]}"
    return re.sub(r"[^\w.<>-]+", "_", graph.name) or "function"


def read_variable(handle: Any, dtype: Any) -> Any:
    """The value of the variable that a resource handle stands for; None if it has none.

    Args:
        dtype: its type; None to ask the handle.
    """
    with _internals.eager_mode(), _internals.stop_recording():
        dtype = dtype or _internals.variable_dtype(handle)
        if dtype is None:
            return None
        try:
            return _internals.read_variable(handle, dtype)
        except tf.errors.OpError:
            return None


def _prove() -> Sequence[str]:
    """Double the weight of a product in a tiny function, and differentiate it."""
    tool = Doubler()
    product = tf.function(lambda x, w: x @ w)
    x, w = tf.ones([2, 2]), tf.ones([2, 2])
    with amanda.apply(tool, drivers=[TensorFlowFunctionDriver]), tf.GradientTape() as tape:
        tape.watch([x, w])
        y = product(x, w)
    return tool.problems("a function", [y, *tape.gradient(y, [x, w])])
