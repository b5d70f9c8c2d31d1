"""Checks of option values that concern more than one option, or one of several choices; sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping

_UNITS = {"": 1, "b": 1}
"""Bytes by unit: kB and the like are powers of 1000, KiB and the like of 1024."""

_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def amount_of(text: str, whole: int) -> int | None:
    """Return the number of a size ("512MiB", "2GB", "1000000") or of a share of a whole ("0.5");
    None for any other text."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        return None
    number, unit = float(match[1]), match[2].lower()
    is_share = not unit and "." in match[1] and number <= 1
    return int(number * (whole if is_share else _UNITS[unit]))


def require(conditions: Mapping[str, bool], tool: str) -> None:
    """Refuse option values.

    Args:
        conditions: error message to whether the value is allowed.
        tool: name of the tool.

    Raises:
        ValueError: with the first message whose condition is False.
    """
    for message, holds in conditions.items():
        if not holds:
            raise ValueError(f"tool {tool}: {message}")
