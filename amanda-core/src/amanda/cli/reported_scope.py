"""Tools that act on a part of a process, such as the cell of a notebook or a training loop.

::

    scope = ReportedScope(given)    # the options of ``amanda run``, parsed
    scope.begin()
    scope.end()                     # prints and writes the results
"""

from __future__ import annotations

import argparse
import sys
import time

from amanda.cli import run
from amanda.cli.messages import print_message
from amanda.cli.results import Rank


class ReportedScope:
    """A scope whose results are printed and written when it ends, as ``amanda run`` does.

    Attributes:
        report: the tools, and where their results are written.

    Raises:
        UsageError: an option is wrong.
        AmandaError: a tool's package is broken.
    """

    def __init__(self, given: argparse.Namespace, rank: Rank) -> None:
        self.report = run.create_report(given, rank)
        self.report.out, self.report.complain = sys.stdout, print_message
        self._scope = self.report.scope(given.driver)
        self._started = 0.0

    def begin(self) -> None:
        """Apply the tools.

        Raises:
            AmandaError: they cannot be applied.
        """
        self._scope.__enter__()
        self._started = time.perf_counter()

    def end(self) -> None:
        """End the scope, and deliver the results."""
        seconds = time.perf_counter() - self._started
        try:
            self._scope.__exit__(None, None, None)
        finally:
            self.report.deliver(self._scope.statistics, seconds)
