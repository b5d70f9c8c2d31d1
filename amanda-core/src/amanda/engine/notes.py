"""Adds notes to exceptions of tools' code: the tool, and the operator or point.

``note(error, "ScaleTool.double", "Net.fc/linear:0")`` adds the line ``amanda: raised in
ScaleTool.double at op Net.fc/linear:0`` below the traceback.
"""

from __future__ import annotations

from amanda.python.text import printable
from amanda.state import ATTACHED


def note(error: BaseException, who: str, op_id: str, point: str = "op ") -> None:
    """Add a note naming tool, routine and op id to an exception on its way to the user.

    An interrupt comes from the user: its place is arbitrary.
    """
    if isinstance(error, KeyboardInterrupt):
        return
    text = printable(f"amanda: raised in {who} at {point}{op_id}".removesuffix(" of "))
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
    for driver in tuple(ATTACHED.values()):
        driver.tool_raised(error)
