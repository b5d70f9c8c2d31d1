"""Fixtures of the tests of amanda-core."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amanda.registry import distributions, plugins
from amanda.registry import drivers as driver_registry
from amanda.registry.hookspecs import hookimpl
from amanda.testing import leftovers


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """After a test no scope is open and no driver attached."""
    start, finders = threading.Thread.start, list(sys.meta_path)
    yield
    assert leftovers.end() == []
    assert threading.Thread.start is start
    assert sys.meta_path == finders


class FakeEntryPoint:
    """An entry point of the group ``amanda`` in a distribution that is not installed."""

    def __init__(self, name: str, plugin: Any, distribution: str = "") -> None:
        self.name = name
        self.dist = SimpleNamespace(name=distribution or f"dist-{name}", version="1.2")
        self._plugin = plugin

    def load(self) -> Any:
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin


def plugin(
    *,
    drivers: Sequence[Any] | None = None,
    tools: Mapping[str, str] | None = None,
    rules: Mapping[str, Sequence[Any]] | None = None,
    suggestions: Mapping[str, str] | None = None,
    problems: Sequence[str] | None = None,
) -> ModuleType:
    """A plugin module that implements the hooks for which something is given."""
    module = ModuleType("fake_plugin")
    given = {
        "amanda_register_drivers": drivers,
        "amanda_register_tools": tools,
        "amanda_register_mapping_rules": rules,
        "amanda_suggest_drivers": suggestions,
        "amanda_report_problems": problems,
    }
    for name, answer in given.items():
        if answer is not None:
            hook = _answering(answer)
            hook.__name__ = name
            setattr(module, name, hookimpl(hook))
    return module


def _answering(answer: Any) -> Callable[[], Any]:
    return lambda: answer


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the given entry points the only ones; plugins load again at the next use."""

    def installing(*points: FakeEntryPoint) -> None:
        monkeypatch.setattr(distributions, "entry_points", lambda group: (list(points), []))
        monkeypatch.setattr(driver_registry, "_LOOPBACK", "no.such.module")
        plugins.registry.cache_clear()

    yield installing
    monkeypatch.undo()
    plugins.registry.cache_clear()
