"""Models made by onnx.helper, and sessions of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(
    nodes: Any,
    inputs: Any,
    outputs: Any,
    constants: Any = None,
    *,
    name: str = "Net",
    opset: int = 20,
    functions: Any = (),
    **extra: int,
) -> onnx.ModelProto:
    """A model; `inputs` and `outputs` are names to element types, `constants` names to arrays."""
    infos = [
        [helper.make_tensor_value_info(n, kind, None) for n, kind in part.items()]
        for part in (inputs, outputs)
    ]
    initializers = [numpy_helper.from_array(np.array(v), n) for n, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, name, *infos, initializers)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(*o) for o in extra.items())]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def session(made: onnx.ModelProto, *, optimized: bool = False, **options: Any) -> Any:
    """A session of a model."""
    chosen = ort.SessionOptions()
    if not optimized:
        chosen.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in options.items():
        setattr(chosen, key, value)
    return ort.InferenceSession(
        made.SerializeToString(), chosen, providers=["CPUExecutionProvider"]
    )


def cnn() -> onnx.ModelProto:
    """A convolution, a pool, and a product with a bias, in modules that node names tell."""
    random = np.random.default_rng(0)
    constants = {
        "stem.weight": random.normal(size=(8, 4, 3, 3)).astype(np.float32),
        "stem.bias": random.normal(size=8).astype(np.float32),
        "head.weight": random.normal(size=(8, 5)).astype(np.float32),
        "head.bias": random.normal(size=5).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "stem.weight", "stem.bias"], ["a"], "/stem/Conv"),
        helper.make_node("Relu", ["a"], ["b"], "/stem/Relu"),
        helper.make_node("GlobalAveragePool", ["b"], ["c"], "/Pool"),
        helper.make_node("Flatten", ["c"], ["d"], "/Flatten"),
        helper.make_node("MatMul", ["d", "head.weight"], ["e"], "/head/MatMul"),
        helper.make_node("Add", ["e", "head.bias"], ["y"], "/head/Add"),
    ]
    return model(nodes, {"x": FLOAT}, {"y": FLOAT}, constants)


def images() -> dict[str, Any]:
    """What :func:`cnn` is given."""
    return {"x": np.random.default_rng(1).normal(size=(2, 4, 6, 6)).astype(np.float32)}
