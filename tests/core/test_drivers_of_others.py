"""What core knows of frameworks and their packages, it knows from plugins and drivers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType

import pytest

import amanda
from amanda.cli.list_installed import missing_drivers
from amanda.errors import NoDriverError, PluginWarning
from amanda.registry import plugins
from tests.core.conftest import FakeEntryPoint, plugin
from tests.core.test_plugins import FRAMEWORK, driver

Install = Callable[..., None]


def test_a_plugin_suggests_the_driver_of_a_framework(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suggested distribution is named if the framework is imported without a driver."""
    monkeypatch.setitem(sys.modules, FRAMEWORK, ModuleType(FRAMEWORK))
    install(FakeEntryPoint("one", plugin(suggestions={FRAMEWORK: "dist-two"})))
    said = rf"{FRAMEWORK} is imported but cannot be .*; try: pip install dist-two\)"
    with pytest.raises(NoDriverError, match=said), amanda.apply(amanda.Tool()):
        pass


def test_an_installed_framework_without_a_driver_is_listed(install: Install) -> None:
    """A plugin's suggestion names a framework that is installed and has no driver."""
    suggesting = FakeEntryPoint("one", plugin(suggestions={"json": "dist-two"}))
    install(suggesting)
    said = "json is installed, but no driver for it; try: pip install dist-two"
    assert missing_drivers() == [said]
    install(suggesting, FakeEntryPoint("two", plugin(drivers=[driver("a", framework="json")])))
    assert missing_drivers() == []


def test_a_malformed_suggestion(install: Install) -> None:
    """A plugin that suggests something other than names is left out with a warning."""
    install(FakeEntryPoint("one", plugin(suggestions={FRAMEWORK: 1})))  # type: ignore[dict-item]
    with pytest.warns(PluginWarning, match="one.*not loaded.*which are not two names"):
        assert plugins.suggested_drivers() == {}


def test_problems_of_the_installation(install: Install) -> None:
    """Plugins report problems to the doctor; one that fails is a problem itself."""

    def asked(frameworks: Collection[str]) -> Sequence[str]:
        return [f"no {name}" for name in frameworks]

    def failing() -> Sequence[str]:
        raise OSError("no moon")

    asking = ModuleType("asking")
    asking.amanda_report_problems = amanda.hookimpl(  # type: ignore[attr-defined]
        specname="amanda_report_problems"
    )(asked)
    broken = ModuleType("broken")
    broken.amanda_report_problems = amanda.hookimpl(  # type: ignore[attr-defined]
        specname="amanda_report_problems"
    )(failing)
    install(
        FakeEntryPoint("one", asking),
        FakeEntryPoint("two", broken),
        FakeEntryPoint("three", plugin(problems=["no sun"])),
    )
    failure = "plugin two (dist-two 1.2) cannot report: OSError: no moon"
    assert plugins.report_problems(["fake"]) == ["no fake", "no sun", failure]


def test_packages_of_drivers(install: Install) -> None:
    """They are the modules of the driver, of its target, its framework and those it declares."""
    other = driver("a", framework="b", packages=("c", "d"), target="e.f:G", __module__="h.i")
    install(FakeEntryPoint("one", plugin(drivers=[other])))
    assert amanda.tools.packages_of_drivers() == {"b", "c", "d", "e", "h"}


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"reason_unusable": classmethod(lambda cls: "too old")}, r"a: too old"),
        ({"opt_in": True}, r"a: used only when asked for by name"),
    ],
)
def test_a_framework_whose_driver_is_not_used_is_named(
    attributes: dict[str, object], said: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the driver's reason, whoever publishes the driver."""
    monkeypatch.setitem(sys.modules, FRAMEWORK, ModuleType(FRAMEWORK))
    install(FakeEntryPoint("one", plugin(drivers=[driver("a", **attributes)])))
    message = rf"{FRAMEWORK} is imported but cannot be instrumented \({said}\)"
    with pytest.raises(NoDriverError, match=message), amanda.apply(amanda.Tool()):
        pass
