"""What profiles that TensorFlow has written hold."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from amanda_tools._timelines.xplane import nest_events, planes_in


def kinds_in(files: Sequence[bytes]) -> collections.Counter[str]:
    """The kernels of operators in profiles, by type."""
    return collections.Counter(
        event.kind
        for plane in planes_in(files)
        for line in plane.lines
        for event in nest_events(plane, line)
        if event.node
    )
