"""The errors and warnings of Amanda itself.

All errors derive from :class:`AmandaError`, all warnings from :class:`AmandaWarning`; the document
``docs/messages.md`` says what to do about them. An exception that a tool raises reaches the user
unchanged.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from amanda.python.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence


_LONGEST = 1200
"""Characters of the message of a FileError; a path has at most 4,096 and usually less than 200."""


class AmandaError(RuntimeError):
    """Base class of all errors of Amanda. Their messages hold nothing that a terminal obeys."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class DependencyCycleError(AmandaError):
    """Tools depend on each other in a cycle."""


class PassedPointError(AmandaError):
    """An analysis records an action for an instrumentation point that the operator has passed."""


class SelectionError(AmandaError, IndexError):
    """A selection has a position or name that no tensor of the operator has."""


class RoutineResultError(AmandaError):
    """The return value of an instrumentation routine is not allowed (contract rule 5)."""


class ReplacementConflictError(AmandaError):
    """Two actions replace one operator."""


class ContextExpiredError(AmandaError):
    """Tensors of a context are read, or actions recorded, outside of its analysis routine."""


class TensorReleased(AmandaError):
    """A backward analysis reads a tensor of the forward operator that has been released."""


class CapabilityError(AmandaError):
    """A driver lacks a capability that a tool needs."""


class UnsupportedProgramError(AmandaError, ValueError):
    """A tool cannot work on this program, or not with these options.

    It is a ValueError as well, like the error for an option that no program could accept.
    ``amanda run`` ends with the message alone, without a traceback.
    """


class NoDriverError(AmandaError):
    """No usable driver is installed for the frameworks of this process."""


class UnknownNameError(AmandaError, LookupError):
    """No installed package has a tool or driver of the given name."""


class FileError(AmandaError, OSError, ValueError):
    """A file that the user has named cannot be read, or is of another kind.

    It is an OSError and a ValueError as well: readers usually raise the first for a missing file
    and the second for a damaged one, and callers handle both. Quotations from the file are
    shortened, since a name in a damaged file may have megabytes.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 4 :]}"
        super().__init__(message)


class MappingError(AmandaError):
    """A mapping rule cannot describe an operator, or returns something of another form."""


class ToolTypeError(AmandaError):
    """A tool raised a TypeError within an operator such as ``a + b``.

    Python takes a TypeError there to mean that the operands are not supported, and discards it. The
    TypeError of the tool is the cause of this error.
    """


class PluginError(AmandaError):
    """A plugin cannot be loaded (with ``AMANDA_PLUGINS=strict``), or does not have a tool."""


class AmandaWarning(UserWarning):
    """Base class of all warnings of Amanda. Their messages hold nothing that a terminal obeys."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class PluginWarning(AmandaWarning):
    """A plugin or driver is not used, or has a mistake; the message gives the reason."""


class CoverageWarning(AmandaWarning):
    """A driver does not see a part of the program, or the part runs differently than usual."""


class InPlaceWarning(AmandaWarning):
    """A routine has changed a tensor of the model in place."""


def close_matches(name: str, known: Sequence[str]) -> str:
    """The question "did you mean ...?" for an unknown name; "" if no known name is similar."""
    same = [other for other in known if other.lower() == name.lower()]
    close = same or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def described(value: object) -> str:
    """Describe a value for a message, by its type and the beginning of its repr."""
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(type(item).__name__ for item in value[:4])
        more = ", ..." if len(value) > 4 else ""
        return f"a {type(value).__name__} of {len(value)} ({kinds}{more})"
    return f"{type(value).__name__} {value!r:.60}"
