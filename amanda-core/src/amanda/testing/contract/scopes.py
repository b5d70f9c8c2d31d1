"""Contract rule 10: scopes, except for threads and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.testing.contract.base import ContractTests, W, X, inserting, times
from amanda.testing.framework import requires
from amanda.tool import disabled, enabled, new_iteration


class ScopeTests(ContractTests):
    """apply, enabled, disabled and their exits."""

    def test_nested_scopes(self) -> None:
        """The tools of an outer and of an inner scope both act."""
        with self.apply(self.counting("outer")):
            self.run(self.program, self.counting("inner"))
            assert self.noted == ["outer", "inner"]
            self.program.run()
        assert self.noted == ["outer", "inner", "outer"]

    def test_inner_scope_of_an_analysed_op(self) -> None:
        """An op that the outer scope knows already is analysed by the inner one."""
        with self.apply(self.counting("outer")):
            self.program.run()
            new_iteration()
            self.run(self.program, self.counting("inner"))
        assert self.noted == ["outer", "outer", "inner"]

    def test_disabled_and_enabled(self) -> None:
        """disabled() and enabled() switch instrumentation, nested."""
        with self.apply(self.counting()):
            with disabled():
                self.program.run()
                with enabled():
                    self.program.run()
                self.program.run()
            assert self.noted == [1]
            self.program.run()
        assert self.noted == [1, 1]

    @requires(Capability.BACKWARD)
    def test_backward_after_the_scope(self) -> None:
        """In a backward after the exit no routine runs, and only straight-through stays."""
        self.needs_separate_backward()

        def note(*gradients: Any) -> None:
            self.noted.append("called")

        def whole(context: OpContext) -> None:
            context.insert_before_op(lambda t: self.fw.scale(t, 2.0), inputs=[0])
            inserting(before_backward_op=note, after_backward_op=note)(context)
            context.replace_backward_op(note)

        single = inserting(before_backward_op=note)
        with self.apply(self.probe("mul", before=whole, before_backward=single)):
            backward = self.program.forward()
        assert backward() == [W, times(X, 2.0)]
        assert self.noted == []

    def test_apply_as_a_decorator(self) -> None:
        """Apply decorates a function."""

        @self.apply(self.counting())
        def work() -> Any:
            return self.program.run()

        work()
        work()
        self.program.run()
        assert self.noted == [1, 1]

    def test_suspended_generator(self) -> None:
        """A generator that is suspended inside a scope does not instrument its caller."""
        mark = ["generator"]

        tool = self.probe("mul", before=inserting(before_op=lambda *t: self.noted.append(mark[0])))

        def generator() -> Iterator[Any]:
            with self.apply(tool):
                yield self.program.run()
                yield self.program.run()

        running = generator()
        next(running)
        mark[0] = "caller"
        self.program.run()
        mark[0] = "generator"
        next(running)
        assert list(running) == []
        assert self.noted == ["generator", "generator"]

    def test_switch_of_a_suspended_generator(self) -> None:
        """A generator that is suspended within disabled() does not switch its caller off."""

        def generator() -> Iterator[Any]:
            with disabled():
                yield self.program.run()
                yield self.program.run()

        with self.apply(self.counting()):
            running = generator()
            next(running)
            self.program.run()
            next(running)
            assert list(running) == []
            self.program.run()
        assert self.noted == [1, 1]

    def test_tasks_have_their_own_scopes_and_switches(self) -> None:
        """Of tasks that overlap, each has the scopes and switches of its own blocks."""
        running = [""]

        def work(who: str) -> None:
            running[0] = who
            self.program.run()

        tool = self.probe(
            "mul", before=inserting(before_op=lambda *t: self.noted.append(running[0]))
        )

        async def covered() -> None:
            with self.apply(tool):
                for _ in range(2):
                    work("covered")
                    await asyncio.sleep(0)

        async def switched() -> None:
            with self.apply(tool), disabled():
                for _ in range(3):
                    work("switched")
                    await asyncio.sleep(0)

        async def free() -> None:
            for _ in range(4):
                work("free")
                await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(covered(), switched(), free())

        asyncio.run(main())
        assert self.noted == ["covered", "covered"]

    def test_contextmanager_around_apply(self) -> None:
        """A generator that contextlib drives instruments the body of its with-block."""

        @contextmanager
        def counted() -> Iterator[None]:
            with self.apply(self.counting()):
                yield

        with counted():
            self.program.run()
        self.program.run()
        assert self.noted == [1]

    def test_tools_run_vanilla(self) -> None:
        """Framework calls made by analyses and routines are not instrumented."""

        def routine(tensor: Any) -> Any:
            return self.fw.mul(self.fw.mul(tensor, tensor), tensor)

        def analyse(context: OpContext) -> None:
            self.noted.append(context.get_op_id())
            self.fw.to_list(self.fw.relu(self.fw.tensor(X)))
            context.insert_after_op(routine)

        self.run(self.program, self.probe(before=analyse), times=2)
        assert not [op_id for op_id in self.noted if self.fw.types["relu"] in op_id]
        assert len([op_id for op_id in self.noted if self.fw.types["mul"] in op_id]) <= 2

    def test_statistics(self) -> None:
        """apply.statistics has the numbers of ops seen and instrumented."""
        with self.apply(self.counting()) as scope:
            self.positive_product().run()
        assert scope.statistics.ops_seen >= 2
        assert scope.statistics.ops_instrumented == 1

    @requires(Capability.BACKWARD)
    def test_statistics_of_backward_ops(self) -> None:
        """apply.statistics has the number of backward ops seen."""
        with self.apply(self.probe(before_backward=lambda c: self.noted.append("op"))) as scope:
            self.program.train()
        assert scope.statistics.backward_ops_seen == len(self.noted) > 0
