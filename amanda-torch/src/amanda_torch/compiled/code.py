"""A captured graph as a Python function whose operators can be replaced without compiling it again.

Each call in the graph becomes the call of a global of the function::

    code = GraphCode(module)
    code.function(code.vanilla)(*inputs)        # as the graph itself
"""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from amanda.tools.description import SOURCE_LINES
from amanda_torch import _internals
from amanda_torch.compiled.places import CapturedCall, ModuleFinder, calls_of


class NotCapturableError(Exception):
    """The graph has a node that cannot run operator by operator."""


class NotMarkableError(NotCapturableError):
    """The calls of its modules cannot be reported: the function runs uncompiled, with all functions
    that it calls."""


@attrs.frozen
class CallSite:
    """A call in a graph.

    Attributes:
        name: name of its node.
        function: the called function.
        calls: the enclosing module calls, outermost first.
        keywords: the keyword arguments of its node.
    """

    name: str
    function: Callable[..., Any]
    calls: tuple[CapturedCall, ...]
    keywords: Mapping[str, Any]


class GraphCode:
    """The code of one graph.

    Attributes:
        places: finds the modules of its sites.
        sites: its calls in the order of their execution.
        vanilla: the functions that they call.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        """Make the code.

        Raises:
            NotCapturableError: a node runs graphs of its own, or the code around the graph runs
                operators of its own.
        """
        if _internals.takes_wrapped_numbers(module.graph):
            raise NotCapturableError("it takes random numbers of Python")
        self._module = module
        self.places = ModuleFinder(module.graph)
        self.sites: list[CallSite] = []
        # A copy: no node is Dynamo's.
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        nodes = [node for node in graph.nodes if node.op.startswith("call_")]
        markers = [self._marked(node) for node in nodes]
        python = graph.python_code("self")
        names = {id(value): name for name, value in python.globals.items()}
        self._markers = [names[id(marker)] for marker in markers]
        lines = dict(zip(self._markers, map(_lines_of, nodes), strict=True))
        self._globals = {**python.globals, SOURCE_LINES: {}}
        for number, line in enumerate(python.src.splitlines(), 1):
            for name in lines.keys() & re.findall(r"\w+", line):
                self._globals[SOURCE_LINES][number] = lines[name]
        exec(compile(python.src, "<captured graph>", "exec"), self._globals)
        self._forward: types.FunctionType = self._globals["forward"]
        self.vanilla: Sequence[Callable[..., Any]] = [site.function for site in self.sites]

    @property
    def held(self) -> Sequence[Any]:
        """The tensors that the graph itself holds: constants, and parameters of optimizers."""
        names = dict.fromkeys(n.target for n in self._module.graph.nodes if n.op == "get_attr")
        found = (operator.attrgetter(str(name))(self._module) for name in names)
        return [value for value in found if isinstance(value, torch.Tensor)]

    def function(self, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """The graph as a function that calls these functions at its sites."""
        exchanged = {**self._globals, **dict(zip(self._markers, functions, strict=True))}
        forward = self._forward
        made = types.FunctionType(forward.__code__, exchanged, "forward", forward.__defaults__)
        return functools.partial(made, self._module)

    def _marked(self, node: fx.Node) -> Callable[..., Any]:
        """Have a node call a marker of its own, and keep the function that it called."""
        if node.op == "call_module" or _internals.is_higher_order(node.target):
            raise NotCapturableError(f"{node.target} runs a graph of its own")
        if str(getattr(node.target, "__name__", "")).startswith(_internals.FUSED_OPERATORS):
            # A tool may act on the operators inside; see amanda_torch.eager.fused_modules.
            raise NotCapturableError("it holds a fused operator")
        function = node.target
        if node.op == "call_method":
            function = Method(str(node.target))
            node.op = "call_function"
        site_of_node = CallSite(node.name, function, calls_of(node), node.kwargs)  # type: ignore[arg-type]
        self.sites.append(site_of_node)

        def site(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)  # type: ignore[operator]

        site.__name__ = site.__qualname__ = f"site_{len(self.sites)}"
        node.target = site
        return site


def _lines_of(node: fx.Node) -> list[tuple[str, int]]:
    """The files and lines of the program from which Dynamo has made a node, innermost first."""
    found = re.findall(r'File "(.+)", line (\d+)', node.stack_trace or "")
    return [(file, int(line)) for file, line in reversed(found)]


class Method:
    """Calls a method of its first argument by name."""

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(target, self.__name__)(*args, **kwargs)
