"""Graphs that run vanilla under a scope, because no instrumented copy of them can be made.

The program must not fail where it would run without Amanda: it runs vanilla, and is told so by a
warning and a count (contract rule 13). What a tool does wrong, or asks for in vain, is an error::

    with falling_back(dispatcher, building, name) as made:
        ...                             # make the copy
    if not made.is_made: run the vanilla graph
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from amanda.driver import Dispatcher
from amanda.errors import AmandaError, CoverageWarning
from amanda_tensorflow.graphs.building import Building

NOT_COPIED = "graphs that cannot be copied"
_WITH_PYTHON = "around Python nodes, for which TensorFlow may round differently"


class NotInstrumentableError(Exception):
    """A graph uses something that no instrumented copy can have; the message says what."""


@attrs.define
class Attempt:
    """What has become of an attempt to make a copy."""

    is_made: bool = True


@contextmanager
def falling_back(dispatcher: Dispatcher, building: Building, name: str) -> Iterator[Attempt]:
    """Within it, a copy is made; if that fails for no fault of a tool, a warning says so. Of one
    with nodes that call Python the last line says that its last bits may differ.

    Args:
        building: the copy. Where an operator of it was replaced, the failure may be the
            replacement's fault, and is raised.
        name: of the graph, for the warning.
    """
    attempt = Attempt()
    try:
        yield attempt
        if building.has_python:
            dispatcher.note_compiled(name, _WITH_PYTHON)
    except Exception as error:
        interrupt = _interrupt_behind(error)
        if interrupt is not None:
            raise interrupt from None
        is_of_tool = isinstance(error, AmandaError) or hasattr(error, "__notes__")
        if not isinstance(error, NotInstrumentableError) and (is_of_tool or building.is_replaced):
            raise
        attempt.is_made = False
        dispatcher.not_seen(NOT_COPIED)
        text = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"{name} runs vanilla: no instrumented copy of it can be made ({text})",
            CoverageWarning,
            stacklevel=4,
        )


def _interrupt_behind(error: BaseException) -> BaseException | None:
    """The interrupt that an error has taken the place of, if there was one.

    Where one comes as the body of a with-statement ends, the blocks of TensorFlow around it find
    that the inner one was not left, and raise an AssertionError (2.21).
    """
    behind = error.__context__
    while behind is not None:
        if not isinstance(behind, Exception):
            return behind
        behind = behind.__context__
    return None
