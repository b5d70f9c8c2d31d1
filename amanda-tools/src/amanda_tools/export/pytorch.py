"""Puts changes into a PyTorch model, and writes it."""

from __future__ import annotations

import copy
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.files import new_beside
from amanda.tools.alignment import run_example
from amanda_tools._operators.weights import values_of_run
from amanda_tools._values.tensors import Array
from amanda_tools.export import checks
from amanda_tools.export.base import BaseExporter
from amanda_tools.export.changes import Change, Exported, Mask, Rounding
from amanda_tools.export.graphs import EditedGraph, packed_in_onnx

_ONNX_TOLERANCE = 2e-6


class Exporter(BaseExporter):
    """Exports a module."""

    def __init__(self, name: str, tool: Any, model: Any, inputs: Any, **options: Any) -> None:
        self._torch = importlib.import_module("torch")
        is_named, is_sequence = isinstance(inputs, Mapping), isinstance(inputs, (tuple, list))
        inputs = dict(inputs) if is_named else tuple(inputs) if is_sequence else (inputs,)
        model = copy.deepcopy(model).eval()
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        for config in configs:
            # A cache of Transformers, which serves only the next call, is no output of a program.
            if getattr(config, "use_cache", False):
                config.use_cache = False
        super().__init__(name, tool, model, inputs, **options)
        self._args = () if is_named else self._inputs
        self._kwargs = self._inputs if is_named else None
        self._program: Any = None
        self._onnx: Any = None

    def write(self, path: Path) -> Exported:
        """Write the file, and check it.

        Raises:
            AmandaError, OSError: as of :func:`amanda_tools.export.export_model`.
        """
        changes = self._changes()
        masks = [change for change in changes if isinstance(change, Mask)]
        others = [change for change in changes if not isinstance(change, Mask)]
        original = copy.deepcopy(self._model)
        with self._torch.no_grad(), new_beside(path) as partial:
            self._bake(masks)
            is_state = path.suffix == ".safetensors"
            partial.write_bytes(
                self._state(others) if is_state else self._written(path.suffix, others)
            )
            found = self._outputs_of(partial, path.suffix)
            kept = [change for change in changes if change.op not in self.left]
            tolerance = _ONNX_TOLERANCE if path.suffix == ".onnx" else 0.0
            given = found, original, self._inputs, kept, tolerance
            difference = self._difference(*given, lambda: self._values(original, kept))
        return Exported(path, list({change.op: 1 for change in kept}), self.left, difference)

    def _outputs_of(self, path: Path, suffix: str) -> list[Any]:
        """Read the file again, and return its outputs of the example inputs."""
        if suffix == ".onnx":
            with self._refusing("ONNX Runtime"):
                return list(checks.run_onnx(str(path), self._inputs))
        if suffix == ".pt2":
            with path.open("rb") as file:
                model = self._torch.export.load(file).module()
        else:
            files = importlib.import_module("safetensors.torch")
            model = copy.deepcopy(self._model)
            model.load_state_dict(files.load_file(path))
        return checks.flat(run_example(model, self._inputs))

    def _values(self, model: Any, changes: Sequence[Change]) -> Mapping[str, Array]:
        """Return the outputs of operators in the program, by id."""
        if self._program is None:
            return {}
        divides = any(isinstance(each, Rounding) and each.divides for each in changes)
        values = checks.values_in_graph(self._program, self._inputs, divides=divides)
        return checks.by_op(amanda.align(model, self._inputs, self._program), values)

    def _recheck(self, found: Sequence[Array], expected: Sequence[Array]) -> tuple[str, Any]:
        if self._onnx is None:
            return "", None
        given = self._model, self._inputs, self._program, self._onnx, _ONNX_TOLERANCE
        where = checks.first_difference_in_onnx(*given)
        return where, None if where else checks.difference(found, expected, math.inf)

    # -- masks --------------------------------------------------------------

    def _bake(self, masks: Sequence[Mask]) -> None:
        places: dict[str, list[int]] = {}
        for mask in masks:
            places.setdefault(mask.op, []).append(mask.input)
        if not masks:
            return
        values = values_of_run(lambda: run_example(self._model, self._inputs), places, self._name)
        for mask in masks:
            value = values[mask.op, mask.input]
            value.copy_(checks.changed(value, mask))

    def _state(self, changes: Sequence[Change]) -> bytes:
        if changes:
            raise UnsupportedProgramError(
                f"{self._name}: .safetensors has no operators, and cannot express what happens at "
                f"op {changes[0].op}; .pt2 and .onnx can"
            )
        # Tied weights are equal, and stand twice: the file then fits the model strictly.
        state = {key: value.contiguous().clone() for key, value in self._model.state_dict().items()}
        found: bytes = importlib.import_module("safetensors.torch").save(state)
        return found

    # -- programs -----------------------------------------------------------

    def _written(self, suffix: str, changes: Sequence[Change]) -> bytes:
        torch = self._torch
        program = self._exported(self._model)
        aligned = amanda.align(self._model, self._inputs, program)
        graph = EditedGraph(program.module(check_guards=False), aligned, is_onnx=suffix == ".onnx")
        by_op: dict[str, list[Change]] = {}
        for change in changes:
            by_op.setdefault(change.op, []).append(change)
        for op_id, own in by_op.items():
            if reason := graph.change(own):
                self._leave(op_id, f"{suffix} cannot express its change: {reason}")
        self._program = program = self._exported(graph.finished())
        if suffix == ".pt2":
            file = io.BytesIO()
            with self._refusing("torch.export"):
                torch.export.save(program, file)
            return file.getvalue()
        with self._refusing("torch.onnx"):
            options: dict[str, Any] = {"kwargs": self._kwargs, "dynamo": True, "verbose": False}
            roundings = [change for change in changes if isinstance(change, Rounding)]
            if any(each.group or each.is_small for each in roundings):
                options["opset_version"] = 21
            self._onnx = torch.onnx.export(program, self._args, **options).model_proto
            if "opset_version" in options:
                packed_in_onnx(self._onnx)
            found: bytes = self._onnx.SerializeToString()
            return found

    def _exported(self, model: Any) -> Any:
        preserved = importlib.import_module("torch.fx.traceback").preserve_node_meta()
        with self._refusing("torch.export"), preserved:
            return self._torch.export.export(model, self._args, self._kwargs)
