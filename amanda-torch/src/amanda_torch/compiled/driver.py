"""The driver for functions compiled with ``torch.compile``: writes routines into their graphs.

It is used only when it is asked for::

    with amanda.apply(tool, drivers=["torch-graph"]):
        compiled(x)

Functions and modules compiled with ``torch.compile`` then run through a backend that writes the
tools' routines into the graph that Dynamo has captured, and hands it on to inductor, or to the
compiler that ``AMANDA_TORCH_COMPILER`` names (``aot_eager``). Routines become a part of the
compiled code; so they must be marked ``@amanda.traceable``: functions of tensors only, of the
selected ones and of those passed as keyword arguments. Backward operators are made by the
compiler and are not seen.
"""

from __future__ import annotations

import collections
import contextvars
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import fx

from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import ActionPlan
from amanda.errors import CapabilityError
from amanda.interface.action import Action
from amanda.interface.proofs import Proof
from amanda.patching import PatchSet
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.functions import AmandaSubstitute
from amanda_torch.compiled import proofs
from amanda_torch.driver import LoadedDriver
from amanda_torch.operators.calls import TorchCall, item_at, put_item, tensors_of
from amanda_torch.operators.names import Kind, kind_of, name_of, op_view
from amanda_torch.plugin import TorchGraphDriver

COMPILER_VARIABLE = "AMANDA_TORCH_COMPILER"
"""The environment variable that names the compiler; inductor without it."""

_NOT_SEEN = (
    "backward operators of compiled functions",
    "operators outside of compiled functions (see: --driver torch-eager)",
)
"""What this driver never sees, for the last line of a run."""

_COMPILER: contextvars.ContextVar[str] = contextvars.ContextVar("amanda_compiler", default="")
"""The compiler that a proof wants, in place of the variable's."""

# How Dynamo writes the outermost module in a path (``L['self'].fc``), and a second call.
_ROOT = re.compile(r"^L\[['\"]\w+['\"]\](\.|$)|^L__self__(\.|$)")
_CALL = re.compile(r"@\d+$")


class GraphDriver(LoadedDriver, TorchGraphDriver):
    """Instruments compiled functions when their graphs are captured."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self._stance: Any = None
        self._backend: Backend | None = None

    def patch(self, patches: PatchSet) -> None:
        """Nothing yet: a backend is put in place when a scope is entered."""

    def detach(self) -> None:
        """Give compiled functions their own backends back."""
        self._restore()
        self._backend = None
        super().detach()

    def invalidate(self) -> None:
        """Scopes, switches or recorded actions have changed: compile anew where needed.

        Compiled code is kept per backend, so that code with routines in it is
        never run outside of its scope.
        """
        self._restore()
        scopes = self.dispatcher.scopes()
        if not scopes:
            return
        for scope in scopes:
            # A run of compiled code would else be said to have been seen whole. How many operators
            # it is, nobody counts: looking at them would be instrumenting them.
            for reason in _NOT_SEEN:
                scope.statistics.count_not_seen(reason, 0)
        if self._backend is None or self._backend.is_outdated(scopes):
            self._backend = Backend(self.dispatcher, scopes)
        self._stance = torch.compiler.set_stance("default", force_backend=self._backend)

    @classmethod
    def proofs(cls) -> Sequence[Proof]:
        """See :mod:`amanda_torch.compiled.proofs`."""
        return [proofs.proof(_set_compiler)]

    def vanilla(self) -> AbstractContextManager[Any]:
        """A context that does nothing: analyses and routines run on symbolic tensors."""
        return nullcontext()

    def _restore(self) -> None:
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.__exit__(None, None, None)


def _set_compiler(name: str) -> None:
    _COMPILER.set(name)


class Backend:
    """A ``torch.compile`` backend that instruments a graph and hands it on."""

    def __init__(self, dispatcher: Dispatcher, scopes: Sequence[Any]) -> None:
        self._dispatcher = dispatcher
        self._scopes = tuple(scopes)
        self._counts: collections.Counter[str] = collections.Counter()
        self._starts: dict[Any, collections.Counter[str]] = {}

    def is_outdated(self, scopes: Sequence[Any]) -> bool:
        """Whether code compiled by this backend is not right under `scopes`."""
        if tuple(scopes) != self._scopes or not STATE.cache:
            return True
        return any(record.redo for scope in scopes for record in scope.cache)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Instrument and compile one captured graph."""
        frame = _internals.compiled_frame()
        # A recompilation of a frame gives its operators the ids that they had.
        self._counts = collections.Counter(self._starts.setdefault(frame, self._counts.copy()))
        if self._dispatcher.scopes():
            GraphWriter(self._dispatcher, module, example_inputs, self._counts).write()
        compiler = _COMPILER.get() or os.environ.get(COMPILER_VARIABLE, "inductor")
        return _internals.lookup_compiler(compiler)(module, example_inputs)


class GraphCall(TorchCall):
    """An operator of a captured graph; its inputs are symbolic.

    Attributes:
        constants: the parameters and buffers behind symbolic tensors, by the id of these.
    """

    constants: Mapping[int, torch.Tensor] = {}

    def value(self, index: int) -> Any:
        return self.constants.get(id(self.inputs[index]))


@attrs.define
class _Site:
    """An operator in the graph: its node, its call, and the nodes of its inputs."""

    node: fx.Node
    call: GraphCall
    inputs: list[Any]


class GraphWriter:
    """Writes the actions of all operators of one graph into it.

    Args:
        module: the captured graph.
        example_inputs: real or fake tensors, one for each placeholder of it.
        counts: how many operators of each name have been met, which is counted on.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        counts: collections.Counter[str],
    ) -> None:
        self._dispatcher = dispatcher
        self._module = module
        self._graph = module.graph
        self._counts = counts
        self._numbers = itertools.count()
        self._nodes: dict[int, fx.Node] = {}
        self._constants: dict[int, torch.Tensor] = {}
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, example_inputs, strict=False):
            if isinstance(value, torch.Tensor) and (value.is_leaf and _is_registered(node)):
                self._constants[id(node.meta.get("example_value"))] = value

    def write(self) -> None:
        """Analyse each operator, and write its actions around it."""
        for node in list(self._graph.nodes):
            example = node.meta.get("example_value")
            if isinstance(example, torch.Tensor):
                self._nodes.setdefault(id(example), node)
            func = _function_of(node)
            if func is not None and tensors_of(example):
                self._instrument(node, func)
        self._graph.lint()
        self._module.recompile()

    def _instrument(self, node: fx.Node, func: Any) -> None:
        site = self._site(node, func)
        execution = self._dispatcher.begin(site.call)
        plan = execution.finish(tensors_of(node.meta["example_value"]))
        _check_supported(plan)
        with self._graph.inserting_before(node):
            for action in plan.before:
                self._before(site, action)
            if plan.replace is not None:
                self._replace(site, plan.replace)
        outputs = [node]
        for action in plan.after:
            outputs = self._after(site, action, outputs)

    def _site(self, node: fx.Node, func: Any) -> _Site:
        name = name_of(func)
        path = _module_path(node)
        prefix = f"compiled.{path}" if path else "compiled"
        number = self._counts[f"{prefix}/{name}"]
        self._counts[f"{prefix}/{name}"] += 1
        args = fx.map_arg(node.args, _example)
        kwargs = fx.map_arg(node.kwargs, _example)
        call = GraphCall.of(func, name, f"{prefix}/{name}:{number}", tuple(args), kwargs, path)
        call.op = op_view(func, name)
        call.constants = self._constants
        nodes, node_kwargs = list(node.args), dict(node.kwargs)
        inputs = [item_at(place, nodes, node_kwargs) for place in call.places]
        return _Site(node, call, inputs)

    # -- the three kinds of actions ---------------------------------------

    def _before(self, site: _Site, action: Action) -> None:
        for index, new in self._run(action, site.inputs):
            site.inputs[index] = new
        self._rebind(site)

    def _replace(self, site: _Site, action: Action) -> None:
        _check_traceable(action)
        selected = _selected(action, site.inputs)
        site.node.op, site.node.target = "call_function", _replacement(action)
        site.node.args, site.node.kwargs = tuple(selected), self._keywords(action)

    def _after(self, site: _Site, action: Action, outputs: list[fx.Node]) -> list[fx.Node]:
        if not isinstance(site.node.meta["example_value"], torch.Tensor):
            raise CapabilityError(
                f"{action.routine}: op {site.call.op_id} has several outputs, which the torch "
                "graph driver cannot pass to insert_after_op(); use the driver torch-eager"
            )
        last = outputs[-1]
        # Nodes are written one after the other before a mark, or they would come out reversed.
        with self._graph.inserting_after(last):
            mark = self._graph.call_function(_nothing)
        users = [user for user in last.users if user is not mark]
        with self._graph.inserting_before(mark):
            changed = self._run(action, [last])
        self._graph.erase_node(mark)
        for _, new in changed:
            for user in users:
                user.replace_input_with(last, new)
            return [*outputs, new]
        return outputs

    def _run(self, action: Action, values: Sequence[Any]) -> list[tuple[int, fx.Node]]:
        """Write the call of a routine; the positions of its results and their nodes."""
        _check_traceable(action)
        selected = _selected(action, values)
        indices = range(len(values)) if action.select is None else action.select
        examples = [_example(value) for value in selected]
        wrapper = _routine(self._dispatcher, action)
        called = self._graph.call_function(wrapper, tuple(selected), self._keywords(action))
        results = []
        for position, index in enumerate(indices):
            if selected[position] is None:
                continue
            item = self._graph.call_function(_item, (called, position))
            item.meta["example_value"] = examples[position]
            results.append((index, item))
        return results

    def _keywords(self, action: Action) -> dict[str, Any]:
        """A routine's keyword arguments for the graph: tensors become nodes."""
        mapped: dict[str, Any] = _internals.map_tree(self._as_node, dict(action.kwargs))
        return mapped

    def _as_node(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        name = f"_amanda_{next(self._numbers)}"
        self._module.register_buffer(name, value)
        _internals.announce_buffer(self._module, name)
        return self._graph.get_attr(name)

    def _rebind(self, site: _Site) -> None:
        """Give the operator the nodes of its present inputs."""
        args, kwargs = list(site.node.args), dict(site.node.kwargs)
        for place, value in zip(site.call.places, site.inputs, strict=True):
            if value is not None or not isinstance(place, str):
                put_item(place, args, kwargs, value)
        site.node.args, site.node.kwargs = tuple(args), kwargs


# -- functions that are called in the graph -------------------------------


def _routine(dispatcher: Dispatcher, action: Action) -> Callable[..., Any]:
    """The function by which the graph calls a routine.

    It returns a tuple with one tensor for each selected one: the routine's, or the selected one
    itself. The gradient of an isolated routine passes straight through.
    """
    wanted = None if action.select is None else len(action.select)

    def amanda_routine(*tensors: Any, **kwargs: Any) -> tuple[Any, ...]:
        if action.differentiable:
            result = action.func(*tensors, **kwargs)
        else:
            with torch.no_grad():
                result = action.func(*tensors, **kwargs)
        count = len(tensors) if wanted is None else wanted
        results = dispatcher.checked(action, result, count) if result is not None else tensors
        return tuple(
            _substituted(action, old, new) for old, new in zip(tensors, results, strict=True)
        )

    return amanda_routine


def _substituted(action: Action, old: Any, new: Any) -> Any:
    if new is None or new is old or old is None or action.differentiable:
        return old if new is None else new
    if old.requires_grad and torch.is_grad_enabled():
        return AmandaSubstitute.apply(old, [new.detach()])
    return new.detach()


def _replacement(action: Action) -> Callable[..., Any]:
    def amanda_replacement(*tensors: Any, **kwargs: Any) -> Any:
        return action.func(*tensors, **kwargs)

    return amanda_replacement


def _item(results: tuple[Any, ...], position: int) -> Any:
    return results[position]


def _nothing() -> None:
    """Called by a node that marks a place in the graph while it is written."""


# -- reading the graph ----------------------------------------------------


def _function_of(node: fx.Node) -> Any:
    """The function that an operator's node calls; None if the node is no operator."""
    if node.op == "call_method":
        func = getattr(torch.Tensor, str(node.target), None)
    elif node.op == "call_function":
        func = node.target
        if func is _internals.getitem:
            source = node.args[0]
            if not isinstance(source, fx.Node) or not isinstance(_example(source), torch.Tensor):
                return None
            func = torch.Tensor.__getitem__
    else:
        return None
    return func if func is not None and kind_of(func) is not Kind.IGNORED else None


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _is_registered(node: fx.Node) -> bool:
    """Whether a placeholder is a parameter or buffer of a module, by the name Dynamo gives it."""
    name = str(node.target)
    return "_parameters_" in name or "_buffers_" in name


def _module_path(node: fx.Node) -> str:
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return _CALL.sub("", _ROOT.sub("", path))


def _selected(action: Action, values: Sequence[Any]) -> list[Any]:
    return [values[i] for i in (range(len(values)) if action.select is None else action.select)]


def _check_traceable(action: Action) -> None:
    func = getattr(action.func, "__func__", action.func)
    if not getattr(func, "amanda_traceable", False):
        raise CapabilityError(
            f"{action.routine} at op {action.op_id} would be compiled into the graph: mark it "
            "with @amanda.traceable if it is a function of tensors only, given as keyword "
            "arguments; else use the driver torch-eager"
        )


def _check_supported(plan: ActionPlan) -> None:
    gradients = (*plan.before_backward, *plan.after_backward)
    for action in (*gradients, plan.replace_backward):
        if action is not None:
            raise CapabilityError(
                f"{action.routine}: {action.kind.value}() on op {action.op_id} needs "
                "Capability.BACKWARD, which the torch graph driver lacks: gradients are made by "
                "the compiler; use the driver torch-eager, or replace_op() with an "
                "autograd.Function"
            )
