"""Imports of packages that leave no trace in the program: no module, and no random number drawn.

The import of a package may change global state. That of ``rich.console`` draws from the generator
of Python's ``random`` (rich 14): a program that seeds it would draw other numbers after
our import, and again if its own import of rich then did nothing. ::

    def run() -> None:
        import rich.console
        ...

    with_private_import("rich", run)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from amanda.state import Lock

_LOCK = Lock()
_KEPT: dict[str, dict[str, ModuleType]] = {}
"""By package, the modules that only tools have imported."""


def with_private_import(package: str, function: Callable[[], None]) -> None:
    """Call a function that imports and uses `package`, and undo the effects of the import.

    ``sys.modules`` and the state of ``random`` are restored. If the program itself has imported the
    package, its modules are used; but not a module of one file, which is a file of the program that
    has the package's name by chance.
    """
    _LOCK.hold(_call, package, function)


def _call(package: str, function: Callable[[], None]) -> None:
    # Taken before anything is changed, and what is put back may be put back twice: an interrupt
    # may come at any line.
    state, theirs = random.getstate(), sys.modules.get(package)
    ours = _KEPT.setdefault(package, {})
    is_programs = hasattr(theirs, "__path__")
    try:
        if not is_programs:
            sys.modules.pop(package, None)
            sys.modules.update(ours)
        function()
        _restore(package, ours, state, is_programs, theirs)
    except BaseException:
        _restore(package, ours, state, is_programs, theirs)
        raise


def _restore(
    package: str,
    ours: dict[str, ModuleType],
    state: Any,
    is_programs: bool,
    theirs: ModuleType | None,
) -> None:
    random.setstate(state)
    if is_programs:
        return
    for name in [n for n in sys.modules if f"{n}.".startswith(f"{package}.")]:
        if sys.modules[name] is not theirs:
            ours[name] = sys.modules[name]
        del sys.modules[name]
    if theirs is not None:
        sys.modules[package] = theirs
