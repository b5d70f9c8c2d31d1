"""Files of simulated quantization: JSON, or safetensors with integer weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amanda.errors import AmandaError
from amanda.tools.description import OpDescription
from amanda_tools._operators.weights import values_of_run
from amanda_tools._values import tensor_files
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.quantize.numbers import integers
from amanda_tools.quantize.quantizers import Quantizer

Quantizers = Mapping[str, Sequence[Quantizer]]


def ready(quantizers: Quantizers, skipped: Sequence[tuple[OpDescription, str]]) -> Quantizers:
    """Return those of operators that have run, and refuse those that are not calibrated.

    A function's graph may hold operators that never run, since nothing needs their results, such
    as the step by which Keras finds the shape of a recurrent layer's output.

    Raises:
        AmandaError: an operator is not calibrated, or all are skipped; the message names the first
            one.
    """
    run = {op_id: found for op_id, found in quantizers.items() if any(q.has_run for q in found)}
    if not run:
        why = "run the model under the tool"
        if skipped:
            why = f"op {skipped[0][0].id} is skipped: {skipped[0][1]}"
        raise AmandaError(f"quantize: no operator has been quantized; {why}")
    for op_id, found in run.items():
        if not all(quantizer.is_ready for quantizer in found):
            raise AmandaError(f"quantize: op {op_id} is not calibrated; run it more often")
    return run


def weight_quantizers(quantizers: Quantizers) -> dict[tuple[str, int], Quantizer]:
    """Return the quantizers of weights by op id and position."""
    every = [(op_id, q) for op_id, found in quantizers.items() for q in found]
    return {(op_id, q.index): q for op_id, q in every if q.role == "weight"}


def grid_of(quantizer: Quantizer, shape: Sequence[int]) -> tuple[Array, Array]:
    """Return scale and zero point in a shape that broadcasts to a tensor of `shape`.

    Raises:
        AmandaError: they are not known yet, as those of a dynamic activation never are.
    """
    final = quantizer.final()
    if final is None:
        raise AmandaError(f"quantize: input {quantizer.index} has no range that stays")
    scale, zero = (quantizer.spread(part, shape) for part in final)
    return scale, zero


def to_integers(quantizer: Quantizer, value: Any) -> Array:
    """Return the integers that stand for a weight, in the framework's layout."""
    if quantizer.integers is not None:
        return quantizer.integers
    scale, zero = grid_of(quantizer, shape_of(value))
    kind = np.int8 if quantizer.bits <= 8 else np.int16
    array, grid = arithmetic_of(value).wide_numpy(value), quantizer.grid
    if quantizer.step is not None:
        # The learned step divides; elsewhere its inverse multiplies, with other rounding.
        return np.round(np.clip(array / scale, grid.low, grid.high)).astype(kind)
    return integers(array, scale, zero, grid).astype(kind)


def integer_weights(quantizers: Quantizers, run: Callable[[], Any]) -> dict[str, Array]:
    """Return the integers that stand for weights, by ``<op id>|<input>``.

    Raises:
        AmandaError: `run` does not execute all operators.
    """
    weights, places = weight_quantizers(quantizers), dict[str, list[int]]()
    for op_id, index in weights:
        places.setdefault(op_id, []).append(index)
    values = values_of_run(run, places, "quantize")
    return {f"{op}|{i}": to_integers(weights[op, i], value) for (op, i), value in values.items()}


def write_tensors(
    path: Path, quantizers: Quantizers, header: Mapping[str, Any], run: Callable[[], Any] | None
) -> None:
    """Write scales, zero points and integer weights as safetensors.

    Tensors are named ``<op id>|<input>|scale``, ``...|zero_point`` and ``...|integers``; the rest
    (grid, bits, axis) is JSON under ``amanda`` in the metadata.

    Raises:
        AmandaError: weights are integers, and `run`, which gives their values, is None.
        OSError: the file cannot be written.
    """
    weights = weight_quantizers(quantizers)
    has_integers = any(quantizer.grid.number == "int" for quantizer in weights.values())
    if has_integers and run is None:
        raise AmandaError(
            "quantize: export() to safetensors writes integer weights too, and needs a run that "
            "gives them: export(path, run=lambda: model(batch))"
        )
    tensors: dict[str, Array] = {}
    for op_id, found in quantizers.items():
        for quantizer in found:
            final = quantizer.final()
            if final is not None:
                name = f"{op_id}|{quantizer.index}|"
                tensors[f"{name}scale"] = np.ascontiguousarray(final[0])
                tensors[f"{name}zero_point"] = np.asarray(final[1], np.int32)
    if run is not None and has_integers:
        for place, whole in integer_weights(quantizers, run).items():
            tensors[f"{place}|integers"] = np.ascontiguousarray(whole)
    ops = {op_id: [_about(q) for q in found] for op_id, found in quantizers.items()}
    tensor_files.write_tensors(path, tensors, {"amanda": json.dumps({**header, "ops": ops})})


def _about(quantizer: Quantizer) -> dict[str, Any]:
    row = quantizer.row()
    return {key: value for key, value in row.items() if key not in ("scale", "zero_point")}
