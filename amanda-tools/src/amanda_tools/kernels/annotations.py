"""Profiler annotations around executions of an operator.

``annotate(context, lambda: record_function(name))`` in an analysis before the operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from amanda import OpContext
from amanda_tools._operators.routines import insert_after, insert_before


def annotate(context: OpContext, make: Callable[[], AbstractContextManager[Any] | None]) -> None:
    """Enter a context manager before each execution of an operator, and leave it after.

    Args:
        context: of an analysis before the operator.
        make: returns the context manager of an execution; None for no annotation.
    """
    # Per thread, and a stack: recomputation in a checkpoint runs an operator within itself.
    local = threading.local()

    def begin() -> None:
        mark = make()
        vars(local).setdefault("marks", []).append(mark)
        if mark is not None:
            mark.__enter__()

    def end() -> None:
        marks = vars(local).get("marks")
        mark = marks.pop() if marks else None
        if mark is not None:
            mark.__exit__(None, None, None)

    insert_before(context, begin)
    insert_after(context, end)
