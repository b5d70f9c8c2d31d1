"""Contract rules 4, 13 and 15: inputs and outputs, selections, contexts, ids, users' operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from typing import Any

import pytest

from amanda.errors import ContextExpiredError, SelectionError
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ONES, ContractTests, W, X
from amanda.testing.framework import Probe, requires
from amanda.tool import cache_disabled, new_iteration
from amanda.tools.mapping import MappingTool


class ContextTests(ContractTests):
    """The content of a context, and selections from it."""

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
        for program in (positional, keywords):
            assert self.received(program, "linear", "insert_before_op") == [values]

    def test_absent_optional_input(self) -> None:
        """An absent optional tensor is None, so that positions do not shift."""
        if len(self.linear_inputs()) == 2:
            pytest.skip("the framework's linear operator has no optional input")
        program = self.fw.program(self.fw.linear, X, W)
        assert self.received(program, "linear", "insert_before_op") == [[X, W, None]]
        assert self.answers(program, "linear", before=lambda c: c.get_value(2)) == [None]

    def test_lists_are_expanded(self) -> None:
        """A list of tensors is expanded in place."""
        program = self.fw.program(lambda *t: self.fw.cat(t), X, W, X)
        inputs = self.fw.inputs("cat", *(self.fw.tensor(values) for values in (X, W, X)))
        assert self.received(program, "cat", "insert_before_op") == [self.lists(inputs)]

    def test_all_outputs(self) -> None:
        """An op with several outputs gives them all, in order."""
        program = self.fw.program(self.fw.split, X)
        assert self.received(program, "split", "insert_after_op") == [[[X[0]], [X[1]]]]

    def test_attributes(self) -> None:
        """Arguments that are not tensors are attributes, by name."""
        program = self.fw.program(self.fw.split, X)
        (attributes,) = self.answers(program, "split", before=lambda c: c.get_attrs())
        assert self.fw.attributes.items() <= attributes.items()

    def test_input_names(self) -> None:
        """get_input_names gives the declared name of each input."""
        program = self.fw.program(self.fw.linear, X, W)
        names = self.answers(program, "linear", before=lambda c: c.get_input_names())
        assert names == [list(self.fw.names["linear"])]

    def test_select_inputs(self) -> None:
        """inputs= selects positions, in the order given, and declared names."""
        name = self.fw.names["mul"][1]
        for inputs, expected in ([1], [W]), (0, [X]), ([1, 0], [W, X]), ([name], [W]):
            seen = self.received(self.program, "mul", "insert_before_op", inputs=inputs)
            assert seen == [expected]

    def test_select_outputs_by_index(self) -> None:
        """outputs= selects positions."""
        program = self.fw.program(self.fw.split, X)
        assert self.received(program, "split", "insert_after_op", outputs=[1]) == [[[X[1]]]]

    def test_select_inputs_by_role(self) -> None:
        """inputs= selects by a role that a mapping rule has set for the namespace: the driver's
        framework, version and mode."""

        def rule(context: OpContext) -> None:
            context["weight_index"] = 1

        tags = self.answers(self.program, "mul", before=lambda c: c.namespace)[0].tags
        assert len(tags) >= 2
        assert tags[0] == (self.fw.namespace or self.driver_cls.framework.rpartition(".")[2])
        mapping = MappingTool(rules=[[tags[0], rule]])
        note = self.noting()
        tool = self.probe("mul", before=lambda c: c.insert_before_op(note, inputs=["weight"]))
        tool.depends_on(mapping)
        self.run(self.program, tool)
        assert self.noted == [[W]]

    @requires(Capability.BACKWARD)
    def test_select_gradients_of_outputs(self) -> None:
        """grad_outputs= selects gradients that a backward op consumes."""
        seen = self.received(self.program, "mul", "insert_before_backward_op", grad_outputs=[0])
        assert seen == [[ONES]]

    @requires(Capability.BACKWARD)
    def test_select_gradients_of_inputs(self) -> None:
        """grad_inputs= selects gradients that a backward op produces, by position or by the name of
        the forward input."""
        for item in (1, self.fw.names["mul"][1]):
            seen = self.received(
                self.program, "mul", "insert_after_backward_op", grad_inputs=[item]
            )
            assert seen == [[X]]

    @requires(Capability.BACKWARD)
    def test_select_gradients_of_a_backward_op_by_name(self) -> None:
        """In a backward analysis grad_inputs= selects by the name of the forward input, at the
        backward op that produces its gradient; at the latest from its second run on."""
        name = self.fw.names["mul"][1]

        def analyse(context: OpContext) -> None:
            # An op that produces another gradient has no such name.
            with suppress(SelectionError):
                context.insert_after_backward_op(self.noting(), grad_inputs=[name])

        with self.apply(self.probe("mul", before_backward=analyse)), cache_disabled():
            self.program.train()
            self.noted.clear()
            self.program.train()
        assert self.noted == [[X]]

    @pytest.mark.parametrize(
        ("method", "selection", "pattern"),
        [
            ("insert_before_op", {"inputs": [2]}, r"inputs=\[2\].*mul.*2 inputs.*{name}"),
            # The outputs are not yet known.
            ("insert_after_op", {"outputs": [1]}, r"outputs=\[1\].*mul.*1 outputs"),
            ("insert_before_op", {"inputs": ["nose"]}, r"'nose'.*mul.*{name}"),
        ],
        ids=["input", "output", "name"],
    )
    def test_wrong_selection(self, method: str, selection: Any, pattern: str) -> None:
        """An index out of range and a name that the op does not have are errors that name the op id
        and what it has."""
        pattern = "(?i)" + pattern.format(name=self.fw.names["mul"][1])
        with pytest.raises(SelectionError, match=pattern):
            self.received(self.program, "mul", method, **selection)

    # -- contract rule 15 -----------------------------------------------------

    def test_id_has_a_type(self) -> None:
        """An op id contains the type of its op."""

        def build(x: Any, w: Any) -> Any:
            halves = self.fw.split(self.fw.cat([self.fw.linear(x, w), self.fw.relu(w)]))
            return self.fw.add(*halves)

        for op in ("split", "cat", "linear", "relu", "add"):
            ids = self.answers(self.fw.program(build, X, W), op, before=lambda c: c.get_op_id())
            assert ids
            kind = self.fw.types[op].lower()
            assert [op_id for op_id in ids if kind not in op_id.lower()] == []

    @requires(Capability.IN_PLACE)
    def test_id_of_an_in_place_op_has_its_type(self) -> None:
        """The id of an in-place op contains its own type, not that of the op it adds to."""
        program = self.added_in_place()
        (op_id,) = self.answers(program, "add_inplace", before=lambda c: c.get_op_id())
        assert self.fw.types["add_inplace"].lower() in op_id.lower()
        assert op_id not in self.answers(program, "mul", before=lambda c: c.get_op_id())

    def test_forward_context(self) -> None:
        """In a forward context everything that belongs to a backward op is None."""
        is_which = self.answers(
            self.program, "mul", before=lambda c: (c.is_forward(), c.is_backward())
        )
        assert is_which == [(True, False)]
        for name in ("backward_op", "backward_op_id", "grad_outputs", "grad_inputs"):
            assert self.answers(self.program, "mul", before=methodcaller(f"get_{name}")) == [None]

    def test_context_after_its_analysis(self) -> None:
        """After the analysis the tensors of a context are out of reach; the rest stays."""

        def keep(context: OpContext) -> OpContext:
            context["key"] = "value"
            return context

        (context,) = self.answers(self.program, "mul", before=keep)
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

    def test_runs_at_once(self) -> None:
        """A context says whether operators run when they are called: they do without
        STATIC_GRAPH."""
        said = self.answers(self.program, "mul", before=lambda c: c.runs_at_once)
        assert said == [Capability.STATIC_GRAPH not in self.driver_cls.capabilities]

    @requires(Capability.BACKWARD)
    def test_runs_at_once_in_backward(self) -> None:
        """The context of a backward operator says it as that of its forward operator does."""
        said = self.answers(self.program, "mul", before_backward=lambda c: c.runs_at_once)
        assert set(said) == {Capability.STATIC_GRAPH not in self.driver_cls.capabilities}

    def test_ids_are_equal_across_iterations(self) -> None:
        """The ids of two iterations are equal."""
        tool = self.probe(before=lambda c: c.get_op_id())
        program = self.positive_product()
        with self.apply(tool), cache_disabled():
            for _ in range(2):
                new_iteration()
                program.run()
        half = len(tool.seen) // 2
        assert tool.seen[:half] == tool.seen[half:]

    def test_ids_are_unique(self) -> None:
        """Two ops of one iteration have two ids."""
        program = self.fw.program(lambda x, w: self.fw.mul(self.fw.mul(x, w), w), X, W)
        assert len(set(self.answers(program, "mul", before=lambda c: c.get_op_id()))) == 2

    @requires(Capability.BACKWARD)
    def test_ids_restart_after_backward(self) -> None:
        """The end of a backward is the end of an iteration."""
        tool = self.probe("mul", before=lambda c: c.get_op_id())
        self.train(self.program, tool, times=3)
        assert len(tool.seen) == 1

    @requires(Capability.MODULES)
    def test_ids_carry_module_paths(self) -> None:
        """An op id begins with the module that runs the op, and get_module gives its path."""
        program = self.fw.program(self.fw.model(W), X)
        seen = self.answers(
            program, "linear", times=2, before=lambda c: (c.get_op_id(), c.get_module())
        )
        kind, separator = self.fw.types["linear"], self.fw.separator
        assert seen == [
            (f"Model{separator}{name}/{kind}:0", self.fw.module_path(name))
            for name in ("first", "second")
        ]

    @requires(Capability.MODULES)
    def test_names_of_parameters(self) -> None:
        """The result of an operator has no parameter name, and two parameters have different names,
        or none where the driver does not know them."""
        program = self.fw.program(self.fw.model(W), X)
        names = [
            self.answers(program, "linear", before=methodcaller("get_parameter_name", i))
            for i in range(2)
        ]
        assert names[0][1] is None
        assert names[1] == [None, None] or (None not in names[1] and len(set(names[1])) == 2)

    @requires(Capability.MODULES)
    def test_ids_of_several_models(self) -> None:
        """Further models of the same class have ids of their own."""
        tool = self.probe("linear", before=lambda c: c.get_op_id())
        programs = [self.fw.program(self.fw.model(W), X) for _ in range(3)]
        with self.apply(tool):
            for program in (*programs, *programs):
                program.run()
        assert len(tool.seen) == len(set(tool.seen)) == 6
        models = [op_id.partition(self.fw.separator)[0] for op_id in tool.seen[::2]]
        assert models == ["Model", "Model@1", "Model@2"]

    @requires(Capability.MODULES)
    def test_ids_of_a_module_called_several_times(self) -> None:
        """Further calls of a module in an iteration have ids of their own."""
        program = self.fw.program(self.fw.model(W, calls=3), X)
        seen = self.answers(program, "linear", times=2, before=lambda c: c.get_op_id())
        assert len(seen) == len(set(seen)) == 6
        if self.fw.numbers_calls:
            assert ["#1" in op_id for op_id in seen] == [False, False, True, True, False, False]
            assert ["#2" in op_id for op_id in seen] == [False, False, False, False, True, True]
        else:
            assert [op_id.rpartition(":")[2] for op_id in seen] == ["0", "0", "1", "1", "2", "2"]

    @requires(Capability.MODULES)
    def test_ids_restart_when_a_model_is_called_again(self) -> None:
        """A further call of an outermost module begins an iteration; a call of another does not."""
        one, two = self.fw.model(W), self.fw.model(W)

        def build(x: Any) -> Any:
            return self.fw.relu(two(self.fw.relu(one(x))))

        tool = self.probe("relu", before=lambda c: c.get_op_id())
        program = self.fw.program(build, X)
        with self.apply(tool), cache_disabled():
            for _ in range(2):
                program.run()
        assert len(set(tool.seen)) == 2
        assert tool.seen[2:] == tool.seen[:2]

    @requires(Capability.USER_OPS)
    def test_ops_of_the_user(self) -> None:
        """An operator that the user has defined is seen and can be instrumented."""
        kind, function = self.fw.user_op()
        program = self.fw.program(function, X)
        self.run(program, self.noting_inputs([kind]))
        assert self.noted == [[X]]

    @requires(Capability.USER_OPS)
    def test_ops_of_the_user_inside_the_scope(self) -> None:
        """An operator that the user defines inside of the scope is seen likewise."""
        types: list[str] = []
        with self.apply(self.noting_inputs(types)):
            kind, function = self.fw.user_op()
            types.append(kind)
            self.fw.program(function, X).run()
        assert self.noted == [[X]]

    def noting_inputs(self, types: list[str]) -> Probe:
        """A tool that notes the inputs of each execution of an operator of some types."""

        def analyse(context: OpContext) -> None:
            if self.fw.type_of(context.get_op()) in types:
                context.insert_before_op(self.noting())

        return self.probe(before=analyse)
