"""Puts changes into a model of Keras, and writes it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import amanda
from amanda.files import put_beside
from amanda.interface.calls import Variable
from amanda.tools.alignment import run_example
from amanda_tools._operators.weights import WeightsOfRun
from amanda_tools._values.tensors import Array
from amanda_tools.export import SAVED_MODEL, checks
from amanda_tools.export.base import BaseExporter
from amanda_tools.export.changes import Change, Exported, Function, Rounding

_PRODUCTS = frozenset(
    """Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose Dense DepthwiseConv1D
    DepthwiseConv2D EinsumDense""".split()
)
"""Layers whose input enters one operator with a weight, as it is or in another shape."""

_NAMES = {"": "a SavedModel", ".keras": ".keras", ".tflite": "LiteRT"}

_SIGNATURE = "serving_default"


class Exporter(BaseExporter):
    """Exports a model of Keras."""

    def __init__(self, name: str, tool: Any, model: Any, inputs: Any, **options: Any) -> None:
        is_named = isinstance(inputs, Mapping) and getattr(model, "inputs", None)
        if is_named and isinstance(model.input, Mapping) and model.input.keys() == inputs.keys():
            # The only argument is a dictionary.
            inputs = (inputs,)
        super().__init__(name, tool, model, inputs, **options)
        self._keras, self._tf = map(importlib.import_module, ("keras", "tensorflow"))
        given = [self._tf.convert_to_tensor(value) for value in self._tf.nest.flatten(inputs)]
        self._own = getattr(model, "inputs", None) or ()
        if len(self._own) == len(given):
            # As Keras itself converts them.
            given = [self._tf.cast(x, own.dtype) for x, own in zip(given, self._own, strict=True)]
        self._given = tuple(given)
        self._names: list[str] = []
        self._in_floats = set[str]()
        """In LiteRT, ids of the operators that multiply rounded floating-point numbers."""
        self._weights: dict[Change, tuple[Variable, Any]] = {}
        """Of changes of weights the variable, and the type in which the operator reads it."""

    def write(self, path: Path) -> Exported:
        """Write the file or folder, and check it.

        Raises:
            AmandaError, OSError: as of :func:`amanda_tools.export.export_model`.
        """
        changes, places = self._changes(), dict[str, list[int]]()
        for change in changes:
            places.setdefault(change.op, []).append(change.input)
        run = checks.Applied(())
        with self._refusing("Keras"), amanda.apply(run):
            weights = WeightsOfRun(lambda: run_example(self._model, self._inputs), places)
        run.check(changes)
        for change in changes:
            weight = weights.of_op(change.op, change.input)
            if weight is not None and weight.variable is not None:
                self._weights[change] = weight.variable, weight.value.dtype
            if weight is not None and _is_in_floats(change, tuple(weight.value.shape)):
                self._in_floats.add(change.op)
            if reason := self._reason(change, path.suffix):
                self._leave(change.op, f"{_NAMES[path.suffix]} cannot express its change: {reason}")
        kept = [change for change in changes if change.op not in self.left]
        with put_beside(path, () if path.suffix else SAVED_MODEL) as partial:
            with self._refusing(_NAMES[path.suffix]), self._baked(kept):
                self._save(partial, kept)
            difference = self._checked(partial, kept)
        return Exported(path, list({change.op: 1 for change in kept}), self.left, difference)

    # -- what a format can have ---------------------------------------------

    def _reason(self, change: Change, suffix: str) -> str:
        """Return the reason why a format cannot have a change; "" if it can."""
        rounding = change if isinstance(change, Rounding) else None
        count = 0 if rounding is None else np.size(rounding.scale)
        if rounding is not None and rounding.axis is None and count > 1:
            return "its channels are on several axes"
        if change in self._weights or not suffix:
            return ""
        if rounding is None or count > 1 or rounding.integers is not None:
            return f"input {change.input} is no weight, and not rounded by one scale"
        if suffix == ".tflite":
            return "" if rounding.high - rounding.low in (254, 255) else "it has integers of 8 bits"
        layer = self._layer_of(change.op)
        inside = change.input or type(layer).__name__ not in _PRODUCTS
        return f"input {change.input} is within a {type(layer).__name__}" if inside else ""

    def _layer_of(self, op_id: str) -> Any:
        """Return the layer that has made an operator, or the one around it that tells no layers."""
        layer, names = self._model, op_id.split("/")[1:-1]
        while names and getattr(layer, "inputs", None):
            layer = layer.get_layer(names.pop(0))
        return layer

    # -- writing ------------------------------------------------------------

    @contextmanager
    def _baked(self, changes: Sequence[Change]) -> Iterator[None]:
        """Write the changes of weights into the model meanwhile."""
        before = self._model.get_weights()
        try:
            for change in changes:
                if change in self._weights:
                    variable, dtype = self._weights[change]
                    variable.change(partial(self._changed, change, dtype))
            yield
        finally:
            self._model.set_weights(before)

    def _changed(self, change: Change, dtype: Any, value: Any) -> Any:
        """Make a change of a value, in the type in which its operator reads it, if known."""
        changed = checks.changed(self._tf.cast(value, dtype or value.dtype), change)
        return self._tf.cast(changed, value.dtype)

    def _save(self, path: Path, kept: Sequence[Change]) -> None:
        others = [change for change in kept if change not in self._weights]
        if path.suffix == ".keras":
            name = self._model.name
            self._with_roundings(self._model, others, name, name, Counter()).save(path)
            return
        if path.suffix == ".tflite":
            others = [lite for change in kept if (lite := self._for_lite(change)) is not None]
        serve, module = self._served(others)
        if path.suffix != ".tflite":
            self._tf.saved_model.save(module, str(path), signatures={_SIGNATURE: serve})
            return
        converter = self._tf.lite.TFLiteConverter.from_concrete_functions([serve], module)
        if any(isinstance(change, Function) for change in others):
            converter.optimizations = [self._tf.lite.Optimize.DEFAULT]
        path.write_bytes(converter.convert())

    def _with_roundings(
        self, model: Any, changes: Sequence[Change], place: str, name: str, calls: Counter[str]
    ) -> Any:
        """Return a copy of a graph of layers that rounds what enters some of them.

        Args:
            place: its path in the ids of operators.
            name: its name, another one for each call, as these round by other scales.
            calls: by path, how often layers have been called.
        """
        if not changes:
            return model
        keras = self._keras

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            own = f"{place}/{layer.name}"
            number = calls[own]
            calls[own] += 1
            inner = [change for change in changes if change.op.startswith(f"{own}/")]
            if inner and getattr(layer, "inputs", None):
                new = f"{layer.name}_call_{number}" if number else layer.name
                layer = self._with_roundings(model.get_layer(layer.name), inner, own, new, calls)
                inner = []
            for change in inner:
                if isinstance(change, Rounding) and change.op.endswith(f":{number}"):
                    rounded = _rounded(keras.ops, args[0], change, layer.compute_dtype)
                    args = (rounded, *args[1:])
            return layer(*args, **kwargs)

        if isinstance(model, keras.Sequential) or name != model.name:
            model = keras.Model(model.inputs, model.outputs, name=name)
        copy = keras.models.clone_model(model, call_function=call)
        for layer in model.layers:
            if layer.weights:
                copy.get_layer(layer.name).set_weights(layer.get_weights())
        return copy

    def _served(self, changes: Sequence[Change]) -> tuple[Any, Any]:
        """Return a concrete function with changes, and a module with the variables that it reads.

        Raises:
            UnsupportedProgramError: an operator that is changed is not in the function.
        """
        tf, own = self._tf, self._own
        shapes = [each.shape for each in own] or [(None, *v.shape[1:]) for v in self._given]
        self._names = [each.name for each in own] or [f"input_{i}" for i in range(len(shapes))]
        types = [value.dtype for value in self._given]
        specs = [tf.TensorSpec(*each) for each in zip(shapes, types, self._names, strict=True)]
        function = tf.function(self._flat(self._model)).get_concrete_function(*specs)
        applied = checks.Applied(changes)
        with amanda.apply(applied):
            function(*self._given)
            made = (driver.with_routines(function) for driver in applied.drivers)
            call = next(each for each in made if each is not None)
        applied.check(changes)

        @tf.function(input_signature=specs)  # type: ignore[untyped-decorator]
        def serve(*given: Any) -> dict[str, Any]:
            return {f"output_{i}": output for i, output in enumerate(call(*given))}

        module = tf.Module()
        module.values = [variable.value for variable in self._model.variables]
        return serve.get_concrete_function(), module

    def _flat(self, model: Any) -> Callable[..., Any]:
        """Return a function of the flat inputs that gives the flat outputs of a model."""
        nest = self._tf.nest

        def run(*given: Any) -> Any:
            return nest.flatten(run_example(model, nest.pack_sequence_as(self._inputs, given)))

        return run

    def _for_lite(self, change: Change) -> Change | None:
        """Return a rounding as the operator by which the converter knows one; None for a weight
        that stays in floating point, with the values that it has now."""
        is_weight = change in self._weights
        if not isinstance(change, Rounding) or change.op in self._in_floats:
            return None if is_weight else change
        if is_weight:
            change = attrs.evolve(change, low=-127, high=127)
        tf, axis, is_narrow = self._tf, change.axis, change.high - change.low == 254
        scale = np.ravel(change.scale).astype(np.float32)
        bounds = [
            (limit - np.ravel(change.zero_point)) * scale for limit in (change.low, change.high)
        ]

        def function(value: Any) -> Any:
            if axis is None:
                given = (float(bound[0]) for bound in bounds)
                return tf.quantization.fake_quant_with_min_max_vars(
                    value, *given, narrow_range=is_narrow
                )
            flat = tf.quantization.fake_quant_with_min_max_vars_per_channel(
                tf.reshape(value, value.shape[: axis + 1]), *bounds, narrow_range=is_narrow
            )
            return tf.reshape(flat, value.shape)

        return Function(change.op, change.input, function)

    # -- checking -----------------------------------------------------------

    def _checked(self, path: Path, kept: Sequence[Change]) -> float:
        """Return the largest difference to the model under the tool.

        Raises:
            UnsupportedProgramError: it is too large.
        """
        run, read, tolerance = self._flat(self._model), self._read_saved, 0.0
        if path.suffix:
            read = self._read_keras if path.suffix == ".keras" else self._read_lite
        with self._refusing(_NAMES[path.suffix]):
            found, values = read(path)
        if path.suffix != ".keras":
            run = self._tf.function(run).get_concrete_function(*self._given)
        if path.suffix == ".tflite":
            tolerance = max(1e-5, self._error_of_rounding(run, kept))

        def computed() -> Mapping[str, Array]:
            # The file has weights with their changes, which is no difference of what reads them.
            read = "/ReadVariableOp:"
            return {op_id: value for op_id, value in values().items() if read not in op_id}

        return self._difference(found, run, self._given, kept, tolerance, computed)

    def _error_of_rounding(self, run: Callable[..., Any], changes: Sequence[Change]) -> float:
        """Return how far the roundings move the outputs, relative to values over 1: operators of
        LiteRT round their results, too, which moves them less."""
        made = {c: Function(c.op, c.input, partial(self._changed, c, None)) for c in changes}
        others = [made[change] for change in changes if not isinstance(change, Rounding)]
        tools = map(checks.Applied, ([*made.values()], others))
        pairs = zip(*(checks.outputs_under(run, self._given, tool) for tool in tools), strict=True)
        return max(float(np.abs(a - b).max(initial=0) / np.abs(a).max(initial=1)) for a, b in pairs)

    def _read_keras(self, path: Path) -> Any:
        """Run a file; return its outputs, and a function that gives those of operators by id."""
        run = self._flat(self._keras.saving.load_model(path, compile=False))

        def values() -> Mapping[str, Array]:
            kept = checks.Outputs()
            checks.outputs_under(run, self._given, kept)
            return kept.values

        return checks.flat(run(*self._given)), values

    def _read_saved(self, path: Path) -> Any:
        """Run a folder; as :meth:`_read_keras`."""
        program = self._tf.saved_model.load(path)
        serve = program.signatures[_SIGNATURE]

        def run(*given: Any) -> Any:
            return _in_order(serve(**dict(zip(self._names, given, strict=True))))

        def values() -> Mapping[str, Array]:
            kept = checks.Outputs(lambda context: context.get_op().name)
            checks.outputs_under(run, self._given, kept)
            # A name that lacks the type of its operator has it at the end there.
            short = {name.rpartition("/")[0]: value for name, value in kept.values.items()}
            return self._by_op(program, {**short, **kept.values})

        return checks.flat(run(*self._given)), values

    def _read_lite(self, path: Path) -> Any:
        """Run a file; as :meth:`_read_keras`."""
        lite = self._tf.lite
        kernels = lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        options = {"experimental_op_resolver_type": kernels}
        program = lite.Interpreter(str(path), experimental_preserve_all_tensors=True, **options)
        run = program.get_signature_runner(_SIGNATURE)
        found = _in_order(run(**dict(zip(self._names, self._given, strict=True))))

        def values() -> Mapping[str, Array]:
            kept = {}
            for each in program.get_tensor_details():
                scale, zero = each["quantization"]
                value = program.get_tensor(each["index"])
                kept[each["name"]] = (value - np.float32(zero)) * scale if scale else value
            return self._by_op(program, kept)

        return checks.flat(found), values

    def _by_op(self, program: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of nodes of a program by the ids of the operators that give them."""
        return checks.by_op(amanda.align(self._model, self._inputs, program), values)


def _is_in_floats(change: Change, shape: Sequence[int]) -> bool:
    """True if LiteRT cannot multiply integers of a weight: in groups, of more than 8 bits, or with
    scales per channel of a product or on an inner axis, on which its converter fails (2.21)."""
    if not isinstance(change, Rounding):
        return False
    is_last = change.axis is None or (len(shape) == 4 and not set(shape[change.axis + 1 :]) - {1})
    return bool(change.group) or change.high > 127 or not is_last


def _rounded(ops: Any, value: Any, change: Rounding, dtype: str) -> Any:
    """Return a symbolic tensor of Keras that is rounded, of the type in which a layer computes."""

    def cast(value: Any, dtype: str) -> Any:
        return value if value.dtype == dtype else ops.cast(value, dtype)

    scale, zero = (
        np.ravel(part).astype(np.float32)[0] for part in (change.scale, change.zero_point)
    )
    # In the order in which the tool computes, of whose results the last bits count.
    value = cast(cast(value, dtype), "float32" if dtype in ("float16", "bfloat16") else dtype)
    scaled = value / float(scale) if change.divides else value * float(np.float32(1) / scale)
    whole = ops.clip(ops.round(scaled) + float(zero), change.low, change.high)
    return cast((whole - float(zero)) * float(scale), dtype)


def _in_order(outputs: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a signature, ``output_0`` first."""
    return [outputs[f"output_{i}"] for i in range(len(outputs))]
