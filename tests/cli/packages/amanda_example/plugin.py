"""What the package registers. Imports no framework."""

from collections.abc import Mapping

from amanda import hookimpl


@hookimpl
def amanda_register_tools() -> Mapping[str, str]:
    """One tool of the common form, and one that is a plain class."""
    return {"largest": "amanda_example.tools:LargestTool", "log": "amanda_example.tools:LogTool"}
