"""Contract rules 4, 13 and 15: inputs and outputs, selections, contexts, ids, users' operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from amanda.errors import ContextExpiredError, SelectionError
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ContractTests, W, X
from amanda.testing.framework import Probe, Program, requires
from amanda.tool import cache_disabled, new_iteration
from amanda.tools.mapping import MappingTool


class ContextTests(ContractTests):
    """The content of a context, and selections from it."""

    def selected(self, program: Program, op: str, method: str, **selection: Any) -> list[Any]:
        """The values that a routine gets, recorded with a selection."""
        seen: list[Any] = []

        def look(*tensors: Any) -> None:
            seen.append([None if t is None else self.fw.to_list(t) for t in tensors])

        tool = self.probe(op, before=lambda c: getattr(c, method)(look, **selection))
        self.run(program, tool)
        assert len(seen) == 1
        return list(seen[0])

    def test_inputs_in_declared_order(self) -> None:
        """Inputs come in the order of the declared parameters, however they are passed."""
        name = self.fw.names["linear"]

        def by_keyword(*tensors: Any) -> Any:
            named = dict(zip(name, tensors, strict=True))
            # All but the first, the last of them first.
            return self.fw.linear(tensors[0], **{key: named[key] for key in reversed(name[1:])})

        values = self.linear_inputs()
        positional = self.fw.program(self.fw.linear, *values)
        keywords = self.fw.program(by_keyword, *values)
        assert self.selected(positional, "linear", "insert_before_op") == values
        assert self.selected(keywords, "linear", "insert_before_op") == values

    def test_absent_optional_input(self) -> None:
        """An absent optional tensor is None, so that positions do not shift."""
        if len(self.linear_inputs()) == 2:
            pytest.skip("the framework's linear operator has no optional input")
        program = self.fw.program(self.fw.linear, X, W)
        assert self.selected(program, "linear", "insert_before_op") == [X, W, None]
        values: list[Any] = []
        self.run(program, self.probe("linear", before=lambda c: values.append(c.get_value(2))))
        assert values == [None]

    def test_lists_are_expanded(self) -> None:
        """A list of tensors is expanded in place."""
        program = self.fw.program(lambda *t: self.fw.cat(t), X, W, X)
        inputs = self.fw.inputs("cat", *(self.fw.tensor(values) for values in (X, W, X)))
        expected = [self.fw.to_list(t) for t in inputs]
        assert self.selected(program, "cat", "insert_before_op") == expected

    def test_all_outputs(self) -> None:
        """An op with several outputs gives them all, in order."""
        program = self.fw.program(self.fw.split, X)
        assert self.selected(program, "split", "insert_after_op") == [[X[0]], [X[1]]]

    def test_attributes(self) -> None:
        """Arguments that are not tensors are attributes, by name."""
        seen: list[Any] = []
        tool = self.probe("split", before=lambda c: seen.append(c.get_attrs()))
        self.run(self.fw.program(self.fw.split, X), tool)
        assert len(seen) == 1
        assert self.fw.attributes.items() <= seen[0].items()

    def test_input_names(self) -> None:
        """get_input_names gives the declared name of each input."""
        seen: list[Any] = []
        tool = self.probe("linear", before=lambda c: seen.append(c.get_input_names()))
        self.run(self.fw.program(self.fw.linear, X, W), tool)
        assert seen == [list(self.fw.names["linear"])]

    @pytest.mark.parametrize(("index", "expected"), [([1], [W]), (0, [X]), ([1, 0], [W, X])])
    def test_select_inputs_by_index(self, index: Any, expected: Any) -> None:
        """inputs= selects positions, in the order given."""
        assert (
            self.selected(self.multiplication(), "mul", "insert_before_op", inputs=index)
            == expected
        )

    def test_select_inputs_by_name(self) -> None:
        """inputs= selects by declared name."""
        name = self.fw.names["mul"][1]
        seen = self.selected(self.multiplication(), "mul", "insert_before_op", inputs=[name])
        assert seen == [W]

    def test_select_outputs_by_index(self) -> None:
        """outputs= selects positions."""
        program = self.fw.program(self.fw.split, X)
        assert self.selected(program, "split", "insert_after_op", outputs=[1]) == [[X[1]]]

    def test_select_inputs_positionally(self) -> None:
        """The selection may be the second positional argument."""
        seen: list[Any] = []
        tool = self.probe(
            "mul", before=lambda c: c.insert_before_op(lambda *t: seen.append(len(t)), [0])
        )
        self.run(self.multiplication(), tool)
        assert seen == [1]

    def test_select_inputs_by_role(self) -> None:
        """inputs= selects by a role that a mapping rule has set."""
        seen: list[Any] = []

        def rule(context: OpContext) -> None:
            context["weight_index"] = 1

        mapping = MappingTool(rules=[[self.namespace().tags[0], rule]])
        tool = self.probe(
            "mul",
            before=lambda c: c.insert_before_op(
                lambda t: seen.append(self.fw.to_list(t)), inputs=["weight"]
            ),
        )
        tool.depends_on(mapping)
        self.run(self.multiplication(), tool)
        assert seen == [W]

    def namespace(self) -> Any:
        """The namespace in which the driver runs."""
        seen: list[Any] = []
        self.run(
            self.multiplication(), self.probe("mul", before=lambda c: seen.append(c.namespace))
        )
        return seen[0]

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("spelling", ["grad_outputs", "grad_out"])
    def test_select_gradients_of_outputs(self, spelling: str) -> None:
        """grad_outputs= and grad_out= both select gradients that a backward op consumes."""
        counts: list[int] = []

        def analyse(context: OpContext) -> None:
            context.insert_before_backward_op(lambda *t: counts.append(len(t)), **{spelling: [0]})

        self.train(self.multiplication(), self.probe("mul", before=analyse))
        assert counts == [1]

    @requires(Capability.BACKWARD)
    @pytest.mark.parametrize("spelling", ["grad_inputs", "grad_in"])
    def test_select_gradients_of_inputs(self, spelling: str) -> None:
        """grad_inputs= and grad_in= both select gradients that a backward op produces."""
        seen: list[Any] = []

        def analyse(context: OpContext) -> None:
            context.insert_after_backward_op(
                lambda t: seen.append(self.fw.to_list(t)), **{spelling: [1]}
            )

        self.train(self.multiplication(), self.probe("mul", before=analyse))
        assert seen == [X]

    @requires(Capability.BACKWARD)
    def test_select_gradients_of_inputs_by_name(self) -> None:
        """grad_inputs= selects by the name of the forward input."""
        seen: list[Any] = []
        name = self.fw.names["mul"][1]

        def analyse(context: OpContext) -> None:
            context.insert_after_backward_op(
                lambda t: seen.append(self.fw.to_list(t)), grad_inputs=[name]
            )

        self.train(self.multiplication(), self.probe("mul", before=analyse))
        assert seen == [X]

    @requires(Capability.BACKWARD)
    def test_select_gradients_of_a_backward_op_by_name(self) -> None:
        """In a backward analysis grad_inputs= selects by the name of the forward input, at the
        backward op that produces its gradient; at the latest from its second run on."""
        seen: list[Any] = []
        name = self.fw.names["mul"][1]

        def analyse(context: OpContext) -> None:
            # An op that produces another gradient has no such name.
            with suppress(SelectionError):
                context.insert_after_backward_op(
                    lambda t: seen.append(self.fw.to_list(t)), grad_inputs=[name]
                )

        program = self.multiplication()
        with self.apply(self.probe("mul", before_backward=analyse)), cache_disabled():
            program.train()
            seen.clear()
            program.train()
        assert seen == [X]

    def test_index_out_of_range(self) -> None:
        """An index out of range is an error that names the op id and its inputs."""
        tool = self.probe("mul", before=lambda c: c.insert_before_op(print, inputs=[2]))
        name = self.fw.names["mul"][1]
        with pytest.raises(SelectionError, match=rf"(?i)inputs=\[2\].*mul.*2 inputs.*{name}"):
            self.run(self.multiplication(), tool)

    def test_output_index_out_of_range(self) -> None:
        """An index out of range is an error also where the outputs are not yet known."""
        tool = self.probe("mul", before=lambda c: c.insert_after_op(print, outputs=[1]))
        with pytest.raises(SelectionError, match=r"(?i)outputs=\[1\].*mul.*1 outputs"):
            self.run(self.multiplication(), tool)

    def test_unknown_input_name(self) -> None:
        """A name that the op does not have is an error that lists the names that it has."""
        tool = self.probe("mul", before=lambda c: c.insert_before_op(print, inputs=["nose"]))
        name = self.fw.names["mul"][1]
        with pytest.raises(SelectionError, match=rf"(?i)'nose'.*mul.*{name}"):
            self.run(self.multiplication(), tool)

    # -- contract rule 15 -----------------------------------------------------

    def test_unset_key_is_none(self) -> None:
        """A key of the context that no tool has set reads as None."""
        seen: list[Any] = []
        tool = self.probe(
            "mul", before=lambda c: seen.append((c["unset"], c.get("unset"), "unset" in c))
        )
        self.run(self.multiplication(), tool)
        assert seen == [(None, None, False)]

    def test_keys_are_shared_between_tools(self) -> None:
        """A key that one tool sets is read by the tools after it, at the points after it."""
        seen: list[Any] = []
        writer = self.probe("mul", before=lambda c: c.update(mark=1))
        reader = self.probe(
            "mul", before=lambda c: seen.append(c["mark"]), after=lambda c: seen.append(c["mark"])
        )
        self.run(self.multiplication(), writer, reader)
        assert seen == [1, 1]

    def test_op_has_a_type(self) -> None:
        """get_op() has the operator's type."""
        seen: list[str] = []
        tool = self.probe(before=lambda c: seen.append(self.fw.type_of(c.get_op())))
        self.run(self.fw.program(lambda x, w: self.fw.relu(self.fw.mul(x, w)), X, W), tool)
        wanted = [self.fw.types["mul"], self.fw.types["relu"]]
        assert [kind for kind in seen if kind in wanted] == wanted

    def test_id_has_a_type(self) -> None:
        """An op id contains the type of its op."""
        ids: dict[str, list[str]] = {}
        tool = self.probe(
            before=lambda c: ids.setdefault(self.fw.type_of(c.get_op()), []).append(c.get_op_id())
        )

        def build(x: Any, w: Any) -> Any:
            halves = self.fw.split(self.fw.cat([self.fw.linear(x, w), self.fw.relu(w)]))
            return self.fw.add(*halves)

        self.run(self.fw.program(build, X, W), tool)
        for op in ("split", "cat", "linear", "relu", "add"):
            kind = self.fw.types[op]
            assert [op_id for op_id in ids[kind] if kind.lower() not in op_id.lower()] == []

    @requires(Capability.IN_PLACE)
    def test_id_of_an_in_place_op_has_its_type(self) -> None:
        """The id of an in-place op contains its own type, not that of the op it adds to."""
        ids: list[str] = []
        tool = self.probe("add_inplace", before=lambda c: ids.append(c.get_op_id()))
        others: list[str] = []
        rest = self.probe("mul", before=lambda c: others.append(c.get_op_id()))

        def build(x: Any, w: Any) -> Any:
            target = self.fw.mul(x, w)
            self.fw.add_inplace(target, w)
            return target

        self.run(self.fw.program(build, X, W), tool, rest)
        kind = self.fw.types["add_inplace"].lower()
        assert [kind in op_id.lower() for op_id in ids] == [True]
        assert not set(ids) & set(others)

    def test_forward_context(self) -> None:
        """In a forward context everything that belongs to a backward op is None."""
        seen: list[Any] = []

        def look(context: OpContext) -> None:
            assert context.is_forward()
            assert not context.is_backward()
            seen.extend(
                [
                    context.get_backward_op(),
                    context.get_backward_op_id(),
                    context.get_grad_outputs(),
                    context.get_grad_inputs(),
                ]
            )

        self.run(self.multiplication(), self.probe("mul", before=look))
        assert seen == [None] * 4

    def test_context_after_its_analysis(self) -> None:
        """After the analysis the tensors of a context are out of reach; the rest stays."""
        kept: list[OpContext] = []

        def keep(context: OpContext) -> None:
            context["key"] = "value"
            kept.append(context)

        with self.apply(self.probe("mul", before=keep)):
            self.multiplication().run()
        (context,) = kept
        readers: list[Callable[[], Any]] = [
            context.get_inputs,
            context.get_outputs,
            lambda: context.get_value(0),
            lambda: context.insert_before_op(print),
        ]
        for read in readers:
            with pytest.raises(ContextExpiredError, match="analysis"):
                read()
        assert self.fw.type_of(context.get_op()) == self.fw.types["mul"]
        assert "mul" in context.get_op_id().lower()
        assert context["key"] == "value"

    def test_namespace(self) -> None:
        """A context has the namespace: framework, version and mode."""
        assert len(self.namespace().tags) >= 2

    def test_runs_at_once(self) -> None:
        """A context says whether operators run when they are called: they do without
        STATIC_GRAPH."""
        said: list[bool] = []
        tool = self.probe("mul", before=lambda c: said.append(c.runs_at_once))
        self.run(self.multiplication(), tool)
        assert said == [Capability.STATIC_GRAPH not in self.driver_cls.capabilities]

    @requires(Capability.BACKWARD)
    def test_runs_at_once_in_backward(self) -> None:
        """The context of a backward operator says it as that of its forward operator does."""
        said: list[bool] = []
        tool = self.probe("mul", before_backward=lambda c: said.append(c.runs_at_once))
        self.train(self.multiplication(), tool)
        assert set(said) == {Capability.STATIC_GRAPH not in self.driver_cls.capabilities}

    def test_ids_are_equal_across_iterations(self) -> None:
        """The ids of two iterations are equal."""
        seen: list[str] = []
        tool = self.probe(before=lambda c: seen.append(c.get_op_id()))
        program = self.fw.program(lambda x, w: self.fw.relu(self.fw.mul(x, w)), X, W)
        with self.apply(tool), cache_disabled():
            for _ in range(2):
                new_iteration()
                program.run()
        half = len(seen) // 2
        assert seen[:half] == seen[half:]

    def test_ids_are_unique(self) -> None:
        """Two ops of one iteration have two ids."""
        seen: list[str] = []
        tool = self.probe("mul", before=lambda c: seen.append(c.get_op_id()))
        self.run(self.fw.program(lambda x, w: self.fw.mul(self.fw.mul(x, w), w), X, W), tool)
        assert len(set(seen)) == 2

    @requires(Capability.BACKWARD)
    def test_ids_restart_after_backward(self) -> None:
        """The end of a backward is the end of an iteration."""
        seen: list[str] = []
        tool = self.probe("mul", before=lambda c: seen.append(c.get_op_id()))
        self.train(self.multiplication(), tool, times=3)
        assert len(seen) == 1

    @requires(Capability.MODULES)
    def test_ids_carry_module_paths(self) -> None:
        """An op id begins with the module that runs the op, and get_module gives its path."""
        seen: list[tuple[str, str]] = []
        tool = self.probe("linear", before=lambda c: seen.append((c.get_op_id(), c.get_module())))
        self.run(self.fw.program(self.fw.model(W), X), tool, times=2)
        kind, separator = self.fw.types["linear"], self.fw.separator
        assert seen == [
            (f"Model{separator}{name}/{kind}:0", self.fw.module_path(name))
            for name in ("first", "second")
        ]

    @requires(Capability.MODULES)
    def test_ids_of_several_models(self) -> None:
        """Further models of the same class have ids of their own."""
        seen: list[str] = []
        tool = self.probe("linear", before=lambda c: seen.append(c.get_op_id()))
        programs = [self.fw.program(self.fw.model(W), X) for _ in range(3)]
        with self.apply(tool):
            for program in (*programs, *programs):
                program.run()
        assert len(seen) == len(set(seen)) == 6
        models = [op_id.partition(self.fw.separator)[0] for op_id in seen[::2]]
        assert models == ["Model", "Model@1", "Model@2"]

    @requires(Capability.MODULES)
    def test_ids_of_a_module_called_several_times(self) -> None:
        """Further calls of a module in an iteration have ids of their own."""
        seen: list[str] = []
        model = self.fw.model(W, calls=3)
        tool = self.probe("linear", before=lambda c: seen.append(c.get_op_id()))
        self.run(self.fw.program(model, X), tool, times=2)
        assert len(seen) == len(set(seen)) == 6
        if self.fw.numbers_calls:
            assert ["#1" in op_id for op_id in seen] == [False, False, True, True, False, False]
            assert ["#2" in op_id for op_id in seen] == [False, False, False, False, True, True]
        else:
            assert [op_id.rpartition(":")[2] for op_id in seen] == ["0", "0", "1", "1", "2", "2"]

    @requires(Capability.MODULES)
    def test_ids_restart_when_a_model_is_called_again(self) -> None:
        """A further call of an outermost module begins an iteration; a call of another does not."""
        seen: list[str] = []
        one, two = self.fw.model(W), self.fw.model(W)

        def build(x: Any) -> Any:
            return self.fw.relu(two(self.fw.relu(one(x))))

        tool = self.probe("relu", before=lambda c: seen.append(c.get_op_id()))
        program = self.fw.program(build, X)
        with self.apply(tool), cache_disabled():
            for _ in range(2):
                program.run()
        assert len(set(seen)) == 2
        assert seen[2:] == seen[:2]

    @requires(Capability.USER_OPS)
    def test_ops_of_the_user(self) -> None:
        """An operator that the user has defined is seen and can be instrumented."""
        seen: list[Any] = []
        kind, function = self.fw.user_op()
        program = self.fw.program(function, X)
        self.run(program, self.noting_inputs([kind], seen))
        assert seen == [[X]]

    @requires(Capability.USER_OPS)
    def test_ops_of_the_user_inside_the_scope(self) -> None:
        """An operator that the user defines inside of the scope is seen likewise."""
        seen: list[Any] = []
        types: list[str] = []
        with self.apply(self.noting_inputs(types, seen)):
            kind, function = self.fw.user_op()
            types.append(kind)
            self.fw.program(function, X).run()
        assert seen == [[X]]

    def noting_inputs(self, types: list[str], seen: list[Any]) -> Probe:
        """A tool that notes the inputs of each execution of an operator of some types."""

        def note(*tensors: Any) -> None:
            seen.append([self.fw.to_list(t) for t in tensors])

        def analyse(context: OpContext) -> None:
            if self.fw.type_of(context.get_op()) in types:
                context.insert_before_op(note)

        return self.probe(before=analyse)
