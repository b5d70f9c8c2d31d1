"""Checks of option values that concern more than one option, or one of several choices."""

from __future__ import annotations

from collections.abc import Mapping


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
