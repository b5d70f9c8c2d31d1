"""The first call of compiled code, which may fail where the program does not.

A compiler may make code that does not run. Therefore what the first call has changed is put back if
it fails, and the graph runs operator by operator instead. Code with actions in it the program has
not asked for::

    binding.function = first_call(code, function, graph, accept, refuse)

An error that running operator by operator raises, too, is the program's own. Code of the graph as
it is follows a :class:`~amanda_torch.compiled.dry_run.GraphDryRun`, whose outputs are there::

    outputs, reason = run_after_dry_run(binding, dry_run, counts, code, later, interceptor, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_torch import _internals
from amanda_torch.compiled.bound_graph import BoundGraph
from amanda_torch.compiled.code import GraphCode
from amanda_torch.compiled.dry_run import GraphDryRun
from amanda_torch.compiled.gradients import OtherBackwardError, RunCounts
from amanda_torch.compiled.inlining import CompiledCode, notes_of
from amanda_torch.compiled.saved_state import SavedState
from amanda_torch.eager.interceptors import Interceptor


def first_call(
    code: CompiledCode,
    otherwise: Callable[..., Any],
    graph: GraphCode,
    accept: Callable[[], None],
    refuse: Callable[[str], None],
) -> Callable[..., Any]:
    """The function of a graph until its compiled code has run once.

    Args:
        code: the compiled code.
        otherwise: runs the graph operator by operator.
        graph: the code that `otherwise` runs.
        accept: called when the code has run.
        refuse: called with the reason when it has failed, and the graph has run.
    """

    def run(*inputs: Any) -> Any:
        before = _internals.without_modes(SavedState, graph, inputs)
        try:
            result = code.run(inputs)
            accept()
            return result
        except Exception as error:
            # A routine that the code has called has ended the program, and is to do so.
            if notes_of(error) or not _internals.without_modes(before.is_complete):
                raise
            _internals.without_modes(before.restore)
            reason = f"its code fails with {type(error).__name__}"
        # Not within the handler: an error of the program's own has nothing before it.
        result = otherwise(*inputs)
        refuse(reason)
        return result

    return run


def run_after_dry_run(
    binding: BoundGraph,
    dry_run: GraphDryRun,
    counts: RunCounts,
    code: Callable[..., Any],
    later: Callable[..., Any],
    interceptor: Interceptor,
    inputs: Sequence[Any],
    dry_outputs: Any,
) -> tuple[Any, str]:
    """Run a graph by the program's compiler for the first time, after a dry run.

    Args:
        binding: of the graph; it still runs the graph operator by operator.
        dry_run: which has counted the forward operators of this run.
        counts: counts those of later ones.
        code: what runs the graph.
        later: what runs it from the second time on: `code`, after the modules have been entered
            that the dry run has entered for the first run.
        interceptor: that of the current thread.
        inputs: of the graph.
        dry_outputs: the outputs of the dry run.

    Returns:
        The outputs, and why they were computed operator by operator; "" if they were not.
    """
    redo, otherwise = dry_run.undo(), binding.function
    counts.is_first = True
    binding.function = code
    try:
        result = binding.run(interceptor, inputs)
        binding.function = later
        return result, ""
    except OtherBackwardError:
        reason = "its backward pass is not compiled"
    except Exception as error:
        reason = f"its code fails with {type(error).__name__}"
    redo()
    binding.function = otherwise
    return dry_outputs, reason
