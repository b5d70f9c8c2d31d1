"""Modules of other packages that are ours alone, as if the program ran without us.

The import of a package may change global state. That of ``rich.console`` draws from the generator
of Python's ``random`` (rich 14): a program that seeds it and imports rich later would draw other
numbers, because of our import, or because its own finds the package imported. ::

    with private_import("rich"):
        import rich.console
        ...
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_LOCK = threading.RLock()
_KEPT: dict[str, dict[str, ModuleType]] = {}
"""By package, the modules that are ours alone."""


@contextmanager
def private_import(package: str) -> Iterator[None]:
    """Within it, `package` can be imported and used; afterwards it is as if it had not been.

    The state of ``random`` comes back, and so does ``sys.modules``. Where the program itself has
    imported the package, its modules are used.
    """
    with _LOCK:
        is_programs = package in sys.modules
        ours = _KEPT.setdefault(package, {})
        if not is_programs:
            sys.modules.update(ours)
        state = random.getstate()
        try:
            yield
        finally:
            random.setstate(state)
            if not is_programs:
                for name in [n for n in sys.modules if f"{n}.".startswith(f"{package}.")]:
                    ours[name] = sys.modules.pop(name)
