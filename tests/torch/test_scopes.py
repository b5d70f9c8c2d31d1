"""Where a scope reaches, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import CoverageWarning
from tests import models
from tests.torch.support import Counter, ForwardCounter, applied

X = torch.linspace(-1, 1, 3)


# -- generators and coroutines --------------------------------------------


def _generator(tool: amanda.Tool) -> Iterator[torch.Tensor]:
    with applied(tool):
        yield torch.relu(X)
        yield torch.sin(X)


def test_suspended_generator_and_modules() -> None:
    """Modules and gradients of the caller are vanilla too while a generator is suspended."""
    counter = Counter()
    generator = _generator(counter)
    next(generator)
    nn.Linear(3, 2)(X).sum().backward()
    next(generator)
    generator.close()
    assert counter.ids == ["/relu:0", "/sin:0"]
    assert counter.backward_ids == []


def test_a_generator_of_the_model_inside_a_scope() -> None:
    """Generators that the user runs inside a scope are instrumented wherever they suspend."""
    counter = ForwardCounter()

    def batches() -> Iterator[torch.Tensor]:
        yield torch.relu(X)
        yield torch.sin(X)

    with applied(counter):
        for batch in batches():
            torch.cos(batch)
    assert counter.ids == ["/relu:0", "/cos:0", "/sin:0", "/cos:1"]


# -- exceptions -----------------------------------------------------------


def test_the_scope_goes_on_after_an_exception() -> None:
    """An exception that the user catches inside a scope leaves its ids in order."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.relu(x)
            raise ValueError("on purpose")

    model, counter = nn.Sequential(nn.Linear(3, 3), Failing()), ForwardCounter()
    with applied(counter):
        for _ in range(2):
            counter.ids.clear()
            with pytest.raises(ValueError, match="on purpose"):
                model(X)
            torch.sin(X)
            assert counter.ids == ["Sequential.0/linear:0", "Sequential.1/relu:0", "/sin:0"]


# -- life cycle -----------------------------------------------------------


def test_generate_with_a_key_value_cache() -> None:
    """Generating token by token meets a bounded number of operators."""
    model, _ = models.build("gpt2", training=False)
    counter = ForwardCounter()
    tokens = torch.zeros(1, 3, dtype=torch.long)
    met = []
    with applied(counter), torch.no_grad():
        for length in (6, 12, 18):
            model.generate(tokens, max_new_tokens=length, min_new_tokens=length, do_sample=False)
            met.append(len(set(counter.ids)))
    vanilla = model.generate(tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert vanilla.shape == (1, 9)
    assert met[2] - met[1] <= 0.02 * met[0]
    assert counter.ops["addmm"] == 4 * 4 * (6 + 12 + 18)


def _backward_watcher(seen: list[str | None]) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_backward_op_id()), backward=True)
    return tool


def test_a_nested_scope_sees_backward_operators_that_were_looked_at_before() -> None:
    """An inner scope's tools see the backward operators that the outer one needs nothing of."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    outer: list[str | None] = []
    inner: list[str | None] = []
    with applied(_backward_watcher(outer)):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        with applied(_backward_watcher(inner)):
            model(torch.ones(1, 2)).sum().backward()
    assert len(outer) == len(set(outer)) == 6
    assert sorted(map(str, inner)) == sorted(map(str, outer))


def test_backward_operators_that_were_looked_at_before_are_analysed_again() -> None:
    """``Tool.reanalyse()`` reaches backward operators that no tool needed anything of."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    seen: list[str | None] = []
    tool = _backward_watcher(seen)
    with applied(tool):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        first = list(seen)
        tool.reanalyse()
        model(torch.ones(1, 2)).sum().backward()
    assert seen == [*first, *first]


def test_reanalysis_reaches_the_rest_of_a_running_module() -> None:
    """``reanalyse()`` in a module call holds for the operators that are still to run in it."""
    analysed: list[str] = []
    tool = amanda.Tool()

    class Three(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().tanh().relu()

    def analyse(context: amanda.OpContext) -> None:
        analysed.append(context.get_op().__name__)
        if analysed.count("tanh") == 1 and analysed[-1] == "tanh":
            context.insert_after_op(lambda _: executed.append(None) or again())

    def again() -> None:
        if len(executed) == 2:
            analysed.clear()
            tool.reanalyse()

    executed: list[None] = []
    tool.add_inst_for_op(analyse)
    model, x = Three(), torch.ones(2)
    with applied(tool):
        model(x)
        model(x)
    assert analysed == ["relu"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not ):DeprecationWarning")
@pytest.mark.parametrize("block", [contextlib.nullcontext, amanda.disabled], ids=["on", "off"])
def test_calls_keep_their_arguments(block: Any) -> None:
    """Modules and scripted functions get positional and keyword arguments, watched or not."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return x * scale

    @torch.jit.script
    def power(x: torch.Tensor, exponent: int = 1) -> torch.Tensor:
        return x**exponent

    x = torch.full((2,), 3.0)
    with warnings.catch_warnings(), applied(Counter()), block():
        warnings.simplefilter("ignore", CoverageWarning)  # of the scripted function
        assert Scaled()(x, scale=2.0).tolist() == [6, 6]
        assert power(x, exponent=2).tolist() == [9, 9]
        assert power(x, 3).tolist() == [27, 27]
