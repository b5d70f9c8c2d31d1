"""A hook of the import system that reports the import of frameworks.

A scope waits like that for a framework whose drivers it is to attach::

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
    """Calls a function after the import of each watched framework.

    It is the first entry of ``sys.meta_path`` from :meth:`add` on, until every framework is
    imported or :meth:`close` is called.

    Args:
        imported: called with the name of a module when it has been executed.
    """

    def __init__(self, imported: Callable[[str], None]) -> None:
        # Not put in place here: of what an interrupt keeps from its caller, nothing may be left.
        self._waiting: set[str] = set()
        self._imported = imported
        self._searching: set[str] = set()

    def add(self, frameworks: Iterable[str]) -> None:
        """Watch frameworks, beside those that it watches already.

        Args:
            frameworks: names of modules that are not imported yet.
        """
        self._waiting.update(frameworks)
        if self._waiting and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Stop watching; harmless when called twice."""
        self._waiting.clear()
        # Another thread may close it, too.
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module, with a loader that reports its execution."""
        # The search below comes here again: then the other finders are to answer.
        if name not in self._waiting or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def done(self, name: str) -> None:
        """Report that the module `name` has been executed."""
        if name in self._waiting:
            self._waiting.discard(name)
            imported = self._imported
            # Before the call, which may import more and must find sys.meta_path as it will stay.
            if not self._waiting:
                self.close()
            imported(name)


class _Loader:
    """The framework's own loader, with a report after the module has been executed."""

    def __init__(self, loader: Any, watch: Watch) -> None:
        self._loader = loader
        self._watch = watch

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
        self._watch.done(module.__name__)


_SHARED: list[Watch] = []
"""The one watch of all open scopes, whose number import statements must not notice."""


def await_frameworks(frameworks: Iterable[str], imported: Callable[[str], None]) -> None:
    """Call a function after the import of each framework, for all scopes together.

    Args:
        frameworks: names of modules, added to those that are watched.
        imported: the same function in every call.
    """
    if _SHARED and _SHARED[0] in sys.meta_path:
        _SHARED[0].add(frameworks)
        return
    # Kept before it is put in place: await_nothing() finds it also after an interrupt.
    _SHARED[:] = [Watch(imported)]
    _SHARED[0].add(frameworks)


def await_nothing() -> None:
    """No open scope waits for a framework any more; harmless when none has."""
    for watch in tuple(_SHARED):
        watch.close()
    _SHARED.clear()
