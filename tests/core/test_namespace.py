"""Namespaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amanda.interface.namespace import Namespace

TAGS = st.lists(st.text("abc.12", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("pytorch", True),
        ("pytorch/2.13", True),
        ("pytorch/2.13/eager", True),
        ("pytorch/*/eager", True),
        ("", True),
        ("torch", False),
        ("py", False),
        ("pytorch/2", False),
        ("eager", False),
        ("pytorch/2.13/eager/more", False),
    ],
)
def test_matches(pattern: str, expected: bool) -> None:
    """A pattern matches as a prefix, tag by tag, and a star stands for one tag."""
    assert Namespace("pytorch/2.13/eager").matches(pattern) is expected


@given(TAGS, st.integers(0, 4))
def test_every_prefix_matches(tags: list[str], length: int) -> None:
    """Every prefix of a namespace matches it, with any tag starred."""
    namespace = Namespace("/".join(tags))
    assert namespace.tags == tuple(tags)
    assert namespace.matches("/".join(tags[:length]))
    assert namespace.matches("/".join("*" for _ in tags[:length]))


def test_is_a_string() -> None:
    """A namespace can be compared and printed as a string."""
    assert Namespace("a/b") == "a/b"
    assert f"{Namespace('a/b')}" == "a/b"
