"""The options of ``prune``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from amanda.tools.reporting import applies_if, type_names
from amanda_tools._bases.options import require
from amanda_tools._operators.op_table import default_types
from amanda_tools.export import FORMATS

Method = Literal["magnitude", "nm", "tile", "channel", "activation", "attention"]

STATIC_METHODS = ("magnitude", "nm", "tile")
"""Methods that give a weight one mask; the others choose anew for every input."""

_WITHOUT_MASKS = applies_if("new masks, not masks=", lambda o: not o.masks)


def _makes_masks(method: str) -> dict[str, Any]:
    """Metadata of an option of a method that makes masks."""
    return applies_if(
        f"method={method} without masks=", lambda o: o.method == method and not o.masks
    )


@attrs.frozen(kw_only=True)
class PruneOptions:
    """The options of ``prune``.

    Attributes:
        method: what becomes zero: single weights (magnitude), all but n of m weights (nm), columns
            and rows of tiles (tile), output channels per sample (channel), positions per sample
            (activation), blocks of keys per sample (attention).
        sparsity: fraction that becomes zero, from 0 to below 1; nm has its own.
        ops: types of the ops to prune; without any, those that the method is for.
        exclude: op ids or module paths to leave alone, patterns with * and ?.
        scope: of magnitude: the fraction is one of each op, or global.
        n: weights that stay in each group (nm).
        m: weights of a group, along the input axis (nm).
        tile: columns of a tile (tile).
        block: keys that stay or go together (attention).
        start: training step of the first mask (static methods).
        end: training step from which the masks do not change (static methods).
        every: training steps from one mask to the next (static methods).
        masks: file of masks to use instead of new ones (static methods).
        cut: leave out the same channels for all samples, and heads of attention: bake= gets a
            smaller model (channel, PyTorch).
        bake: file that amanda run exports the pruned model to: of PyTorch .onnx, .pt2 or
            .safetensors (static methods, cut=true), of Keras .keras, .tflite, or the folder of a
            SavedModel (static methods).
    """

    method: Method = "magnitude"
    sparsity: float = attrs.field(
        default=0.5,
        converter=float,
        metadata=applies_if(
            "all methods but nm (which has n and m), without masks=",
            lambda o: o.method != "nm" and not o.masks,
        ),
    )
    ops: Sequence[str] = attrs.field(
        default=(),
        converter=type_names,
        metadata=applies_if("cut=false", lambda o: not o.cut),
    )
    exclude: Sequence[str] = attrs.field(default=(), converter=type_names)
    scope: Literal["op", "global"] = attrs.field(default="op", metadata=_WITHOUT_MASKS)
    n: int = attrs.field(default=2, metadata=_makes_masks("nm"))
    m: int = attrs.field(default=4, metadata=_makes_masks("nm"))
    tile: int = attrs.field(default=128, metadata=_makes_masks("tile"))
    block: int = attrs.field(
        default=1, metadata=applies_if("method=attention", lambda o: o.method == "attention")
    )
    start: int = attrs.field(default=0, metadata=_WITHOUT_MASKS)
    end: int = attrs.field(default=0, metadata=_WITHOUT_MASKS)
    every: int = attrs.field(
        default=1, metadata=applies_if("a schedule: end=", lambda o: o.end > 0)
    )
    masks: str = ""
    cut: bool = attrs.field(
        default=False, metadata=applies_if("method=channel", lambda o: o.method == "channel")
    )
    bake: str = attrs.field(
        default="",
        metadata=applies_if(
            "static methods, or cut=true", lambda o: o.cut or o.method in STATIC_METHODS
        ),
    )

    def __attrs_post_init__(self) -> None:
        is_static = self.method in STATIC_METHODS
        require(
            {
                f"sparsity={self.sparsity} is not in [0, 1)": 0 <= self.sparsity < 1,
                f"scope=global is for method=magnitude, not {self.method}": self.scope == "op"
                or self.method == "magnitude",
                f"n={self.n} of m={self.m} is not 1 <= n <= m": 1 <= self.n <= self.m,
                f"tile={self.tile} is not positive": self.tile > 0,
                f"block={self.block} is not positive": self.block > 0,
                f"start={self.start}, end={self.end} are not 0 <= start <= end": self.start >= 0
                and (self.start <= self.end or self.end == 0),
                f"every={self.every} is not positive": self.every > 0,
                f"method={self.method} has no schedule (start, end) and no masks file": is_static
                or not (self.start or self.end or self.masks),
                f"bake={self.bake} has none of the suffixes {', '.join(FORMATS['pytorch'])} of "
                "PyTorch, whose models cut=true is for": not (self.cut and self.bake)
                or Path(self.bake).suffix in FORMATS["pytorch"],
            },
            "prune",
        )

    @property
    def types(self) -> Sequence[str]:
        """Types of the ops that are pruned."""
        return self.ops or default_types(f"prune:{'magnitude' if self.cut else self.method}")
