"""The first call of compiled code, which may fail where the program does not.

Compiled code may fail. Then the changes of its first call are undone, and the graph runs operator
by operator instead. For code with actions::

    binding.function = first_call(code, function, graph, accept, refuse)

An error that also occurs operator by operator is the program's own. Code of the unchanged graph
follows a :class:`~amanda_torch.compiled.dry_run.GraphDryRun`, whose outputs are available::

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
    """Return the function of a graph for the first run of its compiled code.

    Args:
        code: the compiled code.
        otherwise: runs the graph operator by operator.
        graph: the graph's code, which `otherwise` runs.
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
            # A routine in the code ends the program.
            if notes_of(error) or not _internals.without_modes(before.is_complete):
                raise
            _internals.without_modes(before.restore)
            reason = f"its code fails with {type(error).__name__}"
        # Not within the handler: an error of the program has no context.
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
        binding: binding of the graph, which still runs the graph operator by operator.
        dry_run: the dry run, which has counted the forward operators of this run.
        counts: counts the operators of later runs.
        code: the compiled code.
        later: the function for further runs: it enters the modules that the dry run has entered for
            this one, and calls `code`.
        interceptor: that of the current thread.
        inputs: inputs of the graph.
        dry_outputs: the outputs of the dry run.

    Returns:
        The outputs, and the reason if they were computed operator by operator, else "".
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
