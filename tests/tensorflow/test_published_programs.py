"""A sample of tests/programs, whose packages are here anyway; ``nox -s programs`` runs all."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from tests.programs.comparison import compare
from tests.programs.tensorflow_science import data_and_loop


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_published_programs_are_bit_identical() -> None:
    """Programs give every bit of a vanilla run under ``count,flops``, under routines at all points
    that return what they get, and after the scopes."""
    result = compare(data_and_loop, fused=False)
    assert result.differing == {}
    assert result.forward
