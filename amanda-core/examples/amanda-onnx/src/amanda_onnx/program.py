"""What a session runs: the nodes of its model, each with a session of its own, and their modules."""

from __future__ import annotations

import ast
import collections
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
from amanda.driver import NamedOp
from onnx import AttributeProto, helper, numpy_helper

from amanda_onnx._internals import source_of

EXPORTED = "pkg.torch.onnx."
"""What the keys of the metadata of torch.onnx's exporter begin with."""

REWRITTEN = "pkg.onnxscript.rewriter.rule_name"
"""The key that marks a node which an optimizer of the exporter has made of others."""

PYTORCH = {"_native_batch_norm_legit_no_training": "batch_norm"}
"""Operators of the exporter's graph that PyTorch's users know by another name."""

MAIN = {"linear": ("MatMul", "Gemm"), "addmm": ("MatMul", "Gemm"), "conv2d": ("Conv",)}
"""Operators that the exporter may write as several nodes, and which of them has the weight."""

OPAQUE = frozenset({"If", "Loop", "Scan"})
"""Operators that run graphs of their own."""

RANDOM = frozenset({
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
    "Bernoulli", "Dropout",
})  # fmt: skip
"""Operators that draw random numbers."""


class Place:
    """Stands for a module of the exported model; its class has the name of the module's."""


class Node:
    """A node of a graph.

    Attributes:
        op: what ``get_op()`` tells.
        label: its name for ids: PyTorch's name of the operator, or that of ONNX.
        scopes: path and class of each module around it, the outermost first.
        inputs, captured, outputs: names of values; `captured` are those that its graphs read.
        attributes: by name, tensors as lists, without graphs.
        signature: its declared inputs, and its attributes.
    """

    def __init__(self, program: Program, proto: onnx.NodeProto) -> None:
        self._program, self._proto = program, proto
        self._sessions: dict[Any, ort.InferenceSession] = {}
        self.op = NamedOp(proto.op_type)
        self.label = proto.op_type
        self.inputs, self.outputs = list(proto.input), [name for name in proto.output if name]
        graphs = [graph for a in proto.attribute for graph in (*a.graphs, a.g)]
        self.captured = sorted({name for graph in graphs for name in free_names(graph)})
        found = {
            a.name: _attribute(a) for a in proto.attribute if not (a.HasField("g") or a.graphs)
        }
        self.attributes = {name: value for name, value in found.items() if value is not None}
        self.signature = self._signature(program.opsets.get(proto.domain))
        notes = {entry.key: entry.value for entry in proto.metadata_props}
        self.fx, self.scopes = _scopes(notes, proto.name)
        if REWRITTEN in notes:
            self.fx = ""

    def _signature(self, version: int | None) -> inspect.Signature:
        """The parameters that the operator's schema declares."""
        proto, kinds = self._proto, inspect.Parameter
        try:
            schema = onnx.defs.get_schema(proto.op_type, version or 1, proto.domain)
            declared = {i.name: i.option.name == "Variadic" for i in schema.inputs}
        except onnx.defs.SchemaError:
            declared = {f"input{position}": False for position in range(len(self.inputs))}
        tensors = [
            kinds(n, kinds.VAR_POSITIONAL)
            if is_list
            else kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=None)
            for n, is_list in declared.items()
        ]
        names = [n for n in self.attributes if n not in declared]
        return inspect.Signature([*tensors, *(kinds(n, kinds.KEYWORD_ONLY) for n in names)])

    @property
    def tensors(self) -> list[str]:
        """The names of its parameters that take tensors."""
        parameters = self.signature.parameters.values()
        return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]

    def compute(self, captured: Sequence[Any], *inputs: Any, **attributes: Any) -> Any:
        """Run it: the only output, or a tuple of them; its attributes are those of the model."""
        given = [*inputs, *[None] * (len(self.inputs) - len(inputs)), *captured]
        constants = self._program.constants
        names = [*self.inputs, *self.captured]
        known = [
            value is not None and constants.get(name) is value
            for name, value in zip(names, given, strict=True)
        ]
        key = tuple(
            None if value is None else is_known or _kind(value)
            for value, is_known in zip(given, known, strict=True)
        )
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = self._session(given, known)
        fed = zip(self._own_names(), given, known, strict=True)
        feed = {name: value for name, value, is_known in fed if not (value is None or is_known)}
        found = self._program.run(session, None, feed)
        return found[0] if len(found) == 1 else tuple(found)

    def _own_names(self) -> list[str]:
        """Names of the inputs of its own session, distinct if one value is read twice."""
        return [*(f"amanda.{position}" for position in range(len(self.inputs))), *self.captured]

    def _session(self, given: Sequence[Any], known: Sequence[bool]) -> ort.InferenceSession:
        """A session of this node alone. Constants are a part of it, as kernels pack weights."""
        proto, program = onnx.NodeProto(), self._program
        proto.CopyFrom(self._proto)
        fed, constants = [], []
        for name, value, is_known in zip(self._own_names(), given, known, strict=True):
            if is_known:
                constants.append(numpy_helper.from_array(value, name))
            elif value is not None:
                fed.append(helper.make_value_info(name, _type(value)))
        places = zip(self._own_names(), given[: len(self.inputs)], strict=False)
        del proto.input[:]
        proto.input.extend("" if value is None else name for name, value in places)
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        graph = helper.make_graph([proto], "node", fed, outputs, constants)
        opsets = [helper.make_opsetid(*opset) for opset in program.opsets.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=program.ir_version)
        return ort.InferenceSession(
            model.SerializeToString(), program.options, providers=program.providers
        )


class Block:
    """A call of a module: nodes, and calls of modules within it."""

    def __init__(self, program: Program, path: str) -> None:
        self.place = program.places[path]
        self.items: list[Node | Block] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []

    def nodes(self) -> Iterator[Node]:
        """All nodes in it, in order."""
        for item in self.items:
            yield from item.nodes() if isinstance(item, Block) else (item,)


class Program:
    """What a session runs.

    Attributes:
        constants: values by name that no run changes: initializers, and what follows from them.
        defaults: initializers that a run may replace.
        inputs, outputs: names of the graph's.
        names: those of constants and defaults, by the identity of their values; "" for integers
            and single numbers, which are no parameters.
        root: the call of the whole model.
        places: by path, what stands for each module.
    """

    def __init__(self, session: ort.InferenceSession, run: Any) -> None:
        model = _read(source_of(session))
        graph, self.run = model.graph, run
        self.ir_version = model.ir_version
        self.opsets = {opset.domain: opset.version for opset in model.opset_import}
        self.options = _options(session)
        options = session.get_provider_options()
        self.providers = [(name, options.get(name, {})) for name in session.get_providers()]
        given = {value.name: value.type for value in graph.input}
        values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        # Before version 4 all initializers were listed as inputs, and none can be replaced.
        replaced = given.keys() & values.keys() if model.ir_version >= 4 else set()
        self.constants = {n: _locked(v) for n, v in values.items() if n not in replaced}
        self.defaults = {name: _locked(values[name]) for name in replaced}
        self.inputs = {name: kind for name, kind in given.items() if name not in self.constants}
        self.outputs = [value.name for value in graph.output]
        self.nodes = list(self._computed(Node(self, proto) for proto in graph.node))
        self._label()
        known = {**self.constants, **self.defaults}
        self.names = {id(v): n if v.ndim and v.dtype.kind in "fV" else "" for n, v in known.items()}
        self.places: dict[str, Place] = {}
        self.root = self._blocks(graph.name)
        self.opaque = sum(node.op.__name__ in OPAQUE for node in self.nodes)

    def _computed(self, nodes: Iterator[Node]) -> Iterator[Node]:
        """The nodes that depend on inputs; the others are computed, as the optimizer does."""
        for node in nodes:
            kind = node.op.__name__
            is_constant = all(not n or n in self.constants for n in (*node.inputs, *node.captured))
            if not is_constant or kind in RANDOM or kind in OPAQUE:
                yield node
                continue
            found = node.compute([], *(self.constants.get(name) for name in node.inputs))
            outputs = found if isinstance(found, tuple) else (found,)
            values = map(_locked, outputs)
            self.constants.update(zip(node.outputs, values, strict=True))

    def _label(self) -> None:
        """Name nodes as PyTorch names the operator that the exporter has made them from."""
        groups: dict[Any, list[Node]] = {}
        for node in self.nodes:
            if node.fx:
                groups.setdefault((node.fx, *node.scopes), []).append(node)
        for (fx, *_), nodes in groups.items():
            name = fx.rpartition("/")[2]
            mains = [node for node in nodes if node.op.__name__ in MAIN.get(name, ())]
            (mains or nodes[-1:])[0].label = name

    def _blocks(self, name: str) -> Block:
        """Put the nodes into the calls of modules that the names of their scopes tell."""
        scopes = next((node.scopes for node in self.nodes if node.scopes[0][1]), (("", name),))
        self.places[""] = _place(scopes[0][1] or "Graph")
        root = Block(self, "")
        entered, paths = [root], [""]
        for node in self.nodes:
            chain = [path for path, _ in node.scopes]
            common = len(os.path.commonprefix([chain, paths]))
            del entered[common:], paths[common:]
            for path, kind in node.scopes[common:]:
                self.places.setdefault(path, _place(kind))
                block = Block(self, path)
                entered[-1].items.append(block)
                entered.append(block)
                paths.append(path)
            entered[-1].items.append(node)
        self._connect(root, collections.Counter([*_read_by(self.nodes), *self.outputs]))
        root.inputs, root.outputs = list(self.inputs), self.outputs
        return root

    def _connect(self, block: Block, reads: collections.Counter[str]) -> None:
        """Find the inputs and outputs of a call; `reads` counts who reads each value."""
        nodes = list(block.nodes())
        made = [name for node in nodes for name in node.outputs]
        own = collections.Counter(_read_by(nodes))
        known = self.constants.keys() | set(made)
        block.inputs = [name for name in own if name not in known]
        block.outputs = [name for name in made if own[name] < reads[name]]
        for item in block.items:
            if isinstance(item, Block):
                self._connect(item, reads)

    def feed(self, given: Any) -> dict[str, Any]:
        """All values that are known before the first node."""
        fed = {n: _array(given[n], self.inputs[n]) for n in self.inputs if n in given}
        return {**self.constants, **self.defaults, **fed}


def _read_by(nodes: Iterable[Node]) -> list[str]:
    """The values that nodes read, once for each reader."""
    return [name for node in nodes for name in (*node.inputs, *node.captured) if name]


def free_names(graph: onnx.GraphProto) -> set[str]:
    """The values that a graph within a node reads from outside."""
    made = {value.name for value in (*graph.input, *graph.initializer)}
    found: set[str] = {value.name for value in graph.output}
    for node in graph.node:
        made |= set(node.output)
        found |= set(node.input)
        for attribute in node.attribute:
            for inner in (*attribute.graphs, attribute.g):
                found |= free_names(inner)
    return found - made - {""}


def _read(source: bytes | str) -> onnx.ModelProto:
    """The model, with its external data, and with its functions written out."""
    if isinstance(source, bytes):
        model = onnx.load_model_from_string(source)
        onnx.load_external_data_for_model(model, ".")
    else:
        model = onnx.load(source)
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _options(session: ort.InferenceSession) -> ort.SessionOptions:
    """Options of the sessions of nodes: no optimizer, and one thread unless the user says so."""
    options, theirs = ort.SessionOptions(), session.get_session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = theirs.intra_op_num_threads or 1
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = theirs.use_deterministic_compute
    options.log_severity_level = max(theirs.log_severity_level, 3)
    return options


def _scopes(notes: dict[str, str], name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The exporter's operator, and path and class of each module around a node."""
    paths = ast.literal_eval(notes.get(f"{EXPORTED}name_scopes", "[]"))
    kinds = ast.literal_eval(notes.get(f"{EXPORTED}class_hierarchy", "[]"))
    if paths and len(paths) == len(kinds):
        found = re.match(r"aten\.(\w+)", kinds[-1])
        fx = f"{paths[-1]}/{PYTORCH.get(found[1], found[1])}" if found else ""
        return fx, tuple((p, k.rpartition(".")[2]) for p, k in zip(paths[:-1], kinds, strict=False))
    # Other exporters write the path of a module into the node's name.
    parts = [part for part in name.split("/")[:-1] if part]
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return "", (("", ""), *zip(paths, parts, strict=True))


def _place(kind: str) -> Place:
    made: Place = type(re.sub(r"\W", "_", kind), (Place,), {})()
    return made


def _attribute(attribute: AttributeProto) -> Any:
    """The value of an attribute in Python; None for a type."""
    value = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(value).tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (int, float)):
        return value
    items = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in value or ()]
    return items if all(isinstance(item, (int, float, str)) for item in items) else None


def _locked(array: Any) -> Any:
    """An array that cannot be written: sessions have copied it."""
    array = np.asarray(array) if isinstance(array, np.generic) else array
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def _array(value: Any, kind: onnx.TypeProto) -> Any:
    """An input as ONNX Runtime takes it: an OrtValue, an array, or what makes one."""
    if hasattr(value, "numpy"):
        return value.numpy()
    if isinstance(value, np.ndarray) or not kind.HasField("tensor_type"):
        return value
    return np.asarray(value, helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def _type(value: Any) -> onnx.TypeProto:
    """The type of a value in ONNX, its shape left open."""
    if isinstance(value, list):
        item = _type(value[0]) if value else helper.make_tensor_type_proto(1, None)
        return helper.make_sequence_type_proto(item)
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), None)


def _kind(value: Any) -> str:
    """The type of a value, to tell sessions by."""
    return f"[{_kind(value[0]) if value else ''}]" if isinstance(value, list) else str(value.dtype)
