"""The errors and warnings that Amanda raises itself.

An exception raised inside a tool reaches the user unchanged; only mistakes in
the use of Amanda end up as one of these.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class AmandaError(RuntimeError):
    """Base class of every error raised by Amanda."""


class DependencyCycleError(AmandaError):
    """Tools depend on each other in a circle."""


class PassedPointError(AmandaError):
    """An analysis records an action for a point that the operator has passed."""


class SelectionError(AmandaError, IndexError):
    """A selection names a tensor that the operator does not have."""


class RoutineResultError(AmandaError):
    """An instrumentation routine returned something that cannot be used."""


class ReplacementConflictError(AmandaError):
    """One operator is replaced twice."""


class ContextExpiredError(AmandaError):
    """The tensors of a context are read after its analysis has returned."""


class TensorReleased(AmandaError):
    """A tensor of the forward operator is gone when a backward analysis reads it."""


class CapabilityError(AmandaError):
    """A driver cannot do what a tool asks for."""


class NoDriverError(AmandaError):
    """No driver can instrument the frameworks of this process."""


class UnknownNameError(AmandaError, LookupError):
    """A tool, driver or option name that nobody provides."""


class ToolTypeError(AmandaError):
    """A tool raised a TypeError where Python would have taken it for an unsupported operand.

    The TypeError itself is its cause.
    """


class PluginError(AmandaError):
    """A plugin cannot be loaded (raised only with ``AMANDA_PLUGINS=strict``)."""


class AmandaWarning(UserWarning):
    """Base class of every warning given by Amanda."""


class PluginWarning(AmandaWarning):
    """A plugin or driver is left out, with the reason."""


class CoverageWarning(AmandaWarning):
    """Something runs under a scope that Amanda cannot see or must run differently."""


class InPlaceWarning(AmandaWarning):
    """A routine changed a tensor of the model in place."""


def close_matches(name: str, known: Sequence[str]) -> str:
    """The question at the end of a message about an unknown name; "" if nothing is like it."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def described(value: object) -> str:
    """What a value is, for a message."""
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(type(item).__name__ for item in value[:4])
        more = ", ..." if len(value) > 4 else ""
        return f"a {type(value).__name__} of {len(value)} ({kinds}{more})"
    return f"{type(value).__name__} {value!r:.60}"
