"""A captured graph as a Python function whose operators can be exchanged without compiling it.

Each call in the graph becomes the call of a global of the function::

    code = GraphCode(module)
    code.function(code.vanilla)(*inputs)        # as the graph itself

Other statements can be written in place of calls::

    text = code.statements[0].text("site")      # relu = site(x)
    code.rewritten(code.vanilla, {0: text}, "", {"site": torch.relu})(*inputs)
"""

from __future__ import annotations

import ast
import functools
import operator
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from amanda_torch import _internals
from amanda_torch.compiled.places import ModuleCall, Places, calls_of


class NotCapturableError(Exception):
    """The graph holds what does not run operator by operator."""


class NotMarkableError(NotCapturableError):
    """The calls of its modules cannot be reported: it runs uncompiled, with everything that it
    calls."""


@attrs.frozen
class Site:
    """A call in a graph.

    Attributes:
        name: of its node.
        function: what it calls.
        calls: the module calls that it is in, outermost first.
    """

    name: str
    function: Callable[..., Any]
    calls: tuple[ModuleCall, ...]


@attrs.frozen
class Statement:
    """The statement of a site.

    Attributes:
        target: the variable that takes the result.
        arguments, keywords: expressions.
    """

    target: str
    arguments: list[ast.expr]
    keywords: dict[str, ast.expr]

    def text(self, function: str, *before: str) -> str:
        """The statement, with another function.

        Args:
            before: arguments that come first.
        """
        return f"{self.target} = {function}({', '.join([*before, *self.given()])})"

    def given(self) -> list[str]:
        """The arguments as they are written."""
        return [
            *map(ast.unparse, self.arguments),
            *(f"{name}={ast.unparse(value)}" for name, value in self.keywords.items()),
        ]


class GraphCode:
    """The code of one graph.

    Attributes:
        places: finds the modules of its sites.
        sites: its calls in the order of their execution.
        vanilla: the functions that they call.
        statements: those of the sites; None for one that has another form.
        markers: the globals by which the sites call their functions.
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
        self.places = Places(module.graph)
        self.sites: list[Site] = []
        # A copy, of which no node is Dynamo's.
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        markers = [self._marked(node) for node in graph.nodes if node.op.startswith("call_")]
        python = graph.python_code("self")
        names = {id(value): name for name, value in python.globals.items()}
        self.markers = [names[id(marker)] for marker in markers]
        self._globals = dict(python.globals)
        exec(compile(python.src, "<captured graph>", "exec"), self._globals)
        self._forward: types.FunctionType = self._globals["forward"]
        self.vanilla: Sequence[Callable[..., Any]] = [site.function for site in self.sites]
        self._source = python.src
        self._numbers = {name: number for number, name in enumerate(self.markers)}

    @property
    def held(self) -> Sequence[Any]:
        """The tensors that the graph holds itself: constants, and parameters of optimizers."""
        names = dict.fromkeys(n.target for n in self._module.graph.nodes if n.op == "get_attr")
        found = (operator.attrgetter(str(name))(self._module) for name in names)
        return [value for value in found if isinstance(value, torch.Tensor)]

    @functools.cached_property
    def statements(self) -> Sequence[Statement | None]:
        """See the class."""
        found: list[Statement | None] = [None] * len(self.sites)
        for statement in _body(_parsed(self._source)):
            number = self._site_of(statement)
            if number is not None:
                assert isinstance(statement, (ast.Assign, ast.AnnAssign))
                assert isinstance(statement.value, ast.Call)
                found[number] = _statement(statement, statement.value)
        return found

    def _site_of(self, statement: ast.stmt) -> int | None:
        """The number of the site whose statement it is; None for another one."""
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not isinstance(
            value, ast.Call
        ):
            return None
        return self._numbers.get(value.func.id) if isinstance(value.func, ast.Name) else None

    def rewritten(
        self,
        functions: Sequence[Callable[..., Any]],
        blocks: Mapping[int, str],
        frame: str,
        names: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """The graph as a function in which other statements stand for some calls.

        Args:
            functions: what the sites call that keep their statement.
            blocks: them, by the numbers of the sites.
            frame: statements in which ``...`` stands for all of the function's; "" for none.
            names: the globals that all of these use.
        """
        tree = _parsed(self._source)
        body: list[ast.stmt] = []
        for statement in _body(tree):
            block = blocks.get(-1 if (n := self._site_of(statement)) is None else n)
            body += [statement] if block is None else _parsed(block).body
        if frame:
            around = _parsed(frame)
            holder = next(
                node.body
                for node in ast.walk(around)
                if isinstance(node, ast.Try) and isinstance(node.body[0], ast.Expr)
            )
            holder[:] = body
            body = around.body
        _body(tree)[:] = body
        made = {**self._globals, **dict(zip(self.markers, functions, strict=True)), **names}
        exec(compile(ast.fix_missing_locations(tree), "<captured graph>", "exec"), made)
        return functools.partial(made["forward"], self._module)

    def function(self, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """The graph as a function that calls these at its sites."""
        exchanged = {**self._globals, **dict(zip(self.markers, functions, strict=True))}
        forward = self._forward
        made = types.FunctionType(forward.__code__, exchanged, "forward", forward.__defaults__)
        return functools.partial(made, self._module)

    def _marked(self, node: fx.Node) -> Callable[..., Any]:
        """Let a node call a marker of its own, and note what it called."""
        if node.op == "call_module" or _internals.is_higher_order(node.target):
            raise NotCapturableError(f"{node.target} runs a graph of its own")
        if str(getattr(node.target, "__name__", "")).startswith(_internals.FUSED_OPERATORS):
            # A tool may act on the operators inside; see amanda_torch.eager.fused_modules.
            raise NotCapturableError("it holds a fused operator")
        function = node.target
        if node.op == "call_method":
            function = Method(str(node.target))
            node.op = "call_function"
        self.sites.append(Site(node.name, function, calls_of(node)))  # type: ignore[arg-type]

        def site(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)  # type: ignore[operator]

        site.__name__ = site.__qualname__ = f"site_{len(self.sites)}"
        node.target = site
        return site


_PARSING = threading.Lock()


def _parsed(source: str) -> ast.Module:
    """The syntax tree of a source text."""
    # Threads that make trees at once share the depth of recursion, which raises a SystemError, "AST
    # constructor recursion depth mismatch" (CPython 3.11.7). Others than ours may do so, too.
    with _PARSING:
        for _ in range(_ATTEMPTS):
            try:
                return ast.parse(source)
            except SystemError:
                continue
        return ast.parse(source)


_ATTEMPTS = 9


def _body(tree: ast.Module) -> list[ast.stmt]:
    """The statements of the function in the source of a graph."""
    return next(node.body for node in tree.body if isinstance(node, ast.FunctionDef))


def _statement(statement: ast.Assign | ast.AnnAssign, call: ast.Call) -> Statement | None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    is_plain = (
        len(targets) == 1
        and isinstance(targets[0], ast.Name)
        and not any(isinstance(argument, ast.Starred) for argument in call.args)
        and all(keyword.arg for keyword in call.keywords)
    )
    if not is_plain:
        return None
    keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
    return Statement(ast.unparse(targets[0]), call.args, keywords)


class Method:
    """Calls the method of a name of its first argument."""

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(target, self.__name__)(*args, **kwargs)
