"""The options of ``inject``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from amanda.tools.reporting import applies_if, type_names
from amanda_tools._bases.options import require
from amanda_tools._operators.op_table import default_types

FaultKind = Literal["bitflip", "stuck0", "stuck1", "value", "normal", "uniform"]
Target = Literal["outputs", "weights", "gradients"]

DEFAULT_OPS = default_types("inject")
"""Types that faults go into by default."""


def _of_faults(*faults: str) -> dict[str, Any]:
    """Metadata of an option of some faults."""
    return applies_if(f"fault={'|'.join(faults)}", lambda o: o.fault in faults)


@attrs.frozen(kw_only=True)
class InjectOptions:
    """The options of ``inject``.

    Attributes:
        fault: what happens to an element: a bit is inverted (bitflip), or is always 0 or 1 (stuck0,
            stuck1); it becomes a number (value), gets noise added (normal), or is drawn anew
            (uniform).
        target: the op's outputs, its weight, or the gradients of its outputs.
        ops: types of the ops to inject into.
        exclude: op ids or module paths to leave alone, patterns with * and ?.
        count: elements per execution.
        rate: the probability that an element is hit, instead of count.
        bit: which bit, 0 is the lowest; -1 for any.
        value: the number of fault=value.
        std: standard deviation of fault=normal.
        low: lower end of fault=uniform.
        high: upper end of fault=uniform.
        seed: another seed gives other faults, the same one the same.
        limit: faults that the result lists; later ones are counted only.
    """

    fault: FaultKind = "bitflip"
    target: Target = "outputs"
    ops: Sequence[str] = attrs.field(default=DEFAULT_OPS, converter=type_names)
    exclude: Sequence[str] = attrs.field(default=(), converter=type_names)
    count: int = attrs.field(
        default=1, metadata=applies_if("a number of elements, not rate=", lambda o: o.rate is None)
    )
    rate: float | None = attrs.field(default=None, converter=attrs.converters.optional(float))
    bit: int = attrs.field(default=-1, metadata=_of_faults("bitflip", "stuck0", "stuck1"))
    value: float = attrs.field(default=0.0, converter=float, metadata=_of_faults("value"))
    std: float = attrs.field(default=1.0, converter=float, metadata=_of_faults("normal"))
    low: float = attrs.field(default=-1.0, converter=float, metadata=_of_faults("uniform"))
    high: float = attrs.field(default=1.0, converter=float, metadata=_of_faults("uniform"))
    seed: int = 0
    limit: int = 10_000

    def __attrs_post_init__(self) -> None:
        require(
            {
                f"count={self.count} is not positive": self.count > 0,
                f"rate={self.rate} is not in [0, 1]": self.rate is None or 0 <= self.rate <= 1,
                f"bit={self.bit} is not in -1 ... 63": -1 <= self.bit < 64,
                f"std={self.std} is not in [0, inf)": 0 <= self.std < math.inf,
                f"low={self.low}, high={self.high} are not finite": math.isfinite(self.low)
                and math.isfinite(self.high),
                f"low={self.low}, high={self.high}: low is above high": self.low <= self.high,
                f"seed={self.seed} is negative": self.seed >= 0,
            },
            "inject",
        )

    @property
    def is_permanent(self) -> bool:
        """True if an operator has the same fault in all of its executions."""
        return self.target == "weights" or self.fault in ("stuck0", "stuck1")
