"""What the tools import and print leaves the program's random generators alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import run_python

PROGRAM = """
import random, numpy
random.seed(0), numpy.random.seed(0)
import torch
torch.ones(1) * 2
print(random.random(), numpy.random.rand())
"""


@pytest.mark.parametrize("tools", ["count,trace,flops,profile,nan,stats"])
def test_a_program_draws_the_numbers_that_it_draws_alone(tools: str, tmp_path: Path) -> None:
    """Under ``amanda run`` a program that seeds its generators draws the numbers that it draws by
    itself."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    run = ["-m", "amanda", "run", "-t", tools, "-o", str(tmp_path / "out"), "--"]
    alone, under = (run_python(*words, str(path), check=True) for words in ([], run))
    assert under.stdout.startswith(alone.stdout)
