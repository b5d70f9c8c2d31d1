"""The adapter of ONNX Runtime for the contract kit: calls of ONNX and ONNX Runtime only.

A program is a model, built once. Operators on arrays, which routines call, are models of one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from amanda.testing.framework import Build, Framework, Program, Trained
from onnx import TensorProto, helper, numpy_helper

OPSET = 20


class Parameter(np.ndarray[Any, Any]):
    """An array that becomes an initializer of a model; others are given to it."""


class Symbol:
    """A value of the model that is being built."""

    def __init__(self, model: Building, name: str) -> None:
        self.model, self.name = model, name


class Building:
    """A model that is being built."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.name, self.scope = "Program", ""
        self.values = {f"x{i}": np.array(v, np.float32) for i, v in enumerate(values)}
        self.inputs = [Symbol(self, name) for name in self.values]
        self._known: dict[int, str] = {}

    def input_of(self, tensor: Any) -> str:
        """The name of a value; an array becomes an input, or an initializer."""
        if tensor is None:
            return ""
        if isinstance(tensor, Symbol):
            return tensor.name
        if id(tensor) not in self._known:
            self._known[id(tensor)] = name = f"c{len(self._known)}"
            if isinstance(tensor, Parameter):
                self.constants.append(numpy_helper.from_array(np.array(tensor), name))
            else:
                self.values[name] = np.array(tensor)
        return self._known[id(tensor)]

    def node(self, kind: str, tensors: Sequence[Any], outputs: int, attributes: Any) -> list[Any]:
        """Add a node; its outputs."""
        place = len(self.nodes)
        names = [f"{kind}{place}.{i}" for i in range(outputs)]
        inputs = [self.input_of(tensor) for tensor in tensors]
        name = f"{self.scope}{kind}{place}"
        self.nodes.append(helper.make_node(kind, inputs, names, name, **attributes))
        return [Symbol(self, name) for name in names]

    def session(self, outputs: Sequence[Any]) -> ort.InferenceSession:
        """A session of the model."""
        kind = TensorProto.FLOAT
        given = [
            helper.make_tensor_value_info(n, kind, [None] * v.ndim) for n, v in self.values.items()
        ]
        made = [helper.make_tensor_value_info(self.input_of(o), kind, None) for o in outputs]
        graph = helper.make_graph(self.nodes, self.name, given, made, self.constants)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


class OnnxProgram(Program):
    """A model with its inputs."""

    def __init__(self, build: Build, values: Sequence[Any]) -> None:
        model = Building(values)
        result = build(*model.inputs)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        self._values, self._session = model.values, model.session(outputs)

    def run(self) -> list[Any]:
        return [output.tolist() for output in self._session.run(None, self._values)]

    def train(self) -> Trained:
        raise NotImplementedError

    def second_gradients(self) -> list[Any]:
        raise NotImplementedError


def operate(kind: str, *tensors: Any, outputs: int = 1, **attributes: Any) -> Any:
    """Run an operator, or add it to the model that one of the tensors belongs to."""
    symbol = next((tensor for tensor in tensors if isinstance(tensor, Symbol)), None)
    if symbol is not None:
        found = symbol.model.node(kind, tensors, outputs, attributes)
        return found if outputs > 1 else found[0]
    model = Building(tensors)
    names = model.node(kind, model.inputs, outputs, attributes)
    found = model.session(names).run(None, model.values)
    return found if outputs > 1 else found[0]


class Onnx(Framework):
    """The adapter."""

    types: ClassVar[Mapping[str, str]] = {
        "add": "Add", "mul": "Mul", "relu": "Relu", "linear": "Gemm", "cat": "Concat",
        "split": "Split",
    }  # fmt: skip
    names: ClassVar[Mapping[str, Sequence[str]]] = {"mul": ["A", "B"], "linear": ["A", "B", "C"]}
    attributes: ClassVar[Mapping[str, Any]] = {"num_outputs": 2}
    watched = (ort, ort.InferenceSession)
    namespace = "onnx"

    def tensor(self, values: Any) -> Any:
        return np.array(values, np.float32)

    def parameter(self, values: Any) -> Any:
        return np.array(values, np.float32).view(Parameter)

    def inputs(self, op: str, *tensors: Any) -> list[Any]:
        # The sizes of the parts are an optional input.
        return [*tensors, None] if op == "split" else list(tensors)

    def to_list(self, tensor: Any) -> Any:
        return tensor.tolist()

    def add(self, A: Any, B: Any) -> Any:
        return operate("Add", A, B)

    def mul(self, A: Any, B: Any) -> Any:
        return operate("Mul", A, B)

    def relu(self, tensor: Any) -> Any:
        return operate("Relu", tensor)

    def linear(self, A: Any, B: Any, C: Any = None) -> Any:
        return operate("Gemm", A, B, *([] if C is None else [C]), transB=1)

    def cat(self, tensors: Sequence[Any]) -> Any:
        return operate("Concat", *tensors, axis=0)

    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        return operate("Split", tensor, outputs=sections, num_outputs=sections)

    def cast(self, tensor: Any) -> Any:
        return tensor.astype(np.float64)

    def program(self, build: Build, *values: Any) -> Program:
        return OnnxProgram(build, values)

    def model(self, weight: Any, calls: int = 1) -> Build:
        weights = [self.parameter(weight), self.parameter(weight)]

        def forward(x: Symbol) -> Symbol:
            x.model.name = "Model"
            for _ in range(calls):
                for name, value in zip(("first", "second"), weights, strict=True):
                    x.model.scope = f"{name}/"
                    x = self.linear(x, value)
            return x

        return forward
