"""Puts changes into a PyTorch model, and writes it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import UnsupportedProgramError
from amanda.files import new_beside
from amanda.tool import vanilla
from amanda.tools.alignment import AlignedOp, run_example
from amanda_tools._internals import leaves_of
from amanda_tools._operators.weights import values_of_run
from amanda_tools._values.tensors import Array
from amanda_tools.export import checks
from amanda_tools.export.base import BaseExporter
from amanda_tools.export.changes import Change, Exported, Mask, Rounding
from amanda_tools.export.graphs import EditedGraph, packed_in_onnx
from amanda_tools.export.model_of_run import copied

_ONNX_TOLERANCE = 2e-6

_FUSED = ("/_transformer_encoder_layer_fwd:", "/_native_multi_head_attention:")
"""In ids of operators that ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` are on
PyTorch's fast path."""


class Exporter(BaseExporter):
    """Exports a module."""

    def __init__(self, name: str, tool: Any, model: Any, inputs: Any, **options: Any) -> None:
        self._torch = importlib.import_module("torch")
        is_named, is_sequence = isinstance(inputs, Mapping), isinstance(inputs, (tuple, list))
        inputs = dict(inputs) if is_named else tuple(inputs) if is_sequence else (inputs,)
        super().__init__(name, tool, model, copied(inputs), **options)
        with self._refusing("copy.deepcopy"):
            held = [
                leaf for module in model.modules() for leaf in leaves_of([*vars(module).values()])
            ]
            self._model = copied(model, held).eval()
        modules: list[Any] = [*self._model.modules()]
        for module in modules:
            config: Any = getattr(module, "config", None)
            # A cache of Transformers, which serves only the next call, is no output of a program.
            if getattr(config, "use_cache", False):
                # That of a class is not copied with the model.
                vars(module)["config"] = copy.copy(config)
                module.config.use_cache = False
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
        with self._alone(), new_beside(path) as partial:
            # The last bits of a product may depend on whether its weight requires gradients, which
            # that of a tool does not (2.13).
            original = copy.deepcopy(self._model).requires_grad_(False)
            self._bake(masks)
            is_state = path.suffix == ".safetensors"
            partial.write_bytes(
                self._state(others) if is_state else self._written(path.suffix, others)
            )
            found = self._outputs_of(partial, path.suffix)
            kept = [change for change in changes if change.op not in self.left]
            tolerance = _ONNX_TOLERANCE if path.suffix == ".onnx" else 0.0
            given = found, self._run_of(original), self._inputs, kept, tolerance
            difference = self._difference(*given, lambda: self._values(original, kept))
        return Exported(path, list({change.op: 1 for change in kept}), self.left, difference)

    @contextmanager
    def _alone(self, ops: Iterable[str] = ()) -> Iterator[None]:
        """Run and export the model meanwhile without gradients, and leave random numbers as they
        were.

        PyTorch's fast path is taken if one of these operators is of it: a tool that changes values
        keeps the model from it.
        """
        torch, mha = self._torch, self._torch.backends.mha
        devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        before, is_fused = mha.get_fastpath_enabled(), any(n in op for op in ops for n in _FUSED)
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices):
            mha.set_fastpath_enabled(before and is_fused)
            try:
                yield
            finally:
                mha.set_fastpath_enabled(before)

    def _run_of(self, model: Any) -> Callable[..., Any]:
        """Return a function that runs a model on copies of its inputs, and leaves its buffers as
        they were."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with vanilla():
                args, kwargs = copied((args, kwargs))
                before = [
                    (module, name, buffer, buffer.clone())
                    for module in model.modules()
                    for name, buffer in module.named_buffers(recurse=False)
                ]
            try:
                return model(*args, **kwargs)
            finally:
                with vanilla():
                    for module, name, buffer, value in before:
                        setattr(module, name, buffer.copy_(value))

        return run

    @contextmanager
    def _refusing(self, exporter: str) -> Iterator[None]:
        """Also drop what PyTorch writes of an error to the standard error."""
        before, said = logging.root.manager.disable, io.StringIO()
        logging.disable(logging.ERROR)
        try:
            with super()._refusing(exporter), contextlib.redirect_stderr(said):
                yield
        finally:
            logging.disable(before)
        sys.stderr.write(said.getvalue())

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
        return checks.flat(run_example(self._run_of(model.requires_grad_(False)), self._inputs))

    def _values(self, model: Any, changes: Sequence[Change]) -> Mapping[str, Array]:
        """Return the outputs of operators in the program, by id."""
        if self._program is None:
            return {}
        divides = any(isinstance(each, Rounding) and each.divides for each in changes)
        values = checks.values_in_graph(self._program, copied(self._inputs), divides=divides)
        return checks.by_op(self._ops_of(model, self._program), values)

    def _ops_of(self, model: Any, program: Any) -> dict[str, AlignedOp]:
        return amanda.align(self._run_of(model), self._inputs, program)

    def _recheck(self, found: Sequence[Array], expected: Sequence[Array]) -> tuple[str, Any]:
        if self._onnx is None:
            return "", None
        given = self._program, copied(self._inputs), self._onnx, _ONNX_TOLERANCE
        with self._refusing("ONNX Runtime"):
            where = checks.first_difference_in_onnx(
                *given, lambda: self._ops_of(self._model, self._program)
            )
        return where, None if where else checks.difference(found, expected, math.inf)

    # -- masks --------------------------------------------------------------

    def _bake(self, masks: Sequence[Mask]) -> None:
        places: dict[str, list[int]] = {}
        for mask in masks:
            places.setdefault(mask.op, []).append(mask.input)
        if not masks:
            return
        run = self._run_of(self._model)
        values = values_of_run(lambda: run_example(run, self._inputs), places, self._name)
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
        given = self._model.state_dict()
        for key, value in given.items():
            if not isinstance(value, self._torch.Tensor):
                raise UnsupportedProgramError(
                    f"{self._name}: .safetensors holds tensors only, and {key} of the state "
                    f"dictionary is a {type(value).__name__}; .pt2 and .onnx need no such state"
                )
        state = {key: value.contiguous().clone() for key, value in given.items()}
        found: bytes = importlib.import_module("safetensors.torch").save(state)
        return found

    # -- programs -----------------------------------------------------------

    def _written(self, suffix: str, changes: Sequence[Change]) -> bytes:
        torch = self._torch
        program = self._exported(self._model)
        aligned = self._ops_of(self._model, program)
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
