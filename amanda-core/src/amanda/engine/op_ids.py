"""Operator ids of eager drivers: readable, and equal across iterations and processes.

An id is ``<class of the outermost module>.<module path>/<operator>:<k>``, where k counts the
operators of that name within the module call. Code outside of modules has no prefix, and is counted
within an iteration. The second instance of a class is ``Net@1``, the second call of a module within
the outermost one ``path#1``. Outside of modules the operators of each phase are counted separately:
``/mul:0`` is the first of the forward phase, ``/optimizer/mul:0`` the first of an optimizer. In the
phases of :data:`SHARING`, operators outside of modules share the id of the calling line,
``/mul:train.12``, from the 1,001st of a name in an iteration on.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from amanda.engine.frames import calling_frame, module_of, warn_at
from amanda.interface.specs import Phase

NamedModules = Callable[[], Iterable[tuple[str, Any]]]

MANY = 1_000
"""Operators of one name outside of modules, in one iteration, with ids of their own."""

SHARING: frozenset[str] = frozenset({"forward", "other"})
"""The phases whose further operators share ids."""


def shared_id(prefix: str, op_name: str, count: int, framework: str) -> str:
    """The id shared by all operators of one name that one source line calls outside of modules.

    For loops without iterations, in which each execution would otherwise be a new operator and take
    time and memory.

    Args:
        prefix, op_name, count: parts of the unshared id.
        framework: the package whose frames are skipped to find the calling line.
    """
    frame = calling_frame((framework,))
    if count == MANY:
        warn_at(
            frame,
            f"{MANY} {op_name} operators outside of modules without an end of an iteration: those "
            "of a line share an id from now on; call amanda.new_iteration() in the loop",
        )
    return f"{prefix}/{op_name}:{module_of(frame)}.{0 if frame is None else frame.f_lineno}"


class _CountedCall:
    """One call of a module, or the code outside of all modules."""

    def __init__(self, prefix: str = "", path: str = "") -> None:
        self.prefix = prefix
        self.path = path
        self.counts: collections.Counter[str] = collections.Counter()


class OpIds(threading.local):
    """Forms the ids of the operators that one thread runs.

    Args:
        framework: the package of the framework.
    """

    def __init__(self, framework: str = "amanda") -> None:
        self._framework = framework
        self.forget()

    def forget(self) -> None:
        """Forget all counters, for the next scope of this thread."""
        self._asides: dict[str, _CountedCall] = {}
        self.restart()
        self._calls: list[_CountedCall] = []
        self._root = ""
        self._instances: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._classes: collections.Counter[str] = collections.Counter()
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._entries: collections.Counter[str] = collections.Counter()

    def restart(self) -> None:
        """Restart the counters of code outside of modules: a new iteration."""
        self._outside = _CountedCall()
        # Building models is no part of an iteration.
        self._asides = {name: call for name, call in self._asides.items() if name == "setup"}
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def module(self) -> str:
        """Path of the module that runs, "" outside of modules."""
        return self._calls[-1].path if self._calls else ""

    @property
    def prefix(self) -> str:
        """The common beginning of the running module's operator ids, "" outside of modules."""
        return self._calls[-1].prefix if self._calls else ""

    def next(self, op_name: str, phase: Phase = "forward") -> str:
        """The id of the operator that is about to run.

        Args:
            op_name: its name.
            phase: its phase, which is a part of the id outside of modules.
        """
        if self._calls:
            call = self._calls[-1]
        elif phase == "forward":
            call = self._outside
        else:
            if phase not in self._asides:
                self._asides[phase] = _CountedCall(f"/{phase}")
            call = self._asides[phase]
        count = call.counts[op_name]
        call.counts[op_name] += 1
        if count >= MANY and not self._calls and phase in SHARING:
            return shared_id(call.prefix, op_name, count, self._framework)
        return f"{call.prefix}/{op_name}:{count}"

    @contextmanager
    def within(self, module: Any, named_modules: NamedModules) -> Iterator[None]:
        """The context of a call of `module`, whose operators are counted separately.

        Args:
            module: hashable and weakly referenceable.
            named_modules: yields path and module of `module` ("") and of all modules in it; called
                if `module` is the outermost one.
        """
        calls = self._calls  # a scope may end within the call
        calls.append(self._inner(module) if calls else self._outermost(module, named_modules))
        try:
            yield
        finally:
            calls.pop()

    def _outermost(self, module: Any, named_modules: NamedModules) -> _CountedCall:
        # A second call of the same outermost module begins a new iteration; another one does not.
        if module in self._met:
            self.restart()
        self._met.add(module)
        self._entries.clear()
        self._paths.clear()
        for path, child in named_modules():
            self._paths.setdefault(child, path)
        if module not in self._instances:
            name = type(module).__name__
            count = self._classes[name]
            self._classes[name] += 1
            self._instances[module] = f"{name}@{count}" if count else name
        self._root = self._instances[module]
        return _CountedCall(self._root)

    def _inner(self, module: Any) -> _CountedCall:
        path = self._paths.get(module)
        if path is None:  # not an attribute of any module of this model
            path = f"{self._calls[-1].path}.{type(module).__name__}".lstrip(".")
        count = self._entries[path]
        self._entries[path] += 1
        again = f"#{count}" if count else ""
        return _CountedCall(f"{self._root}.{path}{again}", path)
