"""The plugin: registers the tool. It is loaded whenever Amanda looks for tools; keep imports light."""

from __future__ import annotations

from collections.abc import Mapping

import amanda


@amanda.hookimpl
def amanda_register_tools() -> Mapping[str, str]:
    """Short name to ``module:Class``. The module is imported when the tool is used."""
    return {"shapes": "amanda_shapes.tool:ShapesTool"}
