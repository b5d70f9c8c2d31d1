"""What the package registers. It is loaded with every use of Amanda: it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

import amanda


@amanda.hookimpl
def amanda_register_tools() -> Mapping[str, str]:
    """Short name to ``module:Class``. The module is imported when the tool is asked for."""
    return {"shapes": "amanda_shapes.tool:ShapesTool"}
