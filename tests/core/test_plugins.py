"""Discovery of plugins, and the choice of drivers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda.errors import NoDriverError, PluginError, PluginWarning, UnknownNameError
from amanda.interface.driver import INTERFACE_VERSION, Driver
from amanda.registry import drivers, plugins
from amanda.state import FAILED
from amanda.testing.loopback import LoopbackDriver
from tests.core.conftest import FakeEntryPoint, plugin

FRAMEWORK = "fake_framework"


class FakeDriver(Driver):
    """A driver that does nothing."""

    name = "fake"
    framework = FRAMEWORK
    interface_version = INTERFACE_VERSION
    attached: list[str] = []  # noqa: RUF012 - shared on purpose, emptied by the fixture

    namespace = "fake/1/eager"  # type: ignore[assignment]

    def attach(self) -> None:
        self.attached.append(self.name)

    def detach(self) -> None:
        """Nothing to undo."""

    def vanilla(self) -> Any:
        return warnings.catch_warnings()

    def ad_isolated(self) -> Any:
        return warnings.catch_warnings()


def driver(name: str, **attributes: Any) -> type[FakeDriver]:
    """A driver class with some attributes."""
    return type(name, (FakeDriver,), {"name": name, **attributes})


@pytest.fixture(autouse=True)
def _no_driver_is_attached() -> None:
    FakeDriver.attached.clear()


@pytest.fixture(autouse=True)
def _no_driver_has_failed() -> Iterator[None]:
    yield
    FAILED.clear()


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake framework is imported."""
    monkeypatch.setitem(sys.modules, FRAMEWORK, ModuleType(FRAMEWORK))


@pytest.fixture
def only_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is suggested for the fake framework only, ``amanda-fake``."""
    monkeypatch.setattr(plugins, "suggested_drivers", lambda: {FRAMEWORK: "amanda-fake"})


Install = Callable[..., None]
pytestmark = pytest.mark.usefixtures("only_fakes")


def attached(**arguments: Any) -> list[str]:
    """Names of the drivers that a scope attaches."""
    FakeDriver.attached.clear()
    with amanda.apply(amanda.Tool(), **arguments):
        pass
    return list(FakeDriver.attached)


# -- the four outcomes --------------------------------------------------------


def test_nothing_installed(install: Install) -> None:
    """With no driver at all apply says what to install."""
    install()
    with pytest.raises(NoDriverError, match="pip install amanda-fake"):
        attached()


def test_framework_absent(install: Install) -> None:
    """A driver whose framework is not imported is silently left aside."""
    install(FakeEntryPoint("one", plugin(drivers=[FakeDriver])))
    assert attached() == []


@pytest.mark.usefixtures("framework")
def test_broken_plugin_of_a_known_distribution(install: Install) -> None:
    """Where the driver's own package is broken, the error for its framework says so."""
    install(FakeEntryPoint("fake", ImportError("no such thing"), "amanda-fake"))
    with (
        pytest.warns(PluginWarning),
        pytest.raises(NoDriverError, match="amanda-fake: ImportError: no such thing"),
    ):
        attached()


def test_strict_plugins(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMANDA_PLUGINS=strict turns a broken plugin into an error."""
    monkeypatch.setenv("AMANDA_PLUGINS", "strict")
    install(FakeEntryPoint("bad", ImportError("no such thing"), "dist-bad"))
    with pytest.raises(PluginError, match=r"dist-bad.*no such thing"):
        plugins.registry()


@pytest.mark.parametrize("name", ["one", "dist-one"])
def test_disabled_plugins(install: Install, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """AMANDA_DISABLE_PLUGINS leaves out entry points by name or distribution."""
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", f"other, {name}")
    install(
        FakeEntryPoint("one", plugin(tools={"a": "m:A"})),
        FakeEntryPoint("two", plugin(tools={"b": "m:B"})),
    )
    assert list(plugins.tools()) == ["b"]
    assert plugins.registry().records[0].error == "disabled by AMANDA_DISABLE_PLUGINS"


def test_unknown_hook_names_are_ours_to_find(install: Install) -> None:
    """A plugin with a hook implementation that does not exist is reported as broken."""
    module = plugin(tools={"a": "m:A"})

    def amanda_register_nonsense() -> None:
        """No such hook."""

    module.amanda_register_nonsense = amanda.hookimpl(amanda_register_nonsense)  # type: ignore[attr-defined]
    install(FakeEntryPoint("one", module))
    with pytest.warns(PluginWarning, match="amanda_register_nonsense"):
        assert plugins.tools() == {}


# -- choice -------------------------------------------------------------------


@pytest.fixture
def two(install: Install, framework: None) -> None:
    """Two drivers for one framework and mode."""
    low, high = driver("low", priority=1), driver("high", priority=2)
    install(
        FakeEntryPoint("low", plugin(drivers=[low])), FakeEntryPoint("high", plugin(drivers=[high]))
    )


@pytest.mark.usefixtures("two")
def test_priority() -> None:
    """Of two drivers for one framework and mode the one with the higher priority is used."""
    assert attached() == ["high"]
    reasons = {entry.cls.name: entry.reason for entry in drivers.drivers()}
    assert reasons == {"low": "high has a higher priority (2 > 1)", "high": ""}


@pytest.mark.usefixtures("two")
def test_choice_by_argument() -> None:
    """apply(drivers=) chooses by name or class."""
    assert attached(drivers=["low"]) == ["low"]
    assert attached(drivers=[driver("own")]) == ["own"]
    assert attached(drivers=["low", "high", "low"]) == ["low", "high"]


@pytest.mark.usefixtures("two")
def test_choice_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMANDA_DRIVERS chooses; the argument goes before it."""
    monkeypatch.setenv("AMANDA_DRIVERS", "low")
    assert attached() == ["low"]
    assert attached(drivers=["high"]) == ["high"]


@pytest.mark.usefixtures("two")
def test_unknown_driver() -> None:
    """A driver name that nobody provides is an error with the close matches."""
    with pytest.raises(UnknownNameError, match=r"no driver named 'hihg'; did you mean high"):
        attached(drivers=["hihg"])


@pytest.mark.usefixtures("framework")
def test_requested_driver_is_unusable(install: Install) -> None:
    """A driver that is asked for and cannot be used is an error with the reason."""
    unusable = driver("sad", reason_unusable=classmethod(lambda cls: "the moon is full"))
    install(FakeEntryPoint("one", plugin(drivers=[unusable, FakeDriver])))
    with pytest.raises(NoDriverError, match="sad cannot be used: the moon is full"):
        attached(drivers=["sad"])


@pytest.mark.usefixtures("framework")
def test_modes_do_not_compete(install: Install) -> None:
    """Drivers for different modes of one framework are used together."""
    install(
        FakeEntryPoint(
            "one", plugin(drivers=[driver("a", mode="eager"), driver("b", mode="graph")])
        )
    )
    assert attached() == ["a", "b"]


@pytest.mark.usefixtures("framework")
def test_opt_in(install: Install) -> None:
    """An opt-in driver is used only when asked for by name."""
    shy = driver("shy", opt_in=True, priority=9)
    install(FakeEntryPoint("one", plugin(drivers=[shy, FakeDriver])))
    assert attached() == ["fake"]
    assert attached(drivers=["shy"]) == ["shy"]
    assert drivers.drivers()[0].reason == "used only when asked for by name"


@pytest.mark.usefixtures("framework")
def test_one_framework_uncovered(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one imported framework has a driver and another has not, apply warns once."""
    suggested = {FRAMEWORK: "amanda-fake", "other": "amanda-other"}
    monkeypatch.setattr(plugins, "suggested_drivers", lambda: suggested)
    monkeypatch.setitem(sys.modules, "other", ModuleType("other"))
    install(FakeEntryPoint("one", plugin(drivers=[FakeDriver])))
    with pytest.warns(PluginWarning, match="other is imported.*pip install amanda-other") as caught:
        assert attached() == ["fake"]
    assert len(caught) == 1


def test_loopback_is_there_once_imported() -> None:
    """The loopback driver is registered by the import of its module."""
    assert (LoopbackDriver, "amanda-core") in drivers.registered_drivers()


# -- tools and rules ----------------------------------------------------------


def test_tools_of_all_plugins(install: Install) -> None:
    """amanda.tools.available lists the tools of all plugins with where they come from."""
    install(
        FakeEntryPoint("one", plugin(tools={"b": "m:B"})),
        FakeEntryPoint("two", plugin(tools={"a": "m:A"})),
    )
    found = amanda.tools.available()
    assert list(found) == sorted(found)
    assert found["b"].target == "m:B"
    assert found["b"].distribution == "dist-one"


def test_two_tools_of_one_name(install: Install) -> None:
    """The first package in the alphabet has the name; a full name tells the other one."""
    first, second = "amanda.tools.mapping:MappingTool", "amanda.tool:Tool"
    install(
        FakeEntryPoint("two", plugin(tools={"a": second, "b": second})),
        FakeEntryPoint("one", plugin(tools={"a": first})),
    )
    assert sorted(amanda.tools.available()) == ["a", "b", "dist-two/a"]
    assert amanda.tools.load("b") is amanda.Tool
    said = "have a tool 'a': the one of dist-one is used; .* another one, dist-two/a$"
    with pytest.warns(PluginWarning, match=said):
        assert amanda.tools.load("a") is amanda.tools.mapping.MappingTool
    assert amanda.tools.load("dist-two/a") is amanda.Tool
    assert amanda.tools.load("dist-one/a") is amanda.tools.mapping.MappingTool
    with pytest.raises(UnknownNameError, match="did you mean dist-two/a"):
        amanda.tools.load("dist-tow/a")


def test_our_tools_keep_their_names(install: Install) -> None:
    """No other package takes the name of one of our tools, whatever it is called itself."""
    install(
        FakeEntryPoint("one", plugin(tools={"flops": "m:Other"}), "aaa"),
        FakeEntryPoint("two", plugin(tools={"flops": "m:Ours"}), "amanda-tools"),
    )
    assert plugins.tools()["flops"].target == "m:Ours"
    assert plugins.tools()["aaa/flops"].target == "m:Other"


def test_mapping_rules_of_all_plugins(install: Install) -> None:
    """MappingTool.standard uses the rules of all plugins, in their order."""
    pair = (None, repr)
    install(
        FakeEntryPoint("one", plugin(rules={"torch": [str, pair]})),
        FakeEntryPoint("two", plugin(rules={"tensorflow": [len]})),
    )
    assert plugins.mapping_rules() == [("torch", str), ("torch", pair), ("tensorflow", len)]
