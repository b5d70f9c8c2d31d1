"""What the tools import and print leaves the program's random generators alone."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pytest

from amanda_tools._output.private_imports import with_private_import
from amanda_tools.count import CountTool
from tests.running import run_python


def test_printing_tables_draws_no_random_number() -> None:
    """A summary changes neither the state of ``random`` nor what a later import of rich draws."""
    programs = {n: m for n, m in sys.modules.items() if f"{n}.".startswith("rich.")}
    for name in programs:
        del sys.modules[name]
    try:
        random.seed(0)
        state = random.getstate()
        for _ in range(2):
            printed = io.StringIO()
            CountTool().print_summary(printed)
            assert printed.getvalue()
            assert random.getstate() == state
            assert "rich" not in sys.modules
    finally:
        sys.modules.update(programs)


def test_a_package_of_the_program_is_used_as_it_is() -> None:
    """Where the program has imported the package, that import is used and stays."""
    import rich

    def run() -> None:
        import rich.console

        assert sys.modules["rich"] is rich

    with_private_import("rich", run)
    assert sys.modules["rich"] is rich
    assert "rich.console" in sys.modules


PROGRAM = """
import random, numpy
random.seed(0), numpy.random.seed(0)
import torch
torch.ones(1) * 2
import rich.console, rich.table
print(random.random(), numpy.random.rand())
"""


@pytest.mark.parametrize("tools", ["count,trace,flops,profile,nan,stats"])
def test_a_program_draws_the_numbers_that_it_draws_alone(tools: str, tmp_path: Path) -> None:
    """Under ``amanda run`` a program that seeds its generators and imports rich later draws the
    numbers that it draws by itself."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    run = ["-m", "amanda", "run", "-t", tools, "-o", str(tmp_path / "out"), "--"]
    alone, under = (run_python(*words, str(path), check=True) for words in ([], run))
    assert under.stdout.startswith(alone.stdout)
