"""Writes the parts of a PyTorch model, and ``parts.json``, which says what they exchange."""

from __future__ import annotations

import importlib
import operator
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.files import write_json
from amanda.tools.alignment import AlignedOp
from amanda_tools._internals import leaves_of
from amanda_tools._values.shapes import byte_size, shape_of
from amanda_tools.export import checks
from amanda_tools.export.pytorch import Exporter

_WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
"""Modules of PyTorch with one model as their only child, which does what they do."""


class PartsExporter(Exporter):
    """Exports one model in parts.

    Args:
        model: the module.
        inputs: example inputs.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        while type(model).__name__ in _WRAPPERS:
            (model,) = model.children()
        if not isinstance(model, importlib.import_module("torch").nn.Module):
            raise UnsupportedProgramError("partition: only models of PyTorch can be exported")
        if inputs is None:
            raise UnsupportedProgramError("partition: an export needs example inputs of the model")
        super().__init__("partition", None, model, inputs, fallback=False, op_filter=None)

    def write_parts(
        self,
        folder: Path,
        suffix: str,
        part_of: Mapping[str, int],
        makers: Mapping[str, Sequence[str]],
        readers: Mapping[str, Collection[int]],
    ) -> list[Path]:
        """Write the parts, and check them; return the paths.

        Args:
            folder: is made if it does not exist; files of other names stay.
            suffix: ``.pt2`` or ``.onnx``.
            part_of: the part of each operator by id, from 1.
            makers: by operator, those whose outputs it reads.
            readers: by name of a parameter, the parts that may have it.
        """
        with self._alone(part_of), _filled(folder) as partial:
            program = self._exported(self._model)
            if any(_is_in_place(node) for node in program.graph.nodes):
                # A value that an operator changes becomes another value.
                with self._refusing("torch.export"):
                    program = program.run_decompositions({})
            signature = program.graph_signature
            if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
                raise UnsupportedProgramError("partition: the model changes its buffers or inputs")
            aligned, module = self._aligned(program, part_of), program.module(check_guards=False)
            parts = self._placed(aligned, module.graph, part_of, makers)
            self._write_files(module, parts, readers, partial, suffix)
            return [folder / path.name for path in sorted(partial.iterdir())]

    def _aligned(self, program: Any, part_of: Mapping[str, int]) -> dict[str, AlignedOp]:
        """Return the nodes of the operators, which must be those of the plan."""
        aligned = amanda.align(self._model, self._inputs, program)
        for op_id in [*part_of, *aligned]:
            if op_id not in aligned or op_id not in part_of:
                where = ("", "not ") if op_id in part_of else ("not ", "")
                raise UnsupportedProgramError(
                    f"partition: op {op_id} has {where[0]}run under the tool, and {where[1]}in the "
                    "export: the model has changed, is given others, was in training mode, or used "
                    "PyTorch's fast path of attention (torch.backends.mha)"
                )
        return aligned

    def _placed(
        self,
        aligned: Mapping[str, AlignedOp],
        graph: Any,
        part_of: Mapping[str, int],
        makers: Mapping[str, Sequence[str]],
    ) -> dict[Any, int]:
        """Return the part of each node that computes.

        Raises:
            UnsupportedProgramError: one may be in several, as may be an operator that has no node
                and that others need; or a part is empty.
        """
        needed = {op_id for op_id, of in aligned.items() if of.nodes}
        for op_id in reversed([*aligned]):
            needed.update(makers[op_id] if op_id in needed else ())
        lost = [of for i, of in aligned.items() if i in needed and not (of.nodes or of.is_dropped)]
        reasons = [f"partition: op {of.op.id}: {of.reason}" for of in lost]
        wanted = {name: part_of[op_id] for op_id, of in aligned.items() for name in of.nodes}
        parts, latest = _parts_of_nodes(graph, wanted), dict[Any, int]()
        for node in reversed([*parts]):
            later = (latest[user] for user in node.users if user in latest)
            known = wanted.get(node.name, min(later, default=max(part_of.values())))
            if node.target is operator.getitem:
                # An output of several is where they are computed.
                known = parts[node]
            if parts[node] != known and isinstance(node.meta.get("val"), self._torch.Tensor):
                reasons.append(f"partition: the part of {node.name} in the program is not known")
                raise UnsupportedProgramError(reasons[0])
            latest[node] = known
        for part in {*part_of.values()} - {*parts.values()}:
            raise UnsupportedProgramError(f"partition: part {part} computes only constants")
        return parts

    def _write_files(
        self,
        module: Any,
        parts: Mapping[Any, int],
        readers: Mapping[str, Collection[int]],
        folder: Path,
        suffix: str,
    ) -> None:
        """Write the parts and their description.

        Raises:
            UnsupportedProgramError: they give other outputs, or have parameters of other parts.
        """
        *_, output = module.graph.nodes
        inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        kwargs: Any = self._kwargs or {}
        given = leaves_of((self._args, kwargs))
        values, rows = dict(zip(inputs, given, strict=True)), list[dict[str, Any]]()
        for each in leaves_of(output.args[0]):
            if getattr(each, "op", "") == "get_attr":
                raise UnsupportedProgramError(f"partition: the model returns {each.target} itself")
        for number in sorted({*parts.values()}):
            path = folder / f"part{number}{suffix}"
            part, reads, gives = self._part(module, parts, number)
            self._check_parameters(part, number, readers)
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
        write_json(folder / "parts.json", {"inputs": inputs, "outputs": names, "parts": rows})

    def _check_parameters(
        self, part: Any, number: int, readers: Mapping[str, Collection[int]]
    ) -> None:
        """Check that a part has no parameter of others."""
        equal: dict[int, set[int]] = {}
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in named.items():
            equal.setdefault(id(value), set()).update(readers.get(name, ()))
        for name, _ in part.named_parameters():
            if number not in equal[id(named[name])]:
                raise UnsupportedProgramError(
                    f"partition: {name} would come into part {number}, and is read in another one"
                )

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
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".amanda-", dir=folder))
    try:
        yield partial
        # parts.json never describes other parts: that of earlier ones goes first, the new one
        # comes last.
        (folder / "parts.json").unlink(missing_ok=True)
        for path in sorted(partial.iterdir()):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial)
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()
