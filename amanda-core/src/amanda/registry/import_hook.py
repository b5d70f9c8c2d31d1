"""A hook of the import system that reports the import of frameworks.

A scope waits in this way for a framework before it attaches the drivers::

    watch = Watch(lambda name: print(f"{name} is imported"))
    watch.add(["torch"])
    ...
    watch.close()
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Watch:
    """Calls a function after the import of each watched module.

    All watches share one finder, the first entry of ``sys.meta_path`` while any of them waits for
    a module: import statements of the program cost one more call, however many watches there are.

    Args:
        imported: called with the name of a module when it has been executed.
    """

    def __init__(self, imported: Callable[[str], None]) -> None:
        # The finder is not installed here: an interrupt could lose the watch before the caller has
        # it, and leave the finder behind.
        self.imported = imported

    def add(self, modules: Iterable[str]) -> None:
        """Watch further modules.

        Args:
            modules: names of modules that are not imported yet.
        """
        for name in modules:
            _FINDER.waiting.setdefault(name, {})[self] = None
        _FINDER.put_in_place()

    def close(self) -> None:
        """Stop watching; harmless when called twice."""
        for name, watches in tuple(_FINDER.waiting.items()):
            watches.pop(self, None)
            if not watches:
                _FINDER.waiting.pop(name, None)
        _FINDER.put_in_place()


class _Finder:
    """The entry of ``sys.meta_path``: finds watched modules, with a loader that reports them.

    Attributes:
        waiting: the watches that wait for a module, by its name, in the order of their begin.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, dict[Watch, None]] = {}
        self._searching: set[str] = set()

    def put_in_place(self) -> None:
        """Become the first entry of ``sys.meta_path`` if a watch waits; otherwise leave the
        list."""
        if not self.waiting:
            # Another thread may remove it, too.
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module, with a loader that reports its execution."""
        # The search below calls this finder again, which then leaves the answer to the others.
        if name not in self.waiting or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec

    def report(self, name: str) -> None:
        """Call the functions of the watches that wait for the module `name`, which has run."""
        watches = self.waiting.pop(name, ())
        # Before the calls, since these may import more modules and need the final sys.meta_path.
        self.put_in_place()
        for watch in tuple(watches):
            watch.imported(name)


_FINDER = _Finder()


class _Loader:
    """The framework's own loader, with a report after the module has been executed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Pickle, inspect and reloads use these: they have to find the module's own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _FINDER.report(module.__name__)


_SHARED: list[Watch] = []
"""The one watch of all open scopes."""


def await_frameworks(frameworks: Iterable[str], imported: Callable[[str], None]) -> None:
    """Call a function after the import of each framework, for all scopes together.

    Args:
        frameworks: names of further modules.
        imported: the same function in every call.
    """
    # The watch is stored before it waits, so that await_nothing() finds it also after an interrupt.
    if not _SHARED:
        _SHARED.append(Watch(imported))
    _SHARED[0].add(frameworks)


def await_nothing() -> None:
    """No open scope waits for a framework any more; harmless when none has."""
    for watch in tuple(_SHARED):
        watch.close()
    _SHARED.clear()
