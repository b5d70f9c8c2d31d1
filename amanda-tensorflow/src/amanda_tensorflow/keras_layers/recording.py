"""Notes which Keras layer makes which operators while graphs are built.

The name of an operator in a graph does not tell its layer: TensorFlow numbers a name scope that is
opened a second time, and Keras opens that of each layer twice (``net_1/c1_1/convolution`` is in the
layer ``c1`` of ``net``; observed in Keras 3.15). Therefore each call of a layer within a graph is
noted, from the import of Keras beside Amanda on, as gradient calls are: positions and names only,
in a table that is dropped with the graph. In eager execution nothing is noted; there the eager
driver follows the calls itself, while it is attached::

    install()
    ...                             # functions are traced
    layer_calls(graph)["net_1/c1_1/convolution"].layers()
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.python.patching import OWN_FRAMES_HIDDEN
from amanda_tensorflow import _internals
from amanda_tensorflow.keras_layers.base_classes import BaseClass
from amanda_tensorflow.keras_layers.module_names import is_plain_module, name_within

TensorName = tuple[str, int]
"""A tensor of a graph: its operator's name and its index among the outputs."""

_NUMBERS = itertools.count()


@attrs.define(eq=False)
class LayerCall:
    """One call of a layer while a graph was built.

    Attributes:
        layer: weak reference to the layer.
        name: its name in paths.
        caller: the call, in the same graph, within which it was called; None if there is none.
        begin, end: how many operators the graph had before and after it.
        entered, left: numbers that tell the order of the calls' begins and ends.
        inputs, outputs: the tensors of the graph that it was given, and that it gave.
        builds: whether it was made to build a model of Keras, and computes nothing.
        is_of_keras: whether a layer of Keras was called, and no module of ``tf.Module``.
    """

    layer: weakref.ref[Any]
    name: str
    caller: LayerCall | None
    begin: int
    end: int
    entered: int = attrs.field(factory=_NUMBERS.__next__)
    left: int = -1
    inputs: Sequence[TensorName] = ()
    outputs: Sequence[TensorName] = ()
    builds: bool = False
    is_of_keras: bool = True

    def layers(self) -> Sequence[LayerCall]:
        """The calls that lead to this one, outermost first, with itself."""
        found: list[LayerCall] = []
        call: LayerCall | None = self
        while call is not None:
            found.append(call)
            call = call.caller
        return found[::-1]


@attrs.frozen
class LayerPath:
    """A place in the layers of a program.

    Attributes:
        text: as ids begin, ``net@1/c1``; "" outside of layers.
        module: the names alone, ``net/c1``.
        layer: weak reference to the innermost layer; None outside of layers.
    """

    text: str = ""
    module: str = ""
    layer: weakref.ref[Any] | None = attrs.field(default=None, eq=False)


@attrs.define
class EagerLayers:
    """The eager driver's way to follow the calls of layers.

    Attributes:
        place: gives the layers that run in the current thread.
        call: called with the vanilla ``Layer.__call__``, the layer, and its arguments; returns what
            the layer does. None while no driver is attached.
    """

    place: Callable[[], LayerPath] = LayerPath
    call: Callable[[Any, Any, Any, Any], Any] | None = None


class _RunningLayers(threading.local):
    """The calls of layers that run in one thread, with weak references to their graphs."""

    def __init__(self) -> None:
        self.calls: list[tuple[weakref.ref[Any], LayerCall]] = []


EAGER = EagerLayers()
_RUNNING = _RunningLayers()
_CALLS: weakref.WeakKeyDictionary[Any, list[LayerCall]] = weakref.WeakKeyDictionary()
"""The calls of layers by graph, in the order in which they ended."""


def _noting(vanilla: Any) -> Any:
    """The patch of ``Layer.__call__``."""

    # AutoGraph converts functions by their module, and leaves those of Keras as they are.
    @functools.wraps(vanilla)
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        with OWN_FRAMES_HIDDEN:
            if _internals.executing_eagerly():
                follow = EAGER.call
                if follow is None:
                    return vanilla(layer, *args, **kwargs)
                return follow(vanilla, layer, args, kwargs)
            return note_call(vanilla, layer, args, kwargs)

    return __call__


_METHODS = {"keras": "__call__", "tf_keras": "__call__"}

install = BaseClass("layers", "Layer", _METHODS, _noting).install
"""Note the calls of layers from now on; harmless when called twice."""


def note_call(vanilla: Any, layer: Any, args: Any, kwargs: Any) -> Any:
    """Call a layer or module while a graph is built, and note the call."""
    graph = _internals.default_graph()
    running = _RUNNING.calls
    caller = next((call for where, call in reversed(running) if where() is graph), None)
    outer = None if caller is None else caller.layer()
    name = name_within(outer, layer)
    if name is None or (caller is not None and outer is layer):
        # A class that calls its base class's ``__call__``: one call.
        return vanilla(layer, *args, **kwargs)
    count = _internals.count_operations(graph)
    call = LayerCall(weakref.ref(layer), name, caller, count, count)
    call.is_of_keras = not is_plain_module(layer)
    running.append((weakref.ref(graph), call))
    result = None
    try:
        result = vanilla(layer, *args, **kwargs)
        return result
    finally:
        running.pop()
        _end(graph, call, (args, kwargs), result)


def _end(graph: Any, call: LayerCall, inputs: Any, outputs: Any) -> None:
    """Note a call that has ended."""
    call.end, call.left = _internals.count_operations(graph), next(_NUMBERS)
    given = _flat(inputs)
    call.builds = any(type(item).__name__ == "KerasTensor" for item in given)
    call.inputs, call.outputs = _names(given, graph), _names(_flat(outputs), graph)
    _CALLS.setdefault(graph, []).append(call)


def _flat(value: Any) -> Sequence[Any]:
    """The items of nested values; none of those that TensorFlow cannot put in an order."""
    try:
        return tf.nest.flatten(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        return ()


def _names(items: Sequence[Any], graph: Any) -> Sequence[TensorName]:
    """The names of the tensors among some values: in the graph, for those that it captures too."""
    tensors = [item for item in items if isinstance(item, tf.Tensor)]
    own = [not isinstance(t, _internals.EagerTensor) and t.graph is graph for t in tensors]
    captured = {}
    if not all(own):
        captured = {id(outer): inner for outer, inner in getattr(graph, "captures", ())}
    found = [
        tensor if is_own else captured.get(id(tensor))
        for tensor, is_own in zip(tensors, own, strict=True)
    ]
    return tuple((t.op.name, t.value_index) for t in found if t is not None)


def calls_in(graph: Any) -> Sequence[LayerCall]:
    """The calls of layers that compute, if operators or not, in the order in which they ended."""
    return [call for call in _CALLS.get(graph, ()) if not call.builds]


def made_by_keras(op: Any) -> bool:
    """True if a layer of Keras has made an operator of a graph."""
    call = layer_calls(op.graph).get(op.name)
    return call is not None and call.is_of_keras


def layer_calls(graph: Any) -> Mapping[str, LayerCall]:
    """By name of an operator of `graph`, the innermost call of a layer that made it."""
    calls = _CALLS.get(graph)
    if not calls:
        return {}
    operations = graph.get_operations()
    found: dict[str, LayerCall] = {}
    # An inner call ends before the one around it.
    for call in reversed(calls):
        for op in operations[call.begin : call.end]:
            found[op.name] = call
    return found
