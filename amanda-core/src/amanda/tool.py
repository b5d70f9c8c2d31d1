"""The paper's names in one place: ``Tool``, ``apply`` and the switches.

Users take them from ``amanda``; ``amanda.tool.apply`` is how the paper's tutorial calls it.
"""

from amanda.interface.tool import Analysis, Tool, traceable
from amanda.scope.apply import apply
from amanda.scope.switches import (
    ad_disabled,
    ad_enabled,
    cache_disabled,
    cache_enabled,
    disabled,
    enabled,
    new_iteration,
    vanilla,
)

__all__ = [
    "Analysis",
    "Tool",
    "ad_disabled",
    "ad_enabled",
    "apply",
    "cache_disabled",
    "cache_enabled",
    "disabled",
    "enabled",
    "new_iteration",
    "traceable",
    "vanilla",
]
