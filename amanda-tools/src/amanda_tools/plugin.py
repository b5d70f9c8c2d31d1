"""Entry point of amanda-tools: registers the tools and the page of a run; imports none of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from amanda import hookimpl
from amanda.errors import AmandaError
from amanda_tools import _frameworks

if TYPE_CHECKING:
    from amanda import Tool
    from amanda.registry.hookspecs import Cluster, TableStore
    from amanda.results import RunReport


@hookimpl
def amanda_register_tools() -> Mapping[str, str]:
    """Register the tools of this package."""
    return {
        "count": "amanda_tools.count:CountTool",
        "coverage": "amanda_tools.coverage:CoverageTool",
        "diff": "amanda_tools.diff:DiffTool",
        "dump": "amanda_tools.dump:DumpTool",
        "flight": "amanda_tools.flight:FlightTool",
        "flops": "amanda_tools.flops:FlopsTool",
        "inject": "amanda_tools.inject:InjectTool",
        "kernels": "amanda_tools.kernels:KernelsTool",
        "memory": "amanda_tools.memory:MemoryTool",
        "nan": "amanda_tools.nan:NanTool",
        "partition": "amanda_tools.partition:PartitionTool",
        "path": "amanda_tools.path:PathTool",
        "profile": "amanda_tools.profile:ProfileTool",
        "prune": "amanda_tools.prune:PruneTool",
        "quantize": "amanda_tools.quantize:QuantizeTool",
        "remat": "amanda_tools.remat:RematTool",
        "sparsity": "amanda_tools.sparsity:SparsityTool",
        "stats": "amanda_tools.stats:StatsTool",
        "steer": "amanda_tools.steer:SteerTool",
        "stragglers": "amanda_tools.stragglers:StragglersTool",
        "summary": "amanda_tools.summary:SummaryTool",
        "trace": "amanda_tools.trace:TraceTool",
    }


@hookimpl
def amanda_suggest_drivers() -> Mapping[str, str]:
    """Name the packages with Amanda's own drivers."""
    return _frameworks.DRIVERS


@hookimpl
def amanda_report_problems(frameworks: Collection[str]) -> Sequence[str]:
    """Name a Keras that is set to compute with something that no driver instruments."""
    backend = _frameworks.configured_backend(frameworks)
    return [f"not seen: {_frameworks.explain_backend(backend)}"] if backend else []


@hookimpl
def amanda_explain_unseen(frameworks: Collection[str]) -> Sequence[str]:
    """Name a framework that the program computes with and no driver instruments."""
    return _frameworks.explain_unseen(frameworks)


@hookimpl
def amanda_suggest_page_tools() -> Sequence[str]:
    """Name the tools of a page for which the user names none."""
    return ["flops", "profile", "trace", "summary"]


@hookimpl(trylast=True)
def amanda_record_graph(tools: Sequence[Tool]) -> Tool | None:
    """Create a ``trace`` without a timeline."""
    from amanda_tools.trace import TraceTool

    return None if any(isinstance(tool, TraceTool) for tool in tools) else TraceTool(limit=0)


@hookimpl(trylast=True)  # a user who installs another plugin wants its pages
def amanda_render_report(report: RunReport) -> str:
    """Render the page of a run."""
    from amanda_tools._output.report import render
    from amanda_tools._output.report.run import document_of

    return render(document_of(report))


@hookimpl(trylast=True)
def amanda_open_tables() -> TableStore:
    """Give the functions of ``amanda_tools.tables``.

    Raises:
        AmandaError: DuckDB is not installed.
    """
    try:
        from amanda_tools import tables
    except ImportError as error:
        raise AmandaError(
            f"tables of results need DuckDB ({error}): pip install 'amanda-tools[scale]'"
        ) from None
    return tables


@hookimpl(trylast=True)
def amanda_open_cluster(address: str) -> Cluster:
    """Connect to a cluster of Ray.

    Raises:
        AmandaError: Ray is not installed, or does not answer.
    """
    try:
        from amanda_tools.ray_cluster import RayCluster
    except ImportError as error:
        raise AmandaError(
            f"RAY_ADDRESS={address}: Ray is missing ({error}): pip install 'amanda-tools[ray]'"
        ) from None
    return RayCluster(address)
