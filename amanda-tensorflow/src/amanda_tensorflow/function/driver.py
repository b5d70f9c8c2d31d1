"""The driver for ``tf.function``: instrumented copies of traced functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

import amanda
from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.base_driver import Copy, GraphModeDriver, raise_original
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.instrument import SCOPE, Instrument
from amanda_tensorflow.graphs.replay import Replay, warn_about_xla
from amanda_tensorflow.graphs.self_test import Doubler
from amanda_tensorflow.graphs.sites import Site
from amanda_tensorflow.plugin import TensorFlowFunctionDriver

_DERIVED = re.compile(r"__(backward|forward)_(.+?)(?:_\d+)?$")
_XLA = ("_XlaMustCompile", "_XlaHasReferenceVars", "_XlaScope")


@attrs.frozen(eq=False)
class FunctionCopy:
    """What runs instead of a vanilla function.

    Attributes:
        function: the copy.
        captures: tensors that traced routines use, which follow the vanilla inputs.
    """

    function: Any
    captures: Sequence[Any]


class FunctionDriver(TensorFlowFunctionDriver, GraphModeDriver):
    """Runs instrumented copies of functions in place of the vanilla ones.

    A function that was traced before is instrumented at its first call under a
    scope, without being traced again, and is vanilla afterwards. Functions of
    gradients come the same way.
    """

    def patch(self) -> None:
        self.patches.wrap(_internals.ConcreteFunction, "_call_flat", self._calling)

    def _calling(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def call_flat(function: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
            scopes = self.dispatcher.scopes()
            if (
                not scopes
                or not _internals.executing_eagerly()
                or _internals.is_instrumented(function)
            ):
                return vanilla(function, tensor_inputs, captured_inputs)
            copy = self.found(function, scopes)
            if copy is None:
                with self.lock:
                    copy = self.found(function, scopes)
                    if copy is None:
                        copy = self._copied(function, scopes, tensor_inputs, captured_inputs)
            ready = copy.payload
            if ready is None:
                return vanilla(function, tensor_inputs, captured_inputs)
            try:
                return vanilla(ready.function, tensor_inputs, [*captured_inputs, *ready.captures])
            except Exception as error:
                raise_original(error)
                raise

        return call_flat

    def _copied(
        self,
        function: Any,
        scopes: tuple[LiveScope, ...],
        given: Sequence[Any],
        captured: Sequence[Any],
    ) -> Copy:
        """A new instrumented copy of a function; it is kept for later calls."""
        # What an analysis drops while the copy is made makes it out of date.
        generation = self.generation
        source = _internals.graph_of(function)
        graph = _internals.FuncGraph(f"{source.name}_{SCOPE}")
        building = Building(graph, scopes, needs_gradient=True)
        instrument = Instrument(self.dispatcher, building, self.known, read_variable)
        concrete = {
            id(tensor): value
            for tensor, value in zip(source.inputs, [*given, *captured], strict=True)
            # A tensor that is given is another one at the next call; a variable is the same.
            if tensor.dtype == tf.resource
        }
        inputs = source.inputs[len(given) :]
        concrete |= {id(tensor): value for tensor, value in zip(inputs, captured, strict=True)}
        site = Site(
            source, self.known.ids_of(source, function_name(source), concrete), captured=concrete
        )
        with instrument.building_copy():
            Replay(graph, instrument).function(site, _internals.output_count(function))
        instrument.warn(site.ids)
        payload = None
        if building.is_changed:
            payload = FunctionCopy(
                _internals.instrumented(function, graph, self._attributes(function, building)),
                list(graph.external_captures),
            )
        copy = Copy.of(scopes, building, payload, generation)
        copy.remember(list(instrument.op_ids))
        self.keep(function, copy, scopes)
        return copy

    def _attributes(self, function: Any, building: Building) -> dict[str, Any]:
        """The attributes of the copy: those of the function, without XLA if it runs Python."""
        attributes = _internals.function_attrs(function)
        if building.has_python and _internals.is_compiled(attributes):
            warn_about_xla(function_name(_internals.graph_of(function)))
            attributes = {k: v for k, v in attributes.items() if k not in _XLA}
        return attributes

    @classmethod
    def self_test(cls) -> Sequence[str]:
        """Double the weight of a product in a tiny function, and differentiate it."""
        tool = Doubler()
        product = tf.function(lambda x, w: x @ w)
        x, w = tf.ones([2, 2]), tf.ones([2, 2])
        with amanda.apply(tool, drivers=[TensorFlowFunctionDriver]), tf.GradientTape() as tape:
            tape.watch([x, w])
            y = product(x, w)
        return tool.problems("a function", [y, *tape.gradient(y, [x, w])])


def function_name(graph: Any) -> str:
    """A function's name as ids show it, without the counter that TensorFlow puts in."""
    derived = _DERIVED.match(graph.name)
    if derived:
        return f"{derived[2]}.{derived[1]}"
    return re.sub(r"[^\w.<>-]+", "_", graph.name) or "function"


def read_variable(handle: Any, dtype: Any) -> Any:
    """The value of the variable that a resource handle stands for; None if it has none."""
    with _internals.eager_mode(), _internals.stop_recording():
        dtype = dtype or _internals.handle_dtype(handle)
        if dtype is None:
            return None
        try:
            return _internals.read_variable(handle, dtype)
        except tf.errors.OpError:
            return None
