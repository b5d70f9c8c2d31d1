"""The options of ``quantize``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import attrs

from amanda.tools.reporting import applies_if, type_names
from amanda_tools._bases.options import require
from amanda_tools._operators.op_table import default_types

DEFAULT_OPS = default_types("quantize")
"""Types quantized by default; a matrix product with a weight counts as a linear one."""


@attrs.frozen(kw_only=True)
class QuantizeOptions:
    """The options of ``quantize``.

    Attributes:
        method: static takes ranges of activations from a calibration, dynamic from each tensor
            itself, qat trains their steps with the model (LSQ).
        weight_bits: 2 to 16; 0 leaves weights alone.
        activation_bits: 2 to 16; 0 leaves activations alone.
        number: integers, or 8-bit floating-point numbers (e4m3, e5m2).
        per_channel: weights have a scale per output channel, else one.
        group: weights have a scale for each `group` consecutive input channels, at each place of
            the other axes; 0 for none.
        gptq: weights are rounded column by column, errors compensated (GPTQ), with the data of the
            calibration; else to the nearest.
        smooth: input channels are scaled between data and weight (SmoothQuant), with this alpha,
            from the calibration; 0 for none.
        per_token: of method=dynamic: activations have a range for each position of the axes before
            the last one, which holds the features.
        symmetric: activations have the zero point 0; weights always have.
        observer: the full range (minmax), the range without the outermost values (percentile), or
            the one with the least squared error (mse).
        percentile: of observer=percentile.
        calibration: executions of each op that are observed before it is quantized.
        keep: operators that stay in floating point: those with the lowest signal-to-noise ratio
            (SQNR) at the calibration.
        sensitivity: report the SQNR of each operator; with keep it is.
        learning_rate: of qat: the tool trains what it learns by gradient descent, at each backward
            pass; 0 leaves it to your optimizer, which is not possible in graph modes.
        ops: types of the ops to quantize.
        exclude: op ids or module paths to leave alone, patterns with * and ?.
        export: file that amanda run exports the quantized model to: of PyTorch .onnx or .pt2, of
            Keras .keras, .tflite, or the folder of a SavedModel.
        fallback: of export: operators that the format cannot express stay in floating point.
    """

    method: Literal["static", "dynamic", "qat"] = "static"
    weight_bits: int = 8
    activation_bits: int = 8
    number: Literal["int", "e4m3", "e5m2"] = "int"
    per_channel: bool = attrs.field(
        default=True, metadata=applies_if("weights: weight_bits above 0", lambda o: o.weight_bits)
    )
    group: int = attrs.field(
        default=0,
        metadata=applies_if(
            "weights per channel: weight_bits above 0, per_channel=true",
            lambda o: o.weight_bits and o.per_channel,
        ),
    )
    gptq: bool = attrs.field(
        default=False,
        metadata=applies_if(
            "weights of integers: weight_bits above 0, number=int; not method=qat",
            lambda o: o.weight_bits and o.number == "int" and o.method != "qat",
        ),
    )
    smooth: float = attrs.field(
        default=0.0,
        converter=float,
        metadata=applies_if(
            "weights and activations of integers; not method=qat",
            lambda o: (
                not o.smooth
                or (o.weight_bits and o.activation_bits and o.number == "int" and o.method != "qat")
            ),
        ),
    )
    per_token: bool = attrs.field(
        default=False,
        metadata=applies_if(
            "activations of method=dynamic", lambda o: o.activation_bits and o.method == "dynamic"
        ),
    )
    symmetric: bool = attrs.field(
        default=False,
        metadata=applies_if(
            "activations of integers: activation_bits above 0, number=int",
            lambda o: o.activation_bits and o.number == "int",
        ),
    )
    observer: Literal["minmax", "percentile", "mse"] = "minmax"
    percentile: float = attrs.field(
        default=99.99,
        converter=float,
        metadata=applies_if("observer=percentile", lambda o: o.observer == "percentile"),
    )
    calibration: int = attrs.field(
        default=1,
        metadata=applies_if(
            "method=static|qat, gptq, smooth", lambda o: o.method != "dynamic" or o.observes_data
        ),
    )
    keep: int = attrs.field(
        default=0, metadata=applies_if("method=static|dynamic", lambda o: o.method != "qat")
    )
    sensitivity: bool = attrs.field(
        default=False, metadata=applies_if("method=static|dynamic", lambda o: o.method != "qat")
    )
    learning_rate: float = attrs.field(default=0.0, converter=float)
    ops: Sequence[str] = attrs.field(default=DEFAULT_OPS, converter=type_names)
    exclude: Sequence[str] = attrs.field(default=(), converter=type_names)
    export: str = ""
    fallback: bool = attrs.field(
        default=False, metadata=applies_if("a file: export=", lambda o: o.export)
    )

    @property
    def observes_data(self) -> bool:
        """True if weights are rounded by what the data tell."""
        return self.gptq or self.smooth > 0

    def __attrs_post_init__(self) -> None:
        is_int = self.number == "int"
        bits = {"weight_bits": self.weight_bits, "activation_bits": self.activation_bits}
        require(
            {
                **{
                    f"{name}={value} is neither 0 nor from 2 to 16": value == 0 or 2 <= value <= 16
                    for name, value in bits.items()
                },
                **{
                    f"number={self.number} has 8 bits: {name}={value}": is_int or value in (0, 8)
                    for name, value in bits.items()
                },
                "weight_bits=0 and activation_bits=0 leave everything as it is": any(bits.values()),
                f"group={self.group} is neither 0 nor above 1": self.group == 0 or self.group > 1,
                f"smooth={self.smooth} is not from 0 to 1": 0 <= self.smooth <= 1,
                f"keep={self.keep} is negative": self.keep >= 0,
                f"percentile={self.percentile} is not in (50, 100]": 50 < self.percentile <= 100,
                f"calibration={self.calibration} is not positive": self.calibration > 0,
                f"number={self.number} cannot be learned: method=qat": is_int
                or self.method != "qat",
                f"learning_rate={self.learning_rate} is negative": self.learning_rate >= 0,
                f"learning_rate={self.learning_rate} is infinite": self.learning_rate < math.inf,
                "learning_rate is of method=qat only": self.method == "qat"
                or not self.learning_rate,
                f"number={self.number} has no observer=mse": is_int or self.observer != "mse",
                f"export={self.export}: with the suffix .safetensors a file has no operators, "
                "which round; .pt2 and .onnx have": not self.export.endswith(".safetensors"),
            },
            "quantize",
        )
