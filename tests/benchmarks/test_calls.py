"""Calls of Amanda's functions are reported."""

from __future__ import annotations

import os.path

import pytest

from amanda.python.text import printable
from tests.benchmarks.calls import ROOT, report
from tests.counting import called


def test_calls_are_counted_by_file_and_function(capsys: pytest.CaptureFixture[str]) -> None:
    """Functions of Python's library are left out."""
    with called((f"{ROOT}/amanda-",)) as codes:
        printable("a")
        printable(os.path.join("b", "c"))
    report(codes, 5)
    assert capsys.readouterr().out == (
        "2 calls of Amanda's functions, 1 functions\n"
        "       2  amanda/python/text.py\n\n"
        "       2  amanda/python/text.py: printable\n"
    )
