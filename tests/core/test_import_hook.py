"""The import of a framework inside a scope."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import amanda
from amanda.registry import drivers, plugins
from amanda.registry.import_hook import Watch
from amanda.state import ATTACHED
from amanda.testing import interrupts
from tests.core.conftest import FakeEntryPoint, plugin
from tests.core.test_plugins import FakeDriver

NAME = "fake_late_framework"


@pytest.fixture(autouse=True)
def _no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework is imported, whatever other tests of this process have done."""
    for name in plugins.suggested_drivers():
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A framework that can be imported, and is not yet."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(NAME, None)


def test_notices_the_import(module: Path) -> None:
    """The watch calls back once, after the module has run, and waits no longer then."""
    seen: list[tuple[str, int]] = []
    watch = Watch(lambda name: seen.append((name, sys.modules[name].value)))
    watch.add([NAME])
    importlib.import_module(NAME)
    importlib.reload(sys.modules[NAME])
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert seen == [(NAME, 1)]


def test_the_module_does_not_remember(module: Path) -> None:
    """The imported module has its own loader."""
    watch = Watch(lambda name: None)
    watch.add([NAME, "another"])
    found = importlib.import_module(NAME)
    watch.close()
    assert type(found.__loader__).__module__ != "amanda.registry.import_hook"
    assert found.__spec__ is not None
    assert found.__spec__.loader is found.__loader__


def test_other_imports_pass(module: Path) -> None:
    """Other modules are imported as ever, and a framework that is not there is not found."""
    watch = Watch(lambda name: pytest.fail("not imported"))
    watch.add(["fake_absent_framework"])
    try:
        assert importlib.import_module(NAME).value == 1
        with pytest.raises(ModuleNotFoundError, match="fake_absent_framework"):
            importlib.import_module("fake_absent_framework")
    finally:
        watch.close()
        watch.close()


def test_failed_import(module: Path) -> None:
    """An import that fails does not count; the next one does."""
    seen: list[str] = []
    module.write_text("raise KeyError('broken')\n")
    watch = Watch(seen.append)
    watch.add([NAME])
    with pytest.raises(KeyError):
        importlib.import_module(NAME)
    assert seen == []
    # Another length: within one second, Python tells a stale bytecode file by it alone.
    module.write_text("value = 'this time it can be imported'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == [NAME]


def test_an_interrupt_as_a_watch_begins_leaves_none() -> None:
    """Whoever has kept the watch can close it, wherever an interrupt has come."""
    finders, kept = list(sys.meta_path), list[Watch]()

    def program() -> None:
        watch = Watch(lambda name: None)
        kept.append(watch)
        watch.add([NAME])

    is_ours = interrupts.in_packages("amanda")
    found = interrupts.points(program, is_ours)
    kept.pop().close()
    assert len(found) >= 5
    for point in found:
        assert interrupts.run(program, is_ours, point)
        while kept:
            kept.pop().close()
        assert sys.meta_path == finders


def test_driver_of_a_late_framework(module: Path, install: Callable[..., None]) -> None:
    """A driver whose framework is imported inside a scope is attached then, and detached after."""
    late = type("Late", (FakeDriver,), {"name": "late", "framework": NAME})
    install(FakeEntryPoint("one", plugin(drivers=[late])))
    FakeDriver.attached.clear()
    with amanda.apply(amanda.Tool()):
        assert FakeDriver.attached == []
        importlib.import_module(NAME)
        assert FakeDriver.attached == ["late"]


def test_tools_are_told_of_a_late_framework(module: Path, install: Callable[..., None]) -> None:
    """Where the scope begins, and once more when its driver is there."""
    late = type("Late", (FakeDriver,), {"name": "late", "framework": NAME})
    install(FakeEntryPoint("one", plugin(drivers=[late])))
    told: list[list[str]] = []

    class Told(amanda.Tool):
        def enter_scope(self, drivers: Sequence[amanda.Driver]) -> None:
            told.append([driver.name for driver in drivers])

    with amanda.apply(Told()):
        importlib.import_module(NAME)
    assert told == [[], ["late"]]


def test_a_framework_that_is_never_imported(module: Path, install: Callable[..., None]) -> None:
    """A scope that waits for a framework in vain leaves the import system as it was."""
    late = type("Late", (FakeDriver,), {"name": "late", "framework": NAME})
    install(FakeEntryPoint("one", plugin(drivers=[late])))
    FakeDriver.attached.clear()
    finders = list(sys.meta_path)
    with amanda.apply(amanda.Tool()):
        assert type(sys.meta_path[0]).__module__ == "amanda.registry.import_hook"
    assert sys.meta_path == finders
    importlib.import_module(NAME)
    assert FakeDriver.attached == []


def test_watches_share_one_finder(module: Path) -> None:
    """Several watches are one entry of sys.meta_path, and are called in their order."""
    called: list[int] = []
    watches = [Watch(lambda name, i=i: called.append(i)) for i in range(3)]  # type: ignore[misc]
    for watch in watches:
        watch.add([NAME])
    watches[1].close()
    ours = [f for f in sys.meta_path if type(f).__module__ == "amanda.registry.import_hook"]
    assert len(ours) == 1
    importlib.import_module(NAME)
    assert called == [0, 2]


def test_nested_scopes_wait_for_a_framework(module: Path, install: Callable[..., None]) -> None:
    """Nested scopes that wait for the same framework share its driver once it is imported."""
    late = type("Late", (FakeDriver,), {"name": "late", "framework": NAME})
    install(FakeEntryPoint("one", plugin(drivers=[late])))
    FakeDriver.attached.clear()
    with amanda.apply(amanda.Tool()):
        with amanda.apply(amanda.Tool()):
            found = importlib.import_module(NAME)
            assert FakeDriver.attached == ["late"]
        assert late in ATTACHED
    assert type(found.__loader__).__module__ != "amanda.registry.import_hook"


Install = Callable[..., None]


def test_a_driver_s_package_is_told_of_the_import_of_its_framework(
    module: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point of amanda_imports is called after the import, unless it is disabled."""
    told: list[int] = []
    install(
        FakeEntryPoint(NAME, lambda: told.append(sys.modules[NAME].value)),
        FakeEntryPoint(NAME, lambda: told.append(0), "amanda-off"),
    )
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "amanda-off")
    drivers.watch_imports()
    assert told == []
    importlib.import_module(NAME)
    assert told == [1]
    drivers.watch_imports()
    assert told == [1, 1]
