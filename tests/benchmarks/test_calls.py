"""Calls of Amanda's functions are counted."""

from __future__ import annotations

import os.path

import pytest

from amanda.text import printable
from tests.benchmarks.calls import Counter


def test_only_calls_of_amanda_s_functions_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Functions of Python's library and of tests are left out; the report has the others."""
    counter = Counter()
    counter.install()
    printable("a")
    printable(os.path.join("b", "c"))
    counter.report(5)
    assert counter.calls == {("amanda/text.py", "printable"): 2}
    printed = capsys.readouterr().out
    assert printed.startswith("2 calls of Amanda's functions, 1 functions\n")
    assert "amanda/text.py: printable" in printed
