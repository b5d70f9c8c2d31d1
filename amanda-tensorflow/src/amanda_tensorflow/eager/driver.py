"""The driver ``tensorflow-eager``: the patches that it puts in place while it is attached.

Operators pass two places (:mod:`amanda_tensorflow.eager.fast_path`); tapes and Keras layers
pass those that are patched here.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

import amanda
from amanda.interface.action import Action
from amanda.interface.proofs import Proof
from amanda.python.patching import PatchSet, named_as
from amanda.state import STATE, WeakMembers
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.autodiff import ISOLATED, is_tensor, substitute
from amanda_tensorflow.eager.backward_ops import MarkedGradients
from amanda_tensorflow.eager.fast_path import FastPath
from amanda_tensorflow.eager.layer_calls import apart, is_symbolic, step_optimizer, told_call
from amanda_tensorflow.eager.op_request import Vanilla
from amanda_tensorflow.eager.recomputation import beginning_again, noting_places, recomputing
from amanda_tensorflow.eager.slow_path import SlowPath
from amanda_tensorflow.eager.tape_marks import Mark
from amanda_tensorflow.eager.tracker import LOCAL, EagerTracker, unwatched
from amanda_tensorflow.eager.variable_readings import VariableValues
from amanda_tensorflow.gradient_map import recording
from amanda_tensorflow.keras_layers import optimizers
from amanda_tensorflow.keras_layers import recording as layers
from amanda_tensorflow.plugin import TensorFlowEagerDriver

_CUSTOM_GRADIENTS = "custom gradients"
_LAYERS = "calls of Keras layers"
_NO_CONTEXT = contextlib.nullcontext()
_LEAF_SUMS = "sums of gradients of leaves"
_PIPELINES = "functions of input pipelines, which run in TensorFlow's threads"


class EagerModeDriver(TensorFlowEagerDriver):
    """Instruments the operators that TensorFlow runs at once."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._values = VariableValues()
        self._gradients = MarkedGradients(dispatcher)
        self._trackers: WeakMembers[EagerTracker] = WeakMembers()
        self._slow_path: SlowPath | None = None

    # -- life cycle -------------------------------------------------------

    def patch(self, patches: PatchSet) -> None:
        """Patch TensorFlow, and follow the calls of Keras."""
        vanilla = Vanilla(
            _internals.PYWRAP.TFE_Py_FastPathExecute,
            _internals.EXECUTE.execute,
            _internals.EXECUTE.record_gradient,
        )
        slow_path = self._slow_path = SlowPath(self.dispatcher, vanilla, self._values)
        fast_path = FastPath(self.dispatcher, vanilla, self._values, slow_path)
        patches.wrap(_internals.PYWRAP, "TFE_Py_FastPathExecute", fast_path.patch)
        patches.wrap(_internals.EXECUTE, "execute", slow_path.patch)
        patches.wrap(_internals.EXECUTE, "record_gradient", _record_gradient)
        patches.wrap(_internals.RECORD, "record_operation", self._record_operation)
        patches.wrap(_internals.IMPERATIVE_GRAD, "imperative_grad", self._imperative_grad)
        if _CUSTOM_GRADIENTS not in self.switched_off:
            patches.wrap(_internals.CUSTOM_GRADIENT, "_eager_mode_decorator", noting_places)
        patches.wrap(tf.GradientTape, "watch", beginning_again)
        patches.wrap(tf.data.Dataset, "_apply_debug_options", self._reading_dataset)
        recording.EAGER.run = self._gradients.run
        recording.EAGER.begin = self._gradients.begin
        if _LAYERS not in self.switched_off:
            layers.EAGER.call, layers.EAGER.place = _call_layer, _place
        optimizers.EAGER.call = step_optimizer

    def detach(self) -> None:
        """Undo every patch."""
        if layers.EAGER.call is _call_layer:
            layers.EAGER.call, layers.EAGER.place = None, layers.LayerPath
        if recording.EAGER.run == self._gradients.run:
            recording.EAGER.run = recording.EAGER.begin = None
        optimizers.EAGER.call = None
        slow_path, self._slow_path = self._slow_path, None
        if slow_path is not None:
            slow_path.leave(self.patches.undo)
        super().detach()
        self._values.clear()
        for tracker in self._trackers:
            # Of threads that have yet to find out; it would keep the tools alive.
            tracker.active = ()
            tracker.replan()

    def enter_thread(self) -> None:
        """Give the current thread a tracker."""
        tracker = LOCAL.tracker
        # A scope that another thread has ended leaves the one of its driver here.
        if tracker is None or tracker not in self._trackers:
            tracker = LOCAL.tracker = EagerTracker(self.dispatcher)
            self._trackers.add(tracker)
        tracker.replan()

    def exit_thread(self) -> None:
        """Take the tracker away from the current thread."""
        tracker, LOCAL.tracker = LOCAL.tracker, None
        if tracker is not None:
            tracker.clear()

    def invalidate(self) -> None:
        """Make all threads ask for their plans again."""
        for tracker in self._trackers:
            tracker.replan()

    def new_iteration(self) -> None:
        """Restart the operator ids' counters of the current thread."""
        if LOCAL.tracker is not None:
            LOCAL.tracker.ids.new_iteration()

    # -- routines ---------------------------------------------------------

    def vanilla(self) -> AbstractContextManager[None]:
        """Mute the current thread's tracker."""
        return unwatched()

    def ad_isolated(self) -> AbstractContextManager[Any]:
        """``stop_recording``, of all tapes and accumulators."""
        return _internals.stop_recording()

    def routine(
        self, action: Action, selected: Sequence[Any], isolated: bool
    ) -> AbstractContextManager[Any]:
        """A context that stops tapes, if the routine is isolated; core pauses the thread."""
        return ISOLATED if isolated else _NO_CONTEXT

    def tool_raised(self, error: BaseException) -> None:
        """Keep it for the operator that calls Python, if one does: TensorFlow raises another."""
        tracker = LOCAL.tracker
        if tracker is not None and tracker.failures:
            tracker.failures[-1] = error

    def is_tensor(self, value: Any) -> bool:
        """See :func:`amanda_tensorflow.eager.autodiff.is_tensor`."""
        return is_tensor(value)

    def substitute(self, old: Any, new: Any, action: Action) -> Any:
        """See :func:`amanda_tensorflow.eager.autodiff.substitute`."""
        return substitute(old, new, action)

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """A proof for all operators, and one for each mechanism that the driver can do without."""
        return [
            Proof("eager operators and their gradients", _prove),
            Proof(_CUSTOM_GRADIENTS, _prove_custom_gradients, "recomputed operators have new ids"),
            Proof(_LAYERS, _prove_layers, "op ids have no names of layers", "keras"),
        ]

    # -- tapes ------------------------------------------------------------

    def _record_operation(self, vanilla: Any) -> Any:
        """The patch of ``record.record_operation``.

        A function with a custom gradient ends with a call of it, for outputs of Identities.
        """

        def record_operation(
            op_type: Any,
            output_tensors: Any,
            input_tensors: Any,
            backward_function: Any,
            forward_function: Any = None,
        ) -> Any:
            tracker = LOCAL.tracker
            if tracker is not None and output_tensors:
                place = tracker.places[-1] if tracker.places else None
                if place is not None:
                    backward_function = recomputing(self.dispatcher, place, backward_function)
                mark = tracker.owner_of(output_tensors[0])
                if mark is not None:
                    backward_function = self._owned(mark, len(input_tensors), backward_function)
            return vanilla(
                op_type, output_tensors, input_tensors, backward_function, forward_function
            )

        return named_as(vanilla, record_operation)

    def _owned(self, mark: Mark, inputs: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """A custom gradient function whose operators are backward operators of `mark`'s operator.

        Args:
            inputs: how many inputs the record has.
        """
        owner = mark.with_inputs(inputs)
        run = self._gradients.run

        def backward_function(*out_grads: Any) -> Any:
            return run(owner, lambda gradients: function(*gradients), out_grads)

        return backward_function

    def _reading_dataset(self, vanilla: Any) -> Any:
        """The patch of ``Dataset._apply_debug_options``, which whatever reads a data set calls."""
        counted = weakref.WeakSet[Any]()

        def _apply_debug_options(dataset: Any) -> Any:
            if LOCAL.tracker is not None and not self.dispatcher.is_paused():
                for function in _internals.pipeline_functions(dataset) - set(counted):
                    counted.add(function)
                    self.dispatcher.not_seen(_PIPELINES)
            return vanilla(dataset)

        return named_as(vanilla, _apply_debug_options)

    def _imperative_grad(self, vanilla: Any) -> Any:
        """The patch of ``imperative_grad.imperative_grad``, which runs every backward pass."""

        def imperative_grad(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            tracker = LOCAL.tracker
            if tracker is None or tracker.muted or STATE.paused:
                return vanilla(tape, target, sources, *args, **kwargs)
            # While a function is traced nothing is computed: its run is reported instead.
            tells = tracker.tells and not tracker.depth and _internals.executing_eagerly()
            # A tape around this one differentiates the gradients.
            continues = _internals.is_on_tape(target, kwargs.get("output_gradients"))
            told = self.dispatcher.points.backward_begins(continues) if tells else ()
            outer, failed = tracker.enter_backward(), True
            try:
                results = vanilla(tape, target, sources, *args, **kwargs)
                failed = False
                if tracker.sums and tracker.depth == 1 and not self.dispatcher.is_paused():
                    return self._gradients.summed(tracker, sources, results)
                return results
            finally:
                left = tracker.exit_backward(outer, continues)
                self.dispatcher.points.backward_ends(told, continues, failed)
                if left:
                    self.dispatcher.not_seen(_LEAF_SUMS, left)
                if tracker.recomputation is not None:
                    tracker.recomputation.differentiated(tape)

        return named_as(vanilla, imperative_grad)


def _record_gradient(vanilla: Any) -> Any:
    """The patch of ``execute.record_gradient``.

    TensorFlow's generated functions call it after the slow path, which has recorded the operator
    already if it did not run vanilla.
    """

    def record_gradient(op_name: Any, inputs: Any, attrs: Any, outputs: Any) -> Any:
        tracker = LOCAL.tracker
        if tracker is not None and tracker.recorded is not None and tracker.is_recorded(outputs):
            return None
        return vanilla(op_name, inputs, attrs, outputs)

    return named_as(vanilla, record_gradient)


def _place() -> layers.LayerPath:
    """The Keras layers that run in the current thread."""
    tracker = LOCAL.tracker
    places = tracker.ids.places if tracker is not None else ()
    if not places or places[-1].phase:
        return layers.LayerPath()
    place = places[-1]
    return layers.LayerPath(place.scope.rstrip("/"), place.module, place.layer)


def _call_layer(vanilla: Any, layer: Any, args: Any, kwargs: Any) -> Any:
    """Call a Keras layer, which runs at once; called by the patch of ``Layer.__call__``."""
    tracker = LOCAL.tracker
    if tracker is None or tracker.muted or STATE.paused:
        return vanilla(layer, *args, **kwargs)
    if tracker.outdated:
        tracker.refresh()
    method = getattr(vanilla, "__name__", "")
    if not getattr(layer, "built", True):
        vanilla = apart(vanilla, tracker)
    is_outermost, places = not tracker.ids.nesting, tracker.ids.places
    # A class that calls its base class's ``__call__``: one call.
    is_part = bool(places) and places[-1].layer() is layer
    is_told = tracker.tells and not is_part and not is_symbolic((args, kwargs))
    tracker.move(tracker.ids.enter_layer, layer, method)
    try:
        if not is_told:
            return vanilla(layer, *args, **kwargs)
        trains = kwargs.get("training") is not False if is_outermost else None
        with told_call(tracker, layer, (args, kwargs), trains) as returned:
            return returned(vanilla(layer, *args, **kwargs))
    finally:
        tracker.move(tracker.ids.leave)


def _prove() -> Sequence[str]:
    """Mask the weight of a product, square it, and differentiate it."""
    seen: list[str] = []
    mask = tf.constant([[1.0], [0.0]])

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.get_op_id())
        if context.get_op().type == "MatMul":
            context.insert_before_op(lambda weight: weight * mask, inputs=[1])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    x, weight = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [4.0]])
    with amanda.apply(tool, drivers=[TensorFlowEagerDriver]), tf.GradientTape() as tape:
        tape.watch([x, weight])
        product = tf.matmul(x, weight)
        y = product * product
        dx, dw = tape.gradient(y, [x, weight])
    wanted = {"y": (y, [[9.0]]), "dx": (dx, [[18.0, 0.0]]), "dw": (dw, [[6.0], [12.0]])}
    # The sum of both gradients of the product is not an operator of the program.
    expected_ids = ["/MatMul:0", "/Mul:0"]
    problems = [] if seen == expected_ids else [f"operators seen: {seen}, not {expected_ids}"]
    for what, (got, expected) in wanted.items():
        if got.numpy().tolist() != expected:
            problems.append(f"{what} is {got.numpy().tolist()}, not {expected}")
    return problems


def _prove_custom_gradients() -> Sequence[str]:
    """Differentiate a function with a gradient of its own, and one that is recomputed."""
    x = tf.constant(2.0)
    tripled = tf.custom_gradient(lambda x: (x * 3.0, lambda gradient: gradient * 5.0))
    recomputed = tf.recompute_grad(lambda x: x * x)
    # What the first one's gradient runs belongs to the Identity of its result; the operators that
    # the second one runs again have the ids that they had.
    ids = ["/Mul:0", "/Identity:0", "/Identity:0/grad/Mul:0"]
    again = [*ids[:2], "/Identity:0/grad/Identity:0", "/Mul:0", "/Mul:0/grad/Mul:0"]
    again += ["/Mul:0/grad/Mul:1", "/Identity:0/grad/Identity:1"]
    problems: list[str] = []
    for function, wanted in (tripled, (6.0, 5.0, ids)), (recomputed, (4.0, 4.0, again)):
        seen: list[str] = []
        tool = _noting(seen)
        with amanda.apply(tool, drivers=[TensorFlowEagerDriver]), tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            slope = tape.gradient(y, x)
        found = float(y), float(slope), seen
        if found != wanted:
            problems.append(f"value, gradient and operators {found} instead of {wanted}")
    return problems


def _noting(seen: list[str]) -> amanda.Tool:
    """A tool that notes the ids of all executions."""

    def forward(context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(lambda: seen.append(op_id), inputs=[])

    def backward(context: amanda.OpContext) -> None:
        op_id = str(context.get_backward_op_id())
        context.insert_before_backward_op(lambda: seen.append(op_id), grad_outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    return tool


def _prove_layers() -> Sequence[str]:
    """Call a Keras layer, where Keras runs on TensorFlow."""
    keras = sys.modules["keras"]
    if keras.config.backend() != "tensorflow":
        return []
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))
    layer = keras.layers.ReLU(name="amanda_proof")
    x = tf.constant([1.0])
    with amanda.apply(tool, drivers=[TensorFlowEagerDriver]):
        layer(x)
    if not any(op_id.startswith("amanda_proof/") for op_id in seen):
        return [f"no operator of the layer among {seen}"]
    return []
