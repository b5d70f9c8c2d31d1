"""The options of ``remat``."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from amanda.tools.reporting import type_names
from amanda_tools._bases.options import amount_of, require
from amanda_tools._bases.phases import PhaseOptions


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
        require(
            {
                f"budget={self.budget} is neither a size such as 512MiB nor a share such as 0.5": (
                    bool(amount_of(self.budget, 1 << 62))
                )
            },
            "remat",
        )

    def to_bytes(self, saved: int) -> int:
        """Return the limit in bytes, where `saved` bytes are kept without the tool."""
        return amount_of(self.budget, saved) or 0
