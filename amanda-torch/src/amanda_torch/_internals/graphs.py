"""Captured graphs, their values and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from amanda_torch._internals.notes import module_mark
from amanda_torch._internals.symbols import require, symbol


def lookup_compiler(name: str) -> Any:
    """One of Dynamo's backends by name.

    Raises:
        torch._dynamo.exc.InvalidBackend: no backend has this name.
    """
    import torch._dynamo

    return torch._dynamo.lookup_backend(name)


def has_numbers(graph: torch.fx.Graph) -> bool:
    """True if the result of a node of a captured graph is a number (a symbolic size, or a captured
    ``item()``) or a tensor with a symbolic size."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, symbols):
            return True
        if isinstance(value, torch.Tensor) and any(isinstance(n, symbols) for n in value.shape):
            return True
    return False


def example_of(node: torch.fx.Node) -> Any:
    """The example of a node's result that Dynamo has noted, with symbolic sizes."""
    return node.meta.get("example_value")


def expression_of(size: Any) -> Any:
    """A size as a number, or as an expression of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def symbol_of(value: Any) -> Any:
    """The symbol that a number of Dynamo's is; None for another one."""
    expression = expression_of(value)
    return expression if getattr(expression, "is_Symbol", False) else None


def symbols_in(size: Any) -> Any:
    """The symbols in a result of :func:`expression_of`."""
    return getattr(size, "free_symbols", ())


def size_of(size: Any, values: Mapping[Any, int]) -> int:
    """The number for a result of :func:`expression_of`, if the symbols have these values."""
    return int(size.xreplace(values)) if hasattr(size, "xreplace") else int(size)


def takes_wrapped_numbers(graph: torch.fx.Graph) -> bool:
    """True if a graph gets numbers as tensors, which operators around the graph make. Dynamo does
    so with the results of Python's ``random``: in 2.13 of all functions except ``random.random``,
    in 2.14 and 2.15 of all.
    """
    taken = [node.meta.get("grapharg") for node in graph.nodes if node.op == "placeholder"]
    return any(getattr(argument, "pass_arg_as_tensor", False) for argument in taken)


def copied_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a captured graph that Dynamo's compilers accept."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = torch.fx.GraphModule(module, graph)
    copied.meta.update(module.meta)
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied._param_name_to_source = dict(module._param_name_to_source)  # type: ignore[arg-type,assignment]
    return copied


class WithoutValues(torch.Tensor):
    """A tensor that has a shape, a dtype and a device, and nothing else."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """No operator can run on it."""
        raise TypeError(f"{func} needs values of a tensor of which only shape and dtype are known")


require("torch.Tensor._make_wrapper_subclass")


def valueless(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor with the shape and dtype of another one, and no values.

    Args:
        device: its device; None for that of `tensor`.
    """
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        WithoutValues, tensor.shape, dtype=tensor.dtype, device=device or tensor.device
    )
    return made


def without_marks(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A captured graph without :func:`module_mark`."""
    found = copied_graph(module)
    for node in list(found.graph.nodes):
        if node.target is module_mark:
            found.graph.erase_node(node)
    found.recompile()
    return found


_compile_session = symbol("torch.compiler._compile_session_context")


def compile_later(
    context: Any, compiler: Any, module: Any, inputs: Sequence[Any], *, with_backward: bool = False
) -> Any:
    """Compile a captured graph after Dynamo has captured it.

    Args:
        context: the :func:`tracing_context` of its capture.
        inputs: the example inputs that Dynamo gave to the compiler.
        with_backward: whether the backward pass is compiled now, so that its errors are raised
            here. AOTAutograd would compile it in the program's first backward pass.
    """
    import torch._functorch.config

    backward = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    # Without the session, compiled functions in other threads would raise meanwhile: they take this
    # compiler's tracing for torch.fx.symbolic_trace (2.13).
    with (
        torch._guards.tracing(context),
        _compile_session(),
        backward if with_backward else nullcontext(),
    ):
        return compiler(module, list(inputs))


def undisabled(function: Any) -> Any:
    """A compiled function without the wrapper that disables Dynamo, for a caller within which
    Dynamo is disabled already."""
    while getattr(function, "_torchdynamo_disable", False):
        function = function._torchdynamo_orig_callable
    return function


def announce_buffer(module: torch.fx.GraphModule, name: str) -> None:
    """Tell Dynamo of a buffer that was added to a graph after its capture."""
    from torch._dynamo.source import LocalSource

    # Dynamo puts this attribute on each graph that it captures; no class has it.
    sources: dict[str, Any] = module._param_name_to_source  # type: ignore[assignment]
    sources[name] = LocalSource(name)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree`, of nested lists, tuples and dicts, with each leaf replaced by `function` of it."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)
