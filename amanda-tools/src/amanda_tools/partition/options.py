"""The options of ``partition``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import attrs

from amanda.tools.reporting import type_names
from amanda_tools._bases.options import amount_of, require
from amanda_tools.partition.cut import Range


@attrs.frozen(kw_only=True)
class PartitionOptions:
    """The options of ``partition``.

    Attributes:
        parts: number of the parts.
        inside: module paths and op ids that have to be in the first part, patterns with * and ?; a
            module stands for all in it.
        outside: those that have to be in the last part.
        flops: FLOPs of a part, a range of shares such as 0.3-0.7, 0.3- or -0.7, one for all parts
            or one for each.
        memory: bytes of the parameters of a part, likewise, shares or sizes such as -64MiB.
        export: folder that the parts are written to, when the program has ended.
        format: pt2 or onnx, the files that are written.
    """

    parts: int = attrs.field(default=2, validator=attrs.validators.ge(2))
    inside: Sequence[str] = attrs.field(default=(), converter=type_names)
    outside: Sequence[str] = attrs.field(default=(), converter=type_names)
    flops: Sequence[str] = attrs.field(default=(), converter=type_names)
    memory: Sequence[str] = attrs.field(default=(), converter=type_names)
    export: str = ""
    format: Literal["pt2", "onnx"] = "pt2"

    def __attrs_post_init__(self) -> None:
        for name, texts in (("flops", self.flops), ("memory", self.memory)):
            wrong = [text for text in texts if _range(text, 1) is None]
            require(
                {
                    f"{name}={text} is no range such as 0.3-0.7, 0.3- or -64MiB": False
                    for text in wrong
                }
                | {f"{name} has {len(texts)} ranges, for {self.parts} parts": (
                    len(texts) in (0, 1, self.parts)
                )},
                "partition",
            )  # fmt: skip

    def limits(self, flops: int, memory: int) -> list[tuple[Range, Range]]:
        """Return the ranges of the FLOPs, and of the bytes of parameters, of each part.

        Args:
            flops, memory: those of the model.
        """
        return [*zip(self._each(self.flops, flops), self._each(self.memory, memory), strict=True)]

    def _each(self, texts: Sequence[str], whole: int) -> list[Range]:
        found = [_range(text, whole) or (0, math.inf) for text in texts or ("-",)]
        return found if len(found) == self.parts else found * self.parts


def _range(text: str, whole: int) -> Range | None:
    """Return the ends of a range; None for any other text."""
    low, dash, high = text.partition("-")
    ends = amount_of(low or "0", whole), amount_of(high, whole) if high else math.inf
    return None if not dash or ends[0] is None or ends[1] is None else (ends[0], ends[1])
