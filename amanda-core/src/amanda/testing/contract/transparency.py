"""Contract rule 11: a tool that changes nothing has no effect."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.python.patching import PatchSet
from amanda.testing import watched
from amanda.testing.contract.base import B, ContractTests, W, X, inserting, nothing
from amanda.testing.framework import Framework, Probe, Program, Trained, requires
from amanda.tool import Tool, new_iteration
from amanda.tools.graph_tracing import GraphTracingTool

_ABSENT = object()


class TransparencyTests(ContractTests):
    """Bit-identical results, exact restoration, nothing kept alive."""

    def network(self) -> Program:
        """A small computation with all kinds of operators."""
        fw = self.fw

        def build(x: Any, w: Any, b: Any) -> Any:
            hidden = fw.relu(fw.linear(x, w, b))
            top, bottom = fw.split(fw.cat([hidden, fw.mul(x, hidden)]))
            return fw.add(fw.mul(top, bottom), x), top

        return fw.program(build, X, W, B)

    def watcher(self) -> Probe:
        """A tool with an analysis at each point and no actions."""
        points = ("before", "after", "before_backward", "after_backward")
        return self.probe("", **{point: lambda context: None for point in points})

    def identity(self, routine: Callable[..., Any] = nothing) -> Probe:
        """A tool with a routine that changes nothing, at each point."""
        around = {"before_backward_op": routine, "after_backward_op": routine}
        forward = inserting(before_op=routine, after_op=routine, **around)
        return self.probe(before=forward, before_backward=inserting(**around))

    def graph_tracer(self) -> Tool:
        """The tool that records the graph of operators."""
        return GraphTracingTool()

    @requires(Capability.BACKWARD)
    def test_watching_changes_nothing(self) -> None:
        """Outputs and gradients under a tool that only watches equal the vanilla run's."""
        self.check_transparent(self.network(), self.watcher())

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("routine", [nothing, lambda *t: t], ids=["None", "the same"])
    def test_identity_routines_change_nothing(self, routine: Callable[..., Any]) -> None:
        """Outputs and gradients under identity routines at all points equal the vanilla run's."""
        self.check_transparent(self.network(), self.identity(routine))

    def test_forward_only(self) -> None:
        """Outputs of runs without backward equal the vanilla run's, also after a scope in which
        nothing runs."""
        program = self.network()
        expected = program.run()
        with self.apply(self.identity(), self.watcher()):
            assert program.run() == program.run() == expected
        with self.apply(self.watcher()):
            pass
        assert program.run() == expected

    def test_random_numbers(self) -> None:
        """Random operators draw the same numbers, and leave the generator in the same state."""
        if type(self.fw).dropout is Framework.dropout:
            pytest.skip("the adapter has no operator that draws random numbers")
        program = self.fw.program(self.fw.dropout, [[1.0] * 16] * 4)
        self.fw.seed()
        expected = program.run(), self.fw.rng_state()
        self.fw.seed()
        outputs = self.run(program, self.identity(), self.watcher())
        assert (outputs, self.fw.rng_state()) == expected

    def test_an_operator_runs_once(self) -> None:
        """An operator is executed as often as without tools, also where it is analysed."""
        found = self.fw.counted_op()
        if found is None:
            pytest.skip("the framework does not count executions")
        build, executions = found
        program = self.fw.program(build, X)
        program.run()
        once = executions()
        with self.apply(self.watcher(), self.identity()):
            program.run()
            program.run()
        assert once >= 1
        assert executions() == 3 * once

    @pytest.mark.parametrize("failing", [False, True], ids=["normal", "exception"])
    def test_patches_are_undone(self, failing: bool) -> None:
        """After the scope every patched attribute is the very object that it was before."""
        program = self.network()
        program.run()
        before = watched.snapshot(self.fw.watched)
        with _patched_attributes() as patched:
            try:
                with self.apply(self.identity()):
                    program.run()
                    if failing:
                        raise KeyError
            except KeyError:
                pass
        assert [
            (t, n) for t, n, old in patched if inspect.getattr_static(t, n, _ABSENT) is not old
        ] == []
        assert self.changes_since(before) == []

    def test_nested_scopes_undo_patches(self) -> None:
        """Scopes that end in the order of their entry leave nothing behind either; the second one
        acts to its end."""
        program = self.network()
        # A framework may set attributes of its own at its first run, as TensorFlow its context.
        program.run()
        before = watched.snapshot(self.fw.watched)
        first, second = self.apply(self.watcher()), self.apply(self.counting())
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        program.run()
        second.__exit__(None, None, None)
        assert self.noted
        assert self.changes_since(before) == []

    def changes_since(self, before: watched.Snapshot) -> list[str]:
        """The attributes that the adapter watches and that are not the same object."""
        return watched.differences(self.fw.watched, before, watched.snapshot(self.fw.watched))

    @requires(Capability.BACKWARD)
    def test_tensors_die(self) -> None:
        """A tensor of the model dies when the model drops it, without garbage collection."""
        follow = self.following()
        tool = self.probe(before=inserting(after_op=follow, before_backward_op=follow))
        program = self.network()
        program.train()
        with _no_collection(), self.apply(tool, self.watcher()):
            for _ in range(2):
                program.train()
                assert self.noted
                assert [r() for r in self.noted if r() is not None] == []

    def following(self) -> Callable[..., None]:
        """A routine that notes a reference to each of its tensors."""
        return lambda *tensors: self.noted.extend(
            self.fw.reference(t) for t in tensors if t is not None
        )

    @requires(Capability.BACKWARD)
    def test_an_abandoned_graph_dies(self) -> None:
        """The tensors of a forward pass that no backward pass follows die with its outputs."""
        self.needs_separate_backward()
        program = self.network()
        tool = self.probe(before=inserting(after_op=self.following()))
        program.forward()
        with _no_collection(), self.apply(tool, self.watcher()):
            for _ in range(2):
                program.forward()
                new_iteration()
                assert self.noted
                assert [r() for r in self.noted if r() is not None] == []

    @requires(Capability.BACKWARD)
    def test_substituted_tensors_die(self) -> None:
        """Tensors that routines return die with the computation too."""

        def double(tensor: Any) -> Any:
            result = self.fw.scale(tensor, 2.0)
            self.noted.append(self.fw.reference(result))
            return result

        tool = self.probe("mul", before=inserting(after_op=double))
        self.program.train()
        with _no_collection(), self.apply(tool):
            self.program.train()
            assert len(self.noted) == 1
            assert self.noted[0]() is None

    @requires(Capability.REPLAY)
    def test_a_function_of_an_op_keeps_no_tensor(self) -> None:
        """The function that get_function() gives keeps no tensor of the execution alive."""
        self.needs_concrete_tensors()
        kept: list[Callable[..., Any]] = []

        def keep(context: OpContext) -> None:
            kept.append(context.get_function())
            self.noted.append(self.fw.reference(context.get_inputs()[self.data_input("split")]))

        program = self.fw.program(lambda x, w: self.fw.split(self.fw.mul(x, w)), X, W)
        with _no_collection():
            self.run(program, self.probe("split", before=keep))
            assert len(kept) == 1
            assert [reference() for reference in self.noted] == [None]

    # -- tensors of which a framework promises little -------------------------

    @pytest.mark.parametrize("tool", ["watcher", "identity", "graph_tracer"])
    def test_tensors_without_dimensions(self, tool: str) -> None:
        """Tensors without dimensions run like others, also if they have a class of their own."""
        program = self.fw.program(lambda x, w: self.fw.add(self.fw.mul(x, w), x), 3.0, 2.0)
        self.check_transparent(program, getattr(self, tool)())

    @pytest.mark.parametrize("tool", ["watcher", "identity", "graph_tracer"])
    def test_tensors_without_weak_references(self, tool: str) -> None:
        """Tensors that take no weak reference run like others."""
        constant = self.fw.unreferenceable(2.0)
        if constant is None:
            pytest.skip("all tensors of the framework take weak references")
        with pytest.raises(TypeError):
            weakref.ref(constant)
        program = self.fw.program(lambda x: self.fw.relu(self.fw.mul(x, constant)), 3.0)
        self.check_transparent(program, getattr(self, tool)())

    def check_transparent(self, program: Program, tool: Tool) -> None:
        """Under a tool that changes nothing, and after it, a program gives the results of
        vanilla."""
        has_backward = Capability.BACKWARD in self.driver_cls.capabilities
        run = program.train if has_backward else program.run
        expected = run()
        with self.apply(tool):
            assert run() == run() == expected
        assert run() == expected

    @requires(Capability.BACKWARD)
    def test_substituted_tensors_without_dimensions(self) -> None:
        """The gradient of a substituted tensor without dimensions passes straight through."""
        program = self.fw.program(self.fw.mul, 3.0, 2.0)

        def analyse(context: OpContext) -> None:
            context.insert_before_op(lambda t: self.fw.scale(t, 2.0), inputs=[0])
            context.insert_after_backward_op(lambda *g: g)

        result = self.train(program, self.probe("mul", before=analyse), times=2)
        assert result == Trained([12.0], [2.0, 6.0])

    def test_tools_die(self) -> None:
        """Nothing keeps a tool alive after its scope."""
        tool = self.identity()
        reference = weakref.ref(tool)
        self.run(self.network(), tool)
        del tool
        gc.collect()
        assert reference() is None

    @requires(Capability.BACKWARD)
    def test_a_pending_backward_keeps_no_tool(self) -> None:
        """A gradient graph that outlives its scope keeps none of its tools alive."""
        self.needs_separate_backward()
        tool = self.identity()
        reference = weakref.ref(tool)
        program = self.network()
        expected = program.train().gradients
        with self.apply(tool):
            backward = program.forward()
        del tool
        gc.collect()
        assert reference() is None
        assert backward() == expected

    @requires(Capability.MODULES)
    def test_models_die(self) -> None:
        """Nothing keeps a model alive inside of the scope."""
        with self.apply(self.identity()):
            model = self.fw.model(W)
            reference = weakref.ref(model)
            self.fw.program(model, X).run()
            del model
            gc.collect()
            assert reference() is None


@contextmanager
def _patched_attributes() -> Iterator[list[tuple[Any, str, Any]]]:
    """Notes each attribute that is patched through PatchSet, with its value from before."""
    patched: list[tuple[Any, str, Any]] = []
    vanilla = PatchSet.set

    def noting(self: PatchSet, target: Any, name: str, value: Any, *, create: bool = False) -> None:
        patched.append((target, name, inspect.getattr_static(target, name, _ABSENT)))
        vanilla(self, target, name, value, create=create)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PatchSet, "set", noting)
        yield patched


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off, so that objects in a reference cycle stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
