"""The order of tools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import amanda
from amanda.errors import DependencyCycleError
from amanda.scope.apply import ordered

# Edges from later to earlier tools only: no circles.
GRAPHS = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] > e[1])
        ),
        st.permutations(range(n)),
    )
)


@given(GRAPHS)
def test_dependencies_come_first(graph: tuple[int, set[tuple[int, int]], list[int]]) -> None:
    """Each tool comes once, after all that it depends on."""
    count, edges, order = graph
    tools = [amanda.Tool() for _ in range(count)]
    for later, earlier in sorted(edges):
        tools[later].depends_on(tools[earlier])
    result = ordered(tools[i] for i in order)
    assert len(result) == count
    assert set(result) == set(tools)
    position = {tool: i for i, tool in enumerate(result)}
    assert all(position[tools[a]] > position[tools[b]] for a, b in edges)


@given(st.permutations(range(5)))
def test_unrelated_tools_keep_their_order(order: list[int]) -> None:
    """Among unrelated tools the order of apply holds."""
    tools = [amanda.Tool() for _ in range(5)]
    given_order = [tools[i] for i in order]
    assert list(ordered(given_order)) == given_order


@pytest.mark.parametrize("length", [1, 2, 4])
def test_circle(length: int) -> None:
    """Tools that depend on each other in a circle are an error that names the circle."""
    tools = [type(f"Tool{i}", (amanda.Tool,), {})() for i in range(length)]
    for i, tool in enumerate(tools):
        tool.depends_on(tools[(i + 1) % length])
    circle = " -> ".join(f"Tool{i % length}" for i in range(length + 1))
    with pytest.raises(DependencyCycleError, match=circle):
        ordered(tools)


def test_a_dependency_named_twice() -> None:
    """Naming a dependency again changes nothing."""
    one, two = amanda.Tool(), amanda.Tool()
    two.depends_on(one)
    two.depends_on(one, one)
    assert ordered([two]) == (one, two)
