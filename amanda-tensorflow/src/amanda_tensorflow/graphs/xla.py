"""Functions that XLA compiles, which cannot run Python: they run without XLA, or vanilla.

Some operators run on the CPU in code of XLA only: TensorFlow's kernels for CPUs refuse some
convolutions, which is why Keras compiles a function of its own around each of them. Such a function
must not lose XLA for a routine's sake::

    kind = compiled_only(graph)     # "Conv3D", or ""
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from amanda.errors import CapabilityError, CoverageWarning
from amanda.tool import vanilla
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.running_vanilla import NotInstrumentableError

_CHANNELS_FIRST = frozenset({"NCHW", "NCDHW"})

_GROUPED = {
    "Conv2D": (lambda op: (op.inputs[0], op.inputs[1])),
    "Conv2DBackpropInput": (lambda op: (op.outputs[0], op.inputs[1])),
    "Conv2DBackpropFilter": (lambda op: (op.inputs[0], op.outputs[0])),
}
"""By type of a convolution, its image and its kernel."""


def compiled_only(graph: Any) -> str:
    """The type of an operator of a graph that no kernel of the CPU can run; "" without one.

    Operators in functions that the graph calls count, and the gradients of its own. Where there is
    a GPU the operators are taken to run there.
    """
    if tf.config.get_visible_devices("GPU"):
        return ""
    for op in _operators(graph, set()):
        if op.type.startswith("Conv3D"):
            if op.get_attr("data_format").decode() in _CHANNELS_FIRST and not _runs_first():
                return str(op.type)
        elif op.type in _GROUPED and _is_grouped(op) and not _runs_groups():
            return str(op.type)
    return ""


def refuse_compiled_only(graph: Any, building: Building) -> None:
    """Refuse to run a function without XLA for the sake of routines where the CPU cannot.

    Args:
        graph: of the vanilla function.
        building: its copy, which calls Python.

    Raises:
        NotInstrumentableError: an operator of it is in need of XLA: the function runs vanilla.
        CapabilityError: likewise, and a tool replaces an operator.
    """
    kind = compiled_only(graph)
    if kind:
        error = CapabilityError if building.is_replaced else NotInstrumentableError
        raise error(
            f"this {kind} runs on a CPU by XLA only, which cannot run Python routines: mark the "
            "routines @amanda.traceable"
        )


def _operators(graph: Any, seen: set[int]) -> Iterator[Any]:
    """The operators of a graph, and of the functions that it calls."""
    seen.add(id(graph))
    for op in graph.get_operations():
        yield op
        for _, callee in _internals.known_callees(op):
            if id(callee.graph) not in seen:
                yield from _operators(callee.graph, seen)


def _is_grouped(op: Any) -> bool:
    """True if a convolution has several groups of channels, as far as is known."""
    image, kernel = _GROUPED[op.type](op)
    if image.shape.rank is None or kernel.shape.rank is None:
        return False
    is_first = op.get_attr("data_format").decode() in _CHANNELS_FIRST
    channels, taken = image.shape[1 if is_first else -1], kernel.shape[-2]
    return channels is not None and taken is not None and channels != taken


@functools.cache
def _runs_groups() -> bool:
    """True if the CPU differentiates grouped convolutions: with oneDNN it does (2.16 to 2.21)."""

    def differentiate() -> None:
        one, sizes, strides, nn = tf.ones([1, 1, 1, 2]), [1, 1, 1, 2], [1] * 4, tf.compat.v1.nn
        nn.conv2d_backprop_input(sizes, one, one, strides, "VALID")
        nn.conv2d_backprop_filter(one, sizes, one, strides, "VALID")

    return _runs(differentiate)


@functools.cache
def _runs_first() -> bool:
    """True if the CPU has three-dimensional convolutions whose channels come first."""
    return _runs(
        lambda: tf.nn.conv3d(tf.ones([1] * 5), tf.ones([1] * 5), [1] * 5, "VALID", "NCDHW")
    )


def _runs(operator: Any) -> bool:
    """True if an operator runs, tried eagerly on tensors of one element or two."""
    with vanilla(), tf.init_scope(), _internals.stop_recording(), tf.device("CPU:0"):
        try:
            operator()
        except tf.errors.OpError:
            return False
    return True


def warn_about_xla(name: str) -> None:
    """Warn that a function runs without XLA (CoverageWarning)."""
    warnings.warn(
        f"{name} is compiled with XLA, which cannot run Python routines: under this scope it runs "
        "without XLA; mark the routines @amanda.traceable to keep it",
        CoverageWarning,
        stacklevel=4,
    )
