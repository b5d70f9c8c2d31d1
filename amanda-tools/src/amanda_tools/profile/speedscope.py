"""Flame graphs in speedscope's format: modules, and operators on top of them.

The format: https://www.speedscope.app/file-format-schema.json. A sample is a stack with a weight:
here one operator with the modules that run it, and its time. Each phase is a profile of its own:
initialising the parameters would hide the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.interface.specs import Phase
from amanda.tools.description import OpDescription
from amanda_tools._timelines.chrome import module_path

_ORDER: Sequence[Phase] = ("forward", "backward", "optimizer", "setup", "other")
"""Profiles in the viewer's list: it shows the first one."""


def flame_graph(times: Sequence[tuple[OpDescription, float]], name: str) -> dict[str, Any]:
    """Return the content of the file, with a profile of each phase that has operators.

    Args:
        times: operators and their seconds.
        name: title in the viewer.
    """
    frames: dict[str, int] = {}
    profiles = []
    for phase in _ORDER:
        part = [(op, seconds) for op, seconds in times if op.phase == phase]
        if not part:
            continue
        samples = [
            [frames.setdefault(frame, len(frames)) for frame in (*module_path(op), op.type)]
            for op, _ in part
        ]
        profiles.append(
            {
                "type": "sampled",
                "name": phase,
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(seconds for _, seconds in part),
                "samples": samples,
                "weights": [seconds for _, seconds in part],
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": profiles,
        "name": name,
        "exporter": "amanda",
    }
