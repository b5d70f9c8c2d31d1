"""A sample of tests/programs, whose packages are here anyway; ``nox -s programs`` runs all."""

from __future__ import annotations

import pytest
import tensorflow as tf

pytest.importorskip("sklearn")

from tests.programs.comparison import compare, run
from tests.programs.tensorflow_science import data_and_loop


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_published_programs_are_bit_identical() -> None:
    """Programs give every bit of a vanilla run under ``count,flops``, under routines at all points
    that return what they get, and after the scopes."""
    result = compare(data_and_loop, fused=False)
    assert result.differing == {}
    assert result.forward


def test_strings_are_compared_by_what_they_say() -> None:
    """Two tensors of equal strings have equal bits, wherever their strings are in memory."""

    def said(text: str) -> tuple[object, ...]:
        return run(lambda: tf.strings.join([[text, "b"], ["c", "d"]]))["result"]

    assert said("a") == said("a")
    assert said("a") != said("e")
