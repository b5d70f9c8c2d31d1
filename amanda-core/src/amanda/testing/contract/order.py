"""Contract rule 9: the order of tools."""

from __future__ import annotations

import pytest

from amanda.interface.context import OpContext
from amanda.testing.contract.base import ContractTests, W, X, inserting, product, times
from amanda.testing.framework import Probe
from amanda.tool import new_iteration


class OrderTests(ContractTests):
    """Dependencies first, then the order of apply."""

    def tracer(self, name: str) -> Probe:
        """A tool that notes when its analysis and its routine run."""

        def analyse(context: OpContext) -> None:
            self.noted.append(f"analysis {name}")
            context.insert_before_op(lambda *t: self.noted.append(f"routine {name}"))

        return self.probe("mul", before=analyse)

    def test_order_of_apply(self) -> None:
        """Unrelated tools act in the order of apply."""
        self.run(self.program, *(self.tracer(name) for name in "abc"))
        assert self.noted == [
            f"{kind} {name}" for kind in ("analysis", "routine") for name in "abc"
        ]

    def test_order_across_points(self) -> None:
        """A dependency's routine runs first also where a later analysis has recorded it."""
        first = self.probe("mul", after=inserting(after_op=lambda *t: self.noted.append("first")))
        second = self.probe(
            "mul", before=inserting(after_op=lambda *t: self.noted.append("second"))
        )
        second.depends_on(first)
        self.run(self.program, second, times=2)
        assert self.noted == ["first", "second"] * 2

    @pytest.mark.parametrize("point", ["before", "after"])
    def test_order_of_routines_with_and_without_tensors(self, point: str) -> None:
        """The order of apply holds also between routines that take tensors and that take none."""

        def tool(name: str, takes_none: bool) -> Probe:
            routine = {f"{point}_op": lambda *t: self.noted.append(name)}
            return self.probe("mul", before=inserting([] if takes_none else None, **routine))

        kinds = {"a": True, "b": True, "c": False, "d": True, "e": False, "f": False, "g": True}
        self.run(self.program, *(tool(*kind) for kind in kinds.items()), times=3)
        assert "".join(self.noted) == "abcdefg" * 3

    def test_order_after_reanalyse(self) -> None:
        """A dependency's routine runs first also after it was analysed again."""
        first, second = self.tracer("first"), self.tracer("second")
        second.depends_on(first)
        with self.apply(second):
            self.program.run()
            first.reanalyse()
            new_iteration()
            self.noted.clear()
            self.program.run()
        assert self.noted == ["analysis first", "routine first", "routine second"]

    def test_routines_see_earlier_results(self) -> None:
        """A routine sees the results of earlier routines of the same point."""
        double, square = (
            self.probe("mul", before=inserting(after_op=lambda t: self.fw.scale(t, 2.0))),
            self.probe("mul", before=inserting(after_op=lambda t: self.fw.mul(t, t))),
        )
        result = self.run(self.program, double, square)
        doubled = times(product(X, W), 2.0)
        assert result == [product(doubled, doubled)]
