"""Private symbols of sessions, and of adding a node to a user's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session, session

from amanda_tensorflow._internals.graphs import add_function, create_op_in
from amanda_tensorflow._internals.runtime import AttrValue, Graph, eager_mode

BaseSession: Any = session.BaseSession


operation_name: Any = pywrap_tf_session.TF_OperationName


def operation_of(graph: Any, handle: Any) -> Any:
    """The operator of a graph for a handle of the runtime."""
    return graph.get_operation_by_name(operation_name(handle))


def tensor_of(graph: Any, output: Any) -> Any:
    """The tensor of a graph for an output handle of the runtime."""
    return operation_of(graph, output.oper).outputs[output.index]


def shadow_graph(source: Any) -> Any:
    """An empty graph that knows the functions of another one."""
    graph = Graph()
    for function in source._functions.values():
        add_function(graph, function)
    return graph


def shadow_session(graph: Any, config: Any) -> Any:
    """A session for a copy, marked as a shadow."""
    with eager_mode():
        made = session.Session(graph=graph, config=config)
    made._amanda_shadow = True
    return made


def is_shadow(candidate: Any) -> bool:
    """True if a session is a shadow."""
    return hasattr(candidate, "_amanda_shadow")


def is_closed(candidate: Any) -> bool:
    """True if a session was closed."""
    return bool(candidate._closed)


def session_config(of: Any) -> Any:
    """The configuration that a session was made with."""
    return of._config


def abandon(session: Any) -> None:
    """Leave what the runtime has of a session alone, also when the session is deleted."""
    session._session = None


def extend_graph(of: Any) -> None:
    """Give the runtime the operators that a session's graph has got since the last run.

    What they wait for cannot be changed any more: control inputs that are added later have no
    effect, of which a line in the log is all that tells (TensorFlow 2.21).
    """
    of._extend_graph()


def run_vanilla(
    of: Any,
    fetches: Sequence[Any],
    targets: Sequence[Any] = (),
    feeds: Sequence[tuple[Any, Any]] = (),
    options: Any = None,
    run_metadata: Any = None,
    extends: bool = True,
) -> list[Any]:
    """Run a session's graph vanilla.

    Args:
        of: the session.
        fetches: the tensors whose values are returned.
        targets: the operators that are executed besides.
        feeds: pairs of a tensor and its value.
        options, run_metadata: handles of the runtime.
        extends: first give the runtime the operators that the graph has got since the last run.
    """
    if not fetches and not targets:
        return []
    if extends:
        extend_graph(of)
    result: list[Any] = pywrap_tf_session.TF_SessionRun_wrapper(
        of._session,
        options,
        {tensor._as_tf_output(): value for tensor, value in feeds},
        [tensor._as_tf_output() for tensor in fetches],
        [target._c_op for target in targets],
        run_metadata,
    )
    return result


_IN_CALLER = config_pb2.RunOptions(inter_op_thread_pool=-1).SerializeToString()
"""Options of a run: its operators run in the thread that asks for it."""


@contextmanager
def in_this_thread(options: Any) -> Iterator[Any]:
    """Options of a run like the given ones, with which it uses no thread of the session's pool.

    Args:
        options: a handle of the runtime; None for no options.
    """
    given = b"" if options is None else bytes(pywrap_tf_session.TF_GetBuffer(options))
    # Of fields that a message has twice, the last one counts.
    changed = pywrap_tf_session.TF_NewBufferFromString(given + _IN_CALLER)
    try:
        yield changed
    finally:
        pywrap_tf_session.TF_DeleteBuffer(changed)


def run_in_this_thread(
    of: Any,
    fetches: Sequence[Any],
    targets: Sequence[Any] = (),
    feeds: Sequence[tuple[Any, Any]] = (),
    extends: bool = False,
) -> list[Any]:
    """Run a session's graph vanilla, without a thread of the session's pool.

    All of them may be waiting: for a lock that this thread holds, or for this thread itself.

    Args:
        of: the session.
        fetches: the tensors whose values are returned.
        targets: the operators that are executed besides.
        feeds: pairs of a tensor and its value.
        extends: first give the runtime the operators that the graph has got since the last run.
    """
    with in_this_thread(None) as options:
        return run_vanilla(of, fetches, targets, feeds, options, extends=extends)


@contextmanager
def unfinalized(graph: Any) -> Iterator[None]:
    """Within it, operators can be added to a graph that the user has finalized."""
    was_finalized = graph.finalized
    if was_finalized:
        graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if was_finalized:
            graph.finalize()


def call_node(
    graph: Any, name: str, function: Any, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """Add a node that calls a function to a user's graph. Returns it.

    Args:
        inputs: tensors of the graph.
        outputs: the outputs of the function, whose types and shapes the node takes.
    """
    called, taken, given = AttrValue(), AttrValue(), AttrValue()
    called.func.name = function.name.decode()
    taken.list.type.extend([tensor.dtype.as_datatype_enum for tensor in inputs])
    given.list.type.extend([tensor.dtype.as_datatype_enum for tensor in outputs])
    with graph.as_default(), graph.control_dependencies(None), graph.device(None):
        node = create_op_in(
            graph,
            "StatefulPartitionedCall",
            list(inputs),
            [tensor.dtype for tensor in outputs],
            name=graph.unique_name(name) + "/",
            attrs={"f": called, "Tin": taken, "Tout": given},
            compute_device=False,
        )
    for tensor, output in zip(node.outputs, outputs, strict=True):
        tensor.set_shape(output.shape)
    graph._amanda_inserted = getattr(graph, "_amanda_inserted", 0) + 1
    return node


def own_version(graph: Any) -> int:
    """The version of a graph, not counting the nodes that this package has added."""
    return int(graph.version) - getattr(graph, "_amanda_inserted", 0)


_HIDDEN = "amanda/run"
"""With which the names of our nodes in a user's graph begin."""


def hide(graph: Any) -> None:
    """Leave the nodes and functions that this package adds out of what is written of a graph."""
    if hasattr(graph, "_amanda_hidden"):
        return
    graph._amanda_hidden = True
    vanilla = graph._as_graph_def

    def _as_graph_def(*args: Any, **kwargs: Any) -> Any:
        definition, version = vanilla(*args, **kwargs)
        kept = type(definition)()
        kept.CopyFrom(definition)
        del kept.node[:]
        kept.node.extend(n for n in definition.node if not n.name.startswith(_HIDDEN))
        del kept.library.function[:]
        kept.library.function.extend(
            f for f in definition.library.function if not f.signature.name.startswith("amanda_")
        )
        return kept, version

    graph._as_graph_def = _as_graph_def
