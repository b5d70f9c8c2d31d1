"""A sample of tests/programs, whose packages are here anyway; ``nox -s programs`` runs all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("accelerate")

from tests.programs import torch_training, torch_vision
from tests.programs.comparison import compare

SAMPLE = (torch_training.accelerate_loop, torch_training.recurrent_network, torch_vision.timm_swin)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("program", SAMPLE, ids=lambda program: program.name)
def test_published_programs_are_bit_identical(program: Callable[[], Any]) -> None:
    """Programs of packages give every bit of a vanilla run under ``count,flops``, under routines at
    all points that return what they get, and after the scopes."""
    result = compare(program)
    assert result.differing == {}
    assert result.forward


def test_programs_that_differ_from_themselves_are_told() -> None:
    """A program whose vanilla runs differ is named as such, with the places that differ."""
    runs = itertools.count()
    result = compare(lambda: {"drawn": torch.rand(2), "run": next(runs)})
    assert result.differing["vanilla again"] == ["result.run"]
