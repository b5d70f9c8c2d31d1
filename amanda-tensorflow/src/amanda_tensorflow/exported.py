"""Reads models of Keras, SavedModels and files of LiteRT, for ``amanda.align``."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import tensorflow as tf

from amanda.errors import FileError, UnsupportedProgramError
from amanda.interface.driver import ExportedNode
from amanda_tensorflow import _internals
from amanda_tensorflow.keras_layers.recording import layer_calls
from amanda_tensorflow.mapping_rules import canonical
from amanda_tensorflow.operators.types import CONTROL_FLOW, is_op

_OTHERS: Mapping[str, str] = {
    "conv": "conv1d conv2d conv3d", "einsum": "linear matmul", "index_select": "embedding",
    "matmul": "linear",
}  # fmt: skip
"""By the type of a node, further types of the operators that it may be."""

_LITE: Mapping[str, str] = {
    "average_pool_2d": "avg_pool2d", "batch_matmul": "matmul linear", "cast": "to",
    "concatenation": "cat", "conv_2d": "conv2d", "depthwise_conv_2d": "conv2d", "fill": "full",
    "fully_connected": "linear matmul", "gather": "embedding index_select",
    "max_pool_2d": "max_pool2d", "pack": "stack", "padv2": "pad", "reduce_max": "amax",
    "select": "where", "select_v2": "where", "strided_slice": "getitem", "transpose": "permute",
    "transpose_conv": "conv_transpose2d", "unpack": "unbind",
}  # fmt: skip
"""By an operator of LiteRT, the types of the operators that it computes, beside its own name."""

_JOINED = frozenset(
    """add bias_add detach getitem mul neg read_variable relu relu6 reshape rsqrt shape size sqrt
    squeeze stack sub unsqueeze""".split()
)
"""Types of operators that the converter of LiteRT computes beforehand, or joins with those around
them: normalizations and biases with the layer before."""

_TRACED = frozenset(("shape", "size"))
"""Types of operators that TensorFlow computes while it traces, where the sizes are known."""

_NUMBER = re.compile(r"_\d+$")
"""What TensorFlow adds to the name scope of a layer, which Keras opens twice (3.15)."""

_SIGNATURE = "serving_default"


def nodes_of(target: Any, modules: Collection[str]) -> list[ExportedNode] | None:
    """Return the nodes of a program or of its file; None for anything else.

    Args:
        target: a model of Keras, what ``tf.saved_model.load`` returns, a concrete function, an
            interpreter of LiteRT, or a path.
        modules: the paths of the layers that have run.

    Raises:
        FileError: the file cannot be read.
        UnsupportedProgramError: the program does not tell its inputs.
    """
    layers = {str(path) for module in modules for path in PurePosixPath(module, "_").parents}
    if isinstance(target, (str, os.PathLike)):
        target = _read(Path(target))
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(target, keras.Model):
        target = _traced(target)
    if (signatures := getattr(target, "signatures", None)) is not None:
        if _SIGNATURE not in signatures:
            raise UnsupportedProgramError(f"align: the SavedModel has no signature {_SIGNATURE}")
        target = signatures[_SIGNATURE]
    if isinstance(target, tf.lite.Interpreter):
        return [*_of_lite(target, layers), ExportedNode(None, _JOINED)]
    if isinstance(target, _internals.ConcreteFunction):
        return [*_of_graph(target.graph, layers), ExportedNode(None, _TRACED)]
    return None


def _read(path: Path) -> Any:
    """Read a file or a folder; None for one of another kind."""
    try:
        if path.suffix == ".keras":
            return tf.keras.models.load_model(path, compile=False)
        if path.suffix == ".tflite":
            with warnings.catch_warnings():
                # It tells of its successor (2.21), whose package has no converter.
                warnings.simplefilter("ignore")
                return tf.lite.Interpreter(str(path))
        if (path / "saved_model.pb").exists():
            return tf.saved_model.load(path)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise FileError(f"{path} cannot be read: {reason}") from error
    return None


def _traced(model: Any) -> Any:
    """Return the function of a model of Keras.

    Raises:
        UnsupportedProgramError: it does not tell its inputs.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise UnsupportedProgramError(
            f"align: the model {model.name} does not tell its inputs; align with a SavedModel of it"
        )
    # A Sequential has one input, and no attribute ``input``.
    given = getattr(model, "input", inputs[0])
    specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), given)
    return tf.function(model).get_concrete_function(specs)


def _of_graph(graph: Any, layers: Collection[str]) -> Iterator[ExportedNode]:
    known = {
        name: "/".join(each.name for each in call.layers())
        for name, call in layer_calls(graph).items()
    }
    definition = graph.as_graph_def(add_shapes=True)
    functions = {function.signature.name: function for function in definition.library.function}
    for node, around, is_repeated in _flat(definition.node, functions):
        kind, name = canonical(node.op), node.name
        module = known[name] if name in known else _layer_of(f"{around}{name}", layers)
        types = frozenset({kind, *_OTHERS.get(kind, "").split()})
        yield ExportedNode(module, types, _shapes_of(node), (name,), is_repeated=is_repeated)


def _flat(
    nodes: Sequence[Any], functions: Mapping[str, Any], around: str = "", is_repeated: bool = False
) -> Iterator[tuple[Any, str, bool]]:
    """Yield the operators among some nodes and those of the functions that they call, the names of
    the calls around them, and whether a loop runs them."""
    for node in nodes:
        if is_op(node.op):
            yield node, around, is_repeated
            continue
        # In the order of names from the last one: of a loop the condition, then the body.
        for key in sorted(node.attr, reverse=True):
            value = node.attr[key]
            for called in (value.func, *value.list.func):
                if called.name in functions:
                    body, outer = functions[called.name].node_def, f"{around}{node.name}/"
                    is_inner = is_repeated or node.op in CONTROL_FLOW
                    yield from _flat(body, functions, outer, is_inner)


def _shapes_of(node: Any) -> list[tuple[int | None, ...]] | None:
    given = node.attr["_output_shapes"].list.shape
    if not given or any(shape.unknown_rank for shape in given):
        return None
    return [tuple(None if d.size < 0 else d.size for d in shape.dim) for shape in given]


def _layer_of(name: str, layers: Collection[str]) -> str:
    """Return the innermost layer in whose name scope a node is.

    Args:
        name: the node's name, ``net_1/c1_1/convolution``.
        layers: paths, ``net/c1``.
    """
    found = ""
    for part in name.split("/")[:-1]:
        inner = [f"{found}/{each}".lstrip("/") for each in (_NUMBER.sub("", part), part)]
        found = next((path for path in inner if path in layers), found)
    return found


def _of_lite(interpreter: Any, layers: Collection[str]) -> Iterator[ExportedNode]:
    """Yield a node for each operator that an operator of LiteRT tells to have become a part of it.

    The name of a tensor is that of the operators that the converter has joined, with a number at
    the end where it was taken.
    """
    tensors = {each["index"]: each for each in interpreter.get_tensor_details()}
    made = {each["index"] for each in interpreter.get_input_details()}
    for kind, inputs, outputs in _internals.lite_operators(interpreter):
        results = [tensors[index]["name"] for index in outputs if index in tensors]
        read = [tensors[i]["name"] for i in inputs if i in tensors and i not in made]
        made.update(outputs)
        names = [name for each in (*read, *results) for name in each.split(";") if "/" in name]
        # An output of the model has another name; it is of the layer that its input is of.
        for name in dict.fromkeys(names or [tensors[inputs[0]]["name"]]):
            leaf = canonical(name.rpartition("/")[2].rstrip("0123456789_"))
            types = {kind, *_LITE.get(kind, "").split(), leaf, *_OTHERS.get(leaf, "").split()}
            yield ExportedNode(_layer_of(name, layers), frozenset(types), None, (results[0],))
