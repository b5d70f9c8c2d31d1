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


def test_a_dependency_named_twice() -> None:
    """Naming a dependency again changes nothing."""
    one, two = amanda.Tool(), amanda.Tool()
    two.depends_on(one)
    two.depends_on(one, one)
    assert ordered([two]) == (one, two)


def test_a_circle_is_refused() -> None:
    """Tools that depend on each other in a circle are an error, which names it."""
    one, two = amanda.Tool(), amanda.Tool()
    one.depends_on(two)
    two.depends_on(one)
    with pytest.raises(DependencyCycleError, match="Tool -> Tool -> Tool"):
        amanda.apply(one)
