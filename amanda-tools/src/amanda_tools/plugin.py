"""Entry point of amanda-tools: registers the tools and the page of a run; imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from amanda import hookimpl

if TYPE_CHECKING:
    from amanda.results import RunReport


@hookimpl
def amanda_register_tools() -> Mapping[str, str]:
    """Register the tools of this package."""
    return {
        "count": "amanda_tools.count:CountTool",
        "coverage": "amanda_tools.coverage:CoverageTool",
        "diff": "amanda_tools.diff:DiffTool",
        "dump": "amanda_tools.dump:DumpTool",
        "flops": "amanda_tools.flops:FlopsTool",
        "inject": "amanda_tools.inject:InjectTool",
        "kernels": "amanda_tools.kernels:KernelsTool",
        "nan": "amanda_tools.nan:NanTool",
        "path": "amanda_tools.path:PathTool",
        "profile": "amanda_tools.profile:ProfileTool",
        "prune": "amanda_tools.prune:PruneTool",
        "quantize": "amanda_tools.quantize:QuantizeTool",
        "remat": "amanda_tools.remat:RematTool",
        "sparsity": "amanda_tools.sparsity:SparsityTool",
        "stats": "amanda_tools.stats:StatsTool",
        "summary": "amanda_tools.summary:SummaryTool",
        "trace": "amanda_tools.trace:TraceTool",
        "unmapped": "amanda_tools.unmapped:UnmappedTool",
    }


@hookimpl(trylast=True)  # a user who installs another plugin wants its pages
def amanda_render_report(report: RunReport) -> str:
    """Render the page of a run."""
    from amanda_tools._output.report import render
    from amanda_tools._output.report.run import document_of

    return render(document_of(report))
