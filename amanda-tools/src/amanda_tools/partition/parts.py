"""Writes the parts of a PyTorch model, and ``parts.json``, which says what they exchange."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.files import write_json
from amanda.tools.alignment import AlignedOp
from amanda_tools._internals import leaves_of
from amanda_tools._values.shapes import byte_size, shape_of
from amanda_tools.export import checks
from amanda_tools.export.pytorch import Exporter


@attrs.frozen(eq=False)
class _Part:
    """A part of an exported graph.

    Attributes:
        module: the part as a module, whose inputs and outputs are tensors.
        reads, gives: the nodes of these, in order.
        parameters: the names of the parameters and buffers that it holds.
    """

    module: Any
    reads: Sequence[Any]
    gives: Sequence[Any]
    parameters: Sequence[str]


class PartsExporter(Exporter):
    """Exports one model in parts.

    Args:
        model: the module.
        inputs: example inputs.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        if inputs is None:
            raise UnsupportedProgramError("partition: an export needs example inputs of the model")
        super().__init__("partition", None, model, inputs, fallback=False, op_filter=None)

    def write_parts(self, folder: Path, suffix: str, part_of: Mapping[str, int]) -> list[Path]:
        """Write the parts, and check them; return the paths.

        Args:
            folder: is made if it does not exist; files of other names stay.
            suffix: ``.pt2`` or ``.onnx``.
            part_of: the part of each operator by id, from 1.
        """
        with self._torch.no_grad(), _filled(folder) as partial:
            program = self._exported(self._model)
            if any(_is_in_place(node) for node in program.graph.nodes):
                # In the order of the graph what an operator changes is another value.
                program = program.run_decompositions({})
            if program.graph_signature.buffers_to_mutate:
                raise UnsupportedProgramError(
                    "partition: the model changes its buffers, which a part cannot for another one"
                )
            aligned = amanda.align(self._model, self._inputs, program)
            module = program.module(check_guards=False)
            parts = list(self._divide(module, self._wanted(aligned, part_of)))
            self._write_files(module, parts, partial, suffix)
            names = sorted(path.name for path in partial.iterdir())
        return [folder / name for name in names]

    def _wanted(
        self, aligned: Mapping[str, AlignedOp], part_of: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the part of each node that is known, by its name.

        Raises:
            UnsupportedProgramError: the model has run other operators than under the tool.
        """
        for op_id in [*part_of, *aligned]:
            if op_id not in aligned or op_id not in part_of:
                raise UnsupportedProgramError(
                    f"partition: op {op_id} has run {'' if op_id in part_of else 'not '}under the "
                    f"tool, and {'not ' if op_id in part_of else ''}with the example inputs: the "
                    "model has changed, or is given others"
                )
        return {name: part_of[op_id] for op_id, of in aligned.items() for name in of.nodes}

    def _divide(self, module: Any, wanted: Mapping[str, int]) -> Iterator[_Part]:
        parts = _parts_of_nodes(module.graph, wanted)
        returned = {
            *next(node for node in module.graph.nodes if node.op == "output").all_input_nodes
        }
        last = max(parts.values())
        # A parameter that the model returns.
        parts |= {node: last for node in returned if node.op == "get_attr"}
        for part in range(1, last + 1):
            own = [node for node in module.graph.nodes if parts.get(node) == part]
            others = dict.fromkeys(
                source
                for node in own
                for source in node.all_input_nodes
                if parts.get(source) != part
            )
            reads = [node for node in others if node.op != "get_attr"]
            gives = [
                node for node in own
                if node in returned or any(parts.get(user, part) != part for user in node.users)
            ]  # fmt: skip
            for node in (*reads, *gives):
                if not isinstance(node.meta.get("val"), self._torch.Tensor):
                    raise UnsupportedProgramError(
                        f"partition: {node.name}, which parts exchange, is no tensor"
                    )
            graph = importlib.import_module("torch.fx").Graph()
            copies = {node: graph.placeholder(node.name) for node in reads}
            for node in (*others, *own):
                if node not in copies:
                    copies[node] = graph.node_copy(node, copies.__getitem__)
            graph.output(tuple(copies[node] for node in gives))
            names = dict.fromkeys(node.target for node in graph.nodes if node.op == "get_attr")
            yield _Part(
                importlib.import_module("torch.fx").GraphModule(module, graph),
                reads, gives, [str(name) for name in names],
            )  # fmt: skip

    def _write_files(self, module: Any, parts: Sequence[_Part], folder: Path, suffix: str) -> None:
        """Write the parts and their description.

        Raises:
            UnsupportedProgramError: they give other outputs than the whole program.
        """
        *_, output = module.graph.nodes
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = leaves_of((self._args, self._kwargs or {}))
        values = {node.name: value for node, value in zip(inputs, given, strict=True)}
        rows = []
        for number, part in enumerate(parts, 1):
            path = folder / f"part{number}{suffix}"
            reads, gives = ([node.name for node in nodes] for nodes in (part.reads, part.gives))
            found = self._write_part(part.module, tuple(values[name] for name in reads), path)
            values.update(zip(gives, found, strict=True))
            rows.append({
                "file": path.name,
                "inputs": {name: _described(values[name]) for name in reads},
                "outputs": {name: _described(values[name]) for name in gives},
                "parameters": part.parameters,
            })  # fmt: skip
        names = [getattr(each, "name", None) for each in leaves_of(output.args[0])]
        expected = checks.flat(module(*self._args, **self._kwargs or {}))
        tolerance = 2e-6 if suffix == ".onnx" else 0.0
        results = [values[name] for name in names if name is not None]
        if checks.difference(results, expected, tolerance) is None:
            raise UnsupportedProgramError(
                "partition: the parts compute another result than the model"
            )
        about = {"inputs": [node.name for node in inputs], "outputs": names, "parts": rows}
        write_json(folder / "parts.json", about)

    def _write_part(self, module: Any, args: tuple[Any, ...], path: Path) -> list[Any]:
        """Write one part; return the outputs of the file."""
        torch = self._torch
        with self._refusing("torch.export"):
            program = torch.export.export(module, args)
        if path.suffix == ".pt2":
            torch.export.save(program, path)
            return checks.flat(torch.export.load(path).module()(*args))
        with self._refusing("torch.onnx"):
            torch.onnx.export(program, args, path, dynamo=True, verbose=False)
        with self._refusing("ONNX Runtime"):
            return checks.run_onnx(str(path), args)


def _is_in_place(node: Any) -> bool:
    name = str(node.target).partition(".")[2].partition(".")[0]
    return bool(name.endswith("_") and not name.endswith("__"))


def _parts_of_nodes(graph: Any, wanted: Mapping[str, int]) -> dict[Any, int]:
    """Return the part of each node that computes: the one that is wanted, or a later one that an
    input is from; of a node that is not known the first that it may have."""
    found: dict[Any, int] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            before = [found[source] for source in node.all_input_nodes if source in found]
            found[node] = max([wanted.get(node.name, 1), *before])
    for node in reversed(graph.nodes):
        # Of one that reads nothing, such as a range: where it is read.
        if (
            node in found
            and node.name not in wanted
            and found.keys().isdisjoint(node.all_input_nodes)
        ):
            found[node] = min((found[user] for user in node.users if user in found), default=1)
    return found


def _described(tensor: Any) -> dict[str, Any]:
    dtype = str(tensor.dtype).rpartition(".")[2]
    return {"shape": list(shape_of(tensor)), "dtype": dtype, "bytes": byte_size(tensor)}


@contextmanager
def _filled(folder: Path) -> Iterator[Path]:
    """Make a folder whose files come into another one when the with-block ends; if it raises,
    nothing is left of them."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".amanda-", dir=folder))
    try:
        yield partial
        for path in [*partial.iterdir()]:
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
