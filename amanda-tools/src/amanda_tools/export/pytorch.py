"""Puts changes into a PyTorch model, and writes it."""

from __future__ import annotations

import copy
import importlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.files import new_beside
from amanda.tools.alignment import run_example
from amanda_tools._operators.weights import values_of_run
from amanda_tools.export import checks
from amanda_tools.export.changes import Change, Exported, Mask, Rounding
from amanda_tools.export.graphs import EditedGraph


class Exporter:
    """Exports one model.

    Args:
        name: name of the tool, for messages.
        tool: the tool.
        model: the module.
        inputs: example inputs.
        fallback: leave an operator whose change cannot be expressed as it is.
        op_filter: that of the tool's scope; None for none.
    """

    def __init__(
        self, name: str, tool: Any, model: Any, inputs: Any, *, fallback: bool, op_filter: Any
    ) -> None:
        self._torch = importlib.import_module("torch")
        if not isinstance(model, self._torch.nn.Module):
            raise UnsupportedProgramError(f"{name}: only models of PyTorch can be exported")
        self._name, self._tool, self._fallback, self._filter = name, tool, fallback, op_filter
        is_named, is_sequence = isinstance(inputs, Mapping), isinstance(inputs, (tuple, list))
        self._inputs = dict(inputs) if is_named else tuple(inputs) if is_sequence else (inputs,)
        self._args = () if is_named else self._inputs
        self._kwargs = self._inputs if is_named else None
        self._model = copy.deepcopy(model).eval()
        self.left: dict[str, str] = {}
        self._program: Any = None
        self._onnx: Any = None
        # ONNX multiplies by the reciprocal of a scale where the tool divides.
        self._is_near = False

    def write(self, path: Path) -> Exported:
        """Write the file, and check it.

        Raises:
            AmandaError, OSError: as of :func:`amanda_tools.export.export_model`.
        """
        if not (changes := list(self._tool.changes())):
            raise UnsupportedProgramError(
                f"{self._name}: there is nothing to export; run the model under the tool first"
            )
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
            tool = checks.Applied(kept) if self.left else self._tool
            difference = self._checked(found, tool, original, path.suffix)
        return Exported(path, list({change.op: 1 for change in kept}), self.left, difference)

    def _outputs_of(self, path: Path, suffix: str) -> list[Any]:
        """Read the file again, and return its outputs of the example inputs."""
        if suffix == ".onnx":
            with self._refusing("ONNX Runtime"):
                return checks.run_onnx(str(path), self._inputs, {})
        if suffix == ".pt2":
            with path.open("rb") as file:
                model = self._torch.export.load(file).module()
        else:
            files = importlib.import_module("safetensors.torch")
            model = copy.deepcopy(self._model)
            model.load_state_dict(files.load_file(path))
        return checks.flat(run_example(model, self._inputs))

    def _checked(self, found: Sequence[Any], tool: Any, model: Any, suffix: str) -> float:
        """Return the largest difference to the model under the tool.

        Raises:
            UnsupportedProgramError: it is too large.
        """
        tolerance, given = (2e-6 if suffix == ".onnx" else 0.0), (model, self._inputs, tool)
        expected = checks.outputs_under(*given, op_filter=self._filter)
        difference = checks.difference(found, expected, tolerance)
        if difference is not None:
            return difference
        where = ""
        if self._program is not None and not self._is_near:
            more = {"op_filter": self._filter, "program": self._program}
            where = checks.first_difference(*given, **more)
        if self._onnx is not None and not where:
            same = self._model, self._inputs, self._program, self._onnx, tolerance
            where = checks.first_difference_in_onnx(*same)
            difference = checks.difference(found, expected, math.inf)
            if difference is not None and not where:
                return difference
        raise UnsupportedProgramError(
            f"{self._name}: the exported model computes another result than the model under the "
            f"tool{where and f', first at op {where}'}"
        )

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
            if tuple(value.shape) != mask.mask.shape:
                raise UnsupportedProgramError(
                    f"{self._name}: the mask of op {mask.op} has the shape {mask.mask.shape}, and "
                    f"its weight {tuple(value.shape)}: the model has changed"
                )
            value.mul_(self._torch.as_tensor(mask.mask, device=value.device))

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
        divides = any(isinstance(change, Rounding) and change.divides for change in changes)
        self._is_near = divides and suffix == ".onnx"
        if suffix == ".pt2":
            file = io.BytesIO()
            with self._refusing("torch.export"):
                torch.export.save(program, file)
            return file.getvalue()
        with self._refusing("torch.onnx"):
            options = {"kwargs": self._kwargs, "dynamo": True, "verbose": False}
            self._onnx = torch.onnx.export(program, self._args, **options).model_proto
            found: bytes = self._onnx.SerializeToString()
            return found

    def _leave(self, op_id: str, reason: str) -> None:
        """Leave an operator in floating point, or refuse to."""
        if not self._fallback:
            raise UnsupportedProgramError(
                f"{self._name}: op {op_id}: {reason}; fallback=True leaves it in floating point"
            )
        self.left[op_id] = reason

    def _exported(self, model: Any) -> Any:
        preserved = importlib.import_module("torch.fx.traceback").preserve_node_meta()
        with self._refusing("torch.export"), preserved:
            return self._torch.export.export(model, self._args, self._kwargs)

    @contextmanager
    def _refusing(self, exporter: str) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except ImportError as error:
            raise UnsupportedProgramError(
                f"{self._name}: {error}: pip install 'amanda-tools[onnx]'"
            ) from error
        except Exception as error:
            while error.__cause__ is not None and isinstance(error.__cause__, Exception):
                error = error.__cause__
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UnsupportedProgramError(
                f"{self._name}: {exporter} refuses the model: {reason}"
            ) from error
