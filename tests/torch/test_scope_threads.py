"""Scopes of several threads, forks and suspended code, beyond the contract: PyTorch's modes."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import amanda
from amanda.errors import CoverageWarning
from amanda_torch import _internals
from amanda_torch.autograd.leaves import Accumulation, LeafClaimer
from amanda_torch.eager import module_calls
from amanda_torch.plugin import TorchEagerDriver
from tests.running import in_threads, run_python
from tests.torch.support import Counter, ForwardCounter, On, after, applied

X = torch.ones(2)


def test_a_mode_goes_where_another_thread_ends_the_scope() -> None:
    """From the main thread at once, from another one with its next operator."""
    block = applied(ForwardCounter())
    block.__enter__()
    torch.relu(X)
    in_threads(lambda: block.__exit__(None, None, None))
    assert _internals.mode_depth() == 0

    opened, closed = threading.Event(), threading.Event()
    found: list[Any] = []
    later = ForwardCounter()

    def run() -> None:
        block.__enter__()
        opened.set()
        closed.wait()
        torch.relu(X)
        found.append(_internals.mode_depth())
        with applied(later):
            torch.relu(X)
        found.append(_internals.mode_depth())

    thread = threading.Thread(target=run)
    thread.start()
    opened.wait()
    block.__exit__(None, None, None)
    closed.set()
    thread.join()
    assert found == [0, 0]
    assert later.ids == ["/relu:0"]


class WhileCompiled(torch.nn.Module):
    """A module that runs something in another thread, twice, while it is compiled.

    Args:
        run: run as Dynamo traces it, and before, as the compiled module is made of it.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._run = run

    @property
    def _initialize_hook(self) -> Any:
        in_threads(self._run)
        raise AttributeError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * traced(self._run)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced(run: Callable[[], None]) -> float:
    """One, of which Dynamo makes a constant."""
    in_threads(run)
    return 1.0


def test_a_thread_that_compiles_leaves_the_others_as_they_are() -> None:
    """Meanwhile, operators of theirs have the ids of their modules, and tools act inside fused
    ones."""
    model = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    counter, halving = ForwardCounter(), On(linear=after(lambda y: y / 2))
    found: list[tuple[torch.Tensor, list[str]]] = []

    def run() -> None:
        counter.ids.clear()
        with torch.no_grad():
            found.append((model(torch.ones(1, 3, 4)), counter.ids[:]))

    with applied(counter, halving), warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        in_threads(run)
        torch.compile(WhileCompiled(run), backend="eager")(X)
    (wanted, ids), *others = found
    assert "TransformerEncoderLayer.self_attn/linear:0" in ids
    assert [ids for _, ids in others] == [ids] * 2
    assert all(output.equal(wanted) for output, _ in others)


class Trace:
    """A trace of ``torch.fx`` in another thread, which lasts until it is told to end.

    Attributes:
        names: of the modules in the graph.
    """

    def __init__(self) -> None:
        self._begun, self._goes_on = threading.Event(), threading.Event()
        self.names: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._thread.start()
        self._begun.wait()

    def end(self) -> None:
        self._goes_on.set()
        self._thread.join()

    def _run(self) -> None:
        trace = self

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.before, self.after = torch.nn.ReLU(), torch.nn.Linear(2, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.before(x)
                trace._begun.set()
                trace._goes_on.wait()
                return self.after(y)

        graph = torch.fx.symbolic_trace(Model()).graph
        self.names = [str(node.target) for node in graph.nodes if node.op == "call_module"]


def test_a_scope_ends_while_another_thread_traces() -> None:
    """The trace has the modules that it has without the scope, and leaves nothing of ours."""
    vanilla, trace = vars(torch.nn.Module)["__call__"], Trace()
    with applied(ForwardCounter()):
        trace.begin()
    trace.end()
    assert trace.names == ["before", "after"]
    assert vars(torch.nn.Module)["__call__"] is vanilla


def test_a_scope_begins_while_another_thread_traces() -> None:
    """It waits for the end of the trace, which would put back the vanilla call of modules."""
    vanilla, trace, counter = vars(torch.nn.Module)["__call__"], Trace(), ForwardCounter()
    trace.begin()
    ending = threading.Timer(0.2, trace.end)
    ending.start()
    with applied(counter):
        ending.join()
        torch.nn.Sequential(torch.nn.ReLU())(X)
    assert trace.names == ["before", "after"]
    assert counter.ids == ["Sequential.0/relu:0"]
    assert vars(torch.nn.Module)["__call__"] is vanilla


def test_a_scope_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a trace does not end, the calls of modules stay as they are, and a warning says so."""
    monkeypatch.setattr(module_calls, "_LONGEST_TRACE", 0.0)
    vanilla, trace, counter = vars(torch.nn.Module)["__call__"], Trace(), ForwardCounter()
    trace.begin()
    with pytest.warns(CoverageWarning, match="torch.fx.*no module paths"):
        scope = applied(counter).__enter__()
    torch.relu(X)
    trace.end()
    scope.__exit__(None, None, None)
    assert trace.names == ["before", "after"]
    assert counter.ids == ["/relu:0"]
    assert vars(torch.nn.Module)["__call__"] is vanilla


def test_modules_have_their_ids_while_another_thread_traces() -> None:
    """Where the trace takes the place of their calls for all threads, as for ``make_fx``."""
    counter = ForwardCounter()
    model = torch.nn.Sequential(torch.nn.ReLU())
    with applied(counter):
        trace = functools.partial(in_threads, functools.partial(model, X))
        make_fx(lambda x: (x, trace())[0])(X)
    assert counter.ids == ["Sequential.0/relu:0"]


def test_a_thread_outside_of_all_scopes_compiles_what_it_does_without_them() -> None:
    """Also as the first in its process, when Dynamo looks up the functions that it knows."""
    code = """
import queue, threading, torch
from tests.torch.support import ForwardCounter, applied

def compile():
    start.get()
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x, graphs = torch.ones(1, 2, 4), []
    def note(module, inputs):
        graphs.append(module)
        return module.forward
    try:
        torch.compile(attention, fullgraph=True, backend=note)(x, x, x)
    except Exception as error:
        graphs.append(error)
    done.put(graphs)

start, done = queue.Queue(), queue.Queue()
thread = threading.Thread(target=compile)
thread.start()
with applied(ForwardCounter()):
    torch.ones(2)
    start.put(None)
    graphs = done.get()
thread.join()
assert [isinstance(graph, torch.fx.GraphModule) for graph in graphs] == [True], graphs
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_threads_of_other_scopes_use_the_same_leaf() -> None:
    """A scope of one thread is not told of the accumulations of another thread's backward passes,
    whichever of them has used the leaf first."""
    leaf = torch.ones(2, requires_grad=True)
    outer, inner, own = Counter(), Counter(), "/mul:0/grad/AccumulateGrad:0"
    begins = threading.Event()

    def run() -> None:
        begins.wait()
        (leaf * 2).sum().backward()

    with applied(outer):
        thread = threading.Thread(target=run)
        thread.start()
        with applied(inner):
            product = leaf * 3
            begins.set()
            thread.join()
            assert inner.backward_ids == []
            assert outer.backward_ids.count(own) == 1
            product.sum().backward()
        assert outer.backward_ids.count(own) == 2
    assert inner.backward_ids.count(own) == 1


def test_a_backward_pass_of_what_another_thread_has_computed_is_seen() -> None:
    """Nodes are numbered in each thread: those of another one are none of before the scope."""
    weight, counter, outputs = torch.ones(2, requires_grad=True), Counter(), []
    (weight.sin() * 2).sum().backward()
    with applied(counter) as scope:
        in_threads(lambda: outputs.append(weight.sin()))
        outputs[0].sum().backward()
    assert counter.backward_ops["SinBackward0"] == 1
    assert not scope.statistics.not_seen


def test_a_scope_that_its_own_routine_ends() -> None:
    """No mode stays, though PyTorch puts it on again when the operator has ended."""
    tool, blocks = amanda.Tool(), []
    tool.add_inst_for_op(lambda context: context.insert_before_op(end_scope, inputs=[]))

    def end_scope() -> None:
        blocks.pop().__exit__(None, None, None)

    block = applied(tool)
    blocks.append(block)
    block.__enter__()
    torch.relu(X)
    assert _internals.mode_depth() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_routine_can_fork() -> None:
    """The child goes on without a mode, with gradients on, and can open scopes."""
    children: list[int] = []
    later, tool = ForwardCounter(), amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fork, inputs=[]))

    def fork() -> None:
        if not children:
            children.append(os.fork())

    with applied(tool):
        torch.relu(X)
        if children == [0]:
            code = 1
            try:
                clean = _internals.mode_depth() == 0 and torch.is_grad_enabled()
                with applied(later):
                    torch.relu(X)
                code = 0 if clean and later.ids == ["/relu:0"] else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_a_user_s_modes_survive_an_interrupt_in_a_routine() -> None:
    """Modes that are hidden from a routine are on again, in their order."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def interrupt(*tensors: Any) -> None:
        raise KeyboardInterrupt

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(interrupt))
    outer, inner = Mode(), Mode()
    with outer, inner:
        with pytest.raises(KeyboardInterrupt), applied(tool):
            torch.relu(X)
        assert [*_internals.modes()] == [outer, inner]
        assert torch.is_grad_enabled()


@pytest.mark.usefixtures("interceptor")
def test_threads_that_share_a_leaf_find_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two threads use a leaf at once, its accumulation is counted in the passes of both, also
    where the other thread is about to hook it."""
    weight, vanilla = torch.ones(3, requires_grad=True), LeafClaimer.hook_leaf
    begun, used = threading.Event(), threading.Event()

    def slowly(claimer: LeafClaimer, *args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            # The other thread uses the leaf now, or waits for the end of this.
            used.wait(0.3)
        return vanilla(claimer, *args)

    losses: list[torch.Tensor] = []

    def use(waits: bool) -> None:
        if waits:
            begun.wait()
        losses.append((weight * 2).sum())
        used.set()

    counter = Counter()
    with applied(counter):
        with monkeypatch.context() as patch:
            patch.setattr(LeafClaimer, "hook_leaf", slowly)
            in_threads(*[functools.partial(use, waits) for waits in (False, True)])
        for loss in losses:
            loss.backward()
    assert counter.backward_ops["AccumulateGrad"] == 2


def test_a_leaf_is_marked_when_it_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a thread that uses a leaf while another thread is about to hook it is counted, and
    so is the pass of that thread."""
    monkeypatch.setenv(TorchEagerDriver.interceptor_variable, "mode")
    weight, vanilla = torch.ones(3, requires_grad=True), Accumulation.register
    begun, used = threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert used.wait(30)
        vanilla(*args)

    def hook_late() -> None:
        (weight * 2).sum().backward()

    def use_meanwhile() -> None:
        assert begun.wait(30)
        (weight * 2).sum().backward()
        used.set()

    counter = Counter()
    with applied(counter):
        monkeypatch.setattr(Accumulation, "register", slowly)
        threads = [threading.Thread(target=use) for use in (hook_late, use_meanwhile)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counter.backward_ops["AccumulateGrad"] == 2
