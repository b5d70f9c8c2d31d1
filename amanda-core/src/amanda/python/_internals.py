"""Private symbols of CPython; the only module of core that uses any."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def reset_lock(lock: Any) -> None:
    """Release a lock in a forked child, where the thread that held it does not exist.

    ``threading`` has no public way: its own locks are reset by this method, which
    ``threading.RLock`` has since Python 3.9.
    """
    lock._at_fork_reinit()


def owned_check(lock: Any) -> Callable[[], bool]:
    """A function that says whether the current thread holds `lock`, a ``threading.RLock``.

    ``threading.Condition`` uses the same method; there is no public one.
    """
    check: Callable[[], bool] = lock._is_owned
    return check


def register_source(code: CodeType, source: str, file: str) -> None:
    """Have tracebacks show the source of code that is in no file.

    Since Python 3.13 they do so for ``python -c``, through this function of ``linecache``, which
    takes the name of the file in place of the code in 3.13. Nothing before.
    """
    register = getattr(linecache, "_register_code", None)
    if register is not None:
        register(code if hasattr(linecache, "_interactive_cache") else file, source, file)


def child_processes() -> int:
    """The processes that ``multiprocessing`` has made for this one, by any start method.

    Children that have ended are in no public list. The counter is shown as ``count(3)``, the number
    of the next one (Python 3.11 to 3.14).
    """
    counter = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
    shown = repr(counter).removeprefix("count(").removesuffix(")")
    return int(shown) - 1 if shown.isdecimal() else 0
