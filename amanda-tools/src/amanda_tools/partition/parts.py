"""Writes the parts of a PyTorch model, and ``parts.json``, which says what they exchange."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.files import write_json
from amanda_tools._internals import leaves_of
from amanda_tools._values.shapes import byte_size, shape_of
from amanda_tools.export import checks
from amanda_tools.export.pytorch import Exporter


class PartsExporter(Exporter):
    """Exports one model in parts.

    Args:
        model: the module.
        inputs: example inputs.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        if not isinstance(model, importlib.import_module("torch").nn.Module):
            raise UnsupportedProgramError("partition: only models of PyTorch can be exported")
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
                # A value that an operator changes becomes another value.
                program = program.run_decompositions({})
            if program.graph_signature.buffers_to_mutate:
                raise UnsupportedProgramError("partition: the model changes its buffers")
            wanted = self._wanted(program, part_of)
            self._write_files(program.module(check_guards=False), wanted, partial, suffix)
            return [folder / path.name for path in sorted(partial.iterdir())]

    def _wanted(self, program: Any, part_of: Mapping[str, int]) -> dict[str, int]:
        """Return the part of each node that is known, by its name."""
        aligned = amanda.align(self._model, self._inputs, program)
        for op_id in [*part_of, *aligned]:
            if op_id not in aligned or op_id not in part_of:
                where = ("", "not ") if op_id in part_of else ("not ", "")
                raise UnsupportedProgramError(
                    f"partition: op {op_id} has {where[0]}run under the tool, and {where[1]}with "
                    "the example inputs: the model has changed, or is given others"
                )
        return {name: part_of[op_id] for op_id, of in aligned.items() for name in of.nodes}

    def _write_files(
        self, module: Any, wanted: Mapping[str, int], folder: Path, suffix: str
    ) -> None:
        """Write the parts and their description.

        Raises:
            UnsupportedProgramError: they give other outputs than the whole program.
        """
        *_, output = module.graph.nodes
        inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        kwargs: Any = self._kwargs or {}
        given = leaves_of((self._args, kwargs))
        values, rows = dict(zip(inputs, given, strict=True)), list[dict[str, Any]]()
        parts = _parts_of_nodes(module.graph, wanted)
        for number in sorted({*parts.values()}):
            path = folder / f"part{number}{suffix}"
            part, reads, gives = self._part(module, parts, number)
            found = self._write_part(part, tuple(values[name] for name in reads), path)
            values.update(zip(gives, found, strict=True))
            rows.append({
                "file": path.name,
                "inputs": {name: _described(values[name]) for name in reads},
                "outputs": {name: _described(values[name]) for name in gives},
                "parameters": [name for name, _ in part.named_parameters()],
            })  # fmt: skip
        names = [getattr(each, "name", None) for each in leaves_of(output.args[0])]
        expected = checks.flat(module(*self._args, **kwargs))
        tolerance = 2e-6 if suffix == ".onnx" else 0.0
        results = [values[name] for name in names if name is not None]
        if checks.difference(checks.flat(results), expected, tolerance) is None:
            raise UnsupportedProgramError("partition: the parts compute another result")
        about = {"inputs": inputs, "outputs": names, "parts": rows}
        write_json(folder / "parts.json", about)

    def _part(
        self, module: Any, parts: Mapping[Any, int], part: int
    ) -> tuple[Any, list[str], list[str]]:
        """Return a part as a module, and the names of its inputs and outputs, which are tensors."""
        fx = importlib.import_module("torch.fx")
        nodes = [*module.graph.nodes]
        needed = {node for node in nodes if parts.get(node) == part}
        gives = [n for n in nodes if n in needed and any(parts.get(u) != part for u in n.users)]
        for node in reversed(nodes):
            if node in needed and parts.get(node, part) == part:
                needed.update(node.all_input_nodes)
        used = [node for node in nodes if node in needed]
        reads = [n for n in used if n.op == "placeholder" or parts.get(n, part) != part]
        for node in (*reads, *gives):
            if not isinstance(node.meta.get("val"), self._torch.Tensor):
                raise UnsupportedProgramError(
                    f"partition: {node.name}, which a part gives to another one, is no tensor"
                )
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in reads}
        for node in used:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in gives))
        names = [node.name for node in reads], [node.name for node in gives]
        return fx.GraphModule(module, graph), *names

    def _write_part(self, part: Any, args: tuple[Any, ...], path: Path) -> list[Any]:
        """Write one part; return the outputs of the file."""
        torch = self._torch
        with self._refusing("torch.export"):
            program = torch.export.export(part, args)
        if path.suffix == ".pt2":
            torch.export.save(program, path)
            return [*torch.export.load(path).module()(*args)]
        with self._refusing("torch.onnx"):
            options = {"dynamo": True, "verbose": False, "external_data": False}
            torch.onnx.export(program, args, path, **options)
        with self._refusing("ONNX Runtime"):
            return [torch.from_numpy(array) for array in checks.run_onnx(str(path), args)]


def _is_in_place(node: Any) -> bool:
    name = str(node.target).partition(".")[2].partition(".")[0]
    return name.endswith("_") and not name.endswith("__")


def _parts_of_nodes(graph: Any, wanted: Mapping[str, int]) -> dict[Any, int]:
    """Return the part of each node that computes: the one that is wanted, or a later one that an
    input is from; of a node that is not known, the first that it may have.

    A constant, such as a range, has none: it is computed in each part that reads it.
    """
    seeded = importlib.import_module("torch").Tag.nondeterministic_seeded
    found: dict[Any, int] = {}
    *nodes, output = graph.nodes
    for node in nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        is_varying = seeded in getattr(node.target, "tags", ()) or any(
            source in found
            or source.op == "placeholder"
            or (source.op == "get_attr" and node.name in wanted)
            for source in sources
        )
        if is_varying or output in node.users:
            before = [found[source] for source in sources if source in found]
            found[node] = max([wanted.get(node.name, 1), *before])
    return found


def _described(tensor: Any) -> dict[str, Any]:
    dtype = str(tensor.dtype).rpartition(".")[2]
    return {"shape": shape_of(tensor), "dtype": dtype, "bytes": byte_size(tensor)}


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
