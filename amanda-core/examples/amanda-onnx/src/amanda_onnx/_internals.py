"""The private symbols of ONNX Runtime that the driver needs, seen in 1.32."""

from __future__ import annotations

import onnx
import onnxruntime as ort
from onnx import helper


def source_of(session: ort.InferenceSession) -> bytes | str:
    """What a session was made from: a serialized model, or the path of one.

    ONNX Runtime keeps both for its fallback to another execution provider, and tells neither.

    Raises:
        ValueError: it was made from something else.
    """
    source = getattr(session, "_model_bytes", None) or getattr(session, "_model_path", None)
    if source is None:
        raise ValueError("the session was made neither from a path nor from bytes")
    return source


def problems() -> list[str]:
    """What is wrong with this ONNX Runtime: sessions do not keep what they were made from."""
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([], "empty", [value], [value])
    source = helper.make_model(graph, ir_version=8).SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    return [] if getattr(session, "_model_bytes", None) == source else ["no Session._model_bytes"]
