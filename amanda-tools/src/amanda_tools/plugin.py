"""What amanda-tools registers. Imports no framework and no tool."""

from __future__ import annotations

from collections.abc import Mapping

from amanda import hookimpl


@hookimpl
def amanda_register_tools() -> Mapping[str, str]:
    """The tools of this package."""
    return {
        "count": "amanda_tools.count:CountTool",
        "diff": "amanda_tools.diff:DiffTool",
        "dump": "amanda_tools.dump:DumpTool",
        "flops": "amanda_tools.flops:FlopsTool",
        "inject": "amanda_tools.inject:InjectTool",
        "nan": "amanda_tools.nan:NanTool",
        "profile": "amanda_tools.profile:ProfileTool",
        "prune": "amanda_tools.prune:PruneTool",
        "quantize": "amanda_tools.quantize:QuantizeTool",
        "sparsity": "amanda_tools.sparsity:SparsityTool",
        "stats": "amanda_tools.stats:StatsTool",
        "trace": "amanda_tools.trace:TraceTool",
    }
