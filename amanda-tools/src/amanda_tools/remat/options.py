"""The options of ``remat``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from amanda.tools.reporting import type_names
from amanda_tools._bases.options import require
from amanda_tools._bases.phases import PhaseOptions

_UNITS = {"": 1, "b": 1}
"""Bytes by unit: kB and the like are powers of 1000, KiB and the like of 1024."""

_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


@attrs.frozen(kw_only=True)
class RematOptions(PhaseOptions):
    """The options of ``remat``.

    Attributes:
        budget: limit of the memory kept for the backward pass: bytes ("512MiB", "2GB", 1000000), or
            a fraction of what is kept without the tool (0.5).
        apply: recompute; else only plan.
        ops: types of the ops that may be recomputed; none for all of the framework's own.
        exclude: op ids or module paths that are never recomputed, patterns with * and ?.
    """

    budget: str = attrs.field(default="0.5", converter=str)
    apply: bool = True
    ops: Sequence[str] = attrs.field(default=(), converter=type_names)
    exclude: Sequence[str] = attrs.field(default=(), converter=type_names)

    def __attrs_post_init__(self) -> None:
        match = _SIZE.fullmatch(self.budget)
        known = bool(match) and match is not None and match[2].lower() in _UNITS
        require(
            {
                f"budget={self.budget} is neither a size such as 512MiB nor a share such as 0.5": (
                    known and self.to_bytes(1 << 62) > 0
                )
            },
            "remat",
        )

    def to_bytes(self, saved: int) -> int:
        """Return the limit in bytes, where `saved` bytes are kept without the tool."""
        match = _SIZE.fullmatch(self.budget)
        assert match is not None
        number, unit = float(match[1]), match[2].lower()
        if not unit and "." in match[1] and number <= 1:
            return int(number * saved)
        return int(number * _UNITS[unit])
