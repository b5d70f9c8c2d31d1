"""A broken plugin stops nothing but itself, and is named."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda.cli import doctor, list_installed
from amanda.errors import NoDriverError, PluginError, PluginWarning
from amanda.interface.driver import INTERFACE_VERSION
from amanda.registry import drivers, plugins
from amanda.state import ATTACHED, FAILED, LIVE_SCOPES
from tests.core.conftest import FakeEntryPoint, plugin
from tests.core.test_plugins import FRAMEWORK, FakeDriver, attached, driver

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def _only_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver is suggested for the fake framework only, which is imported; none has failed yet."""
    monkeypatch.setattr(plugins, "suggested_drivers", lambda: {FRAMEWORK: "amanda-fake"})
    monkeypatch.setitem(sys.modules, FRAMEWORK, ModuleType(FRAMEWORK))
    FakeDriver.attached.clear()
    yield
    FAILED.clear()


GOOD = FakeEntryPoint("good", plugin(drivers=[FakeDriver], tools={"good": "amanda.tool:Tool"}))


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises an error."""

    def function(*arguments: Any) -> Any:
        raise error

    return function


def answering(hook: str, function: Callable[[], Any]) -> ModuleType:
    """A plugin with one hook."""
    module = ModuleType("fake_plugin")
    setattr(module, hook, amanda.hookimpl(specname=hook)(function))
    return module


def sick(name: str = "sick", **attributes: Any) -> type[FakeDriver]:
    """A driver that would go before the good one."""
    return driver(name, priority=1, **attributes)


# -- loading ------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ImportError("no such thing"), ZeroDivisionError("x"), SystemExit(3)]
)
def test_a_plugin_that_cannot_be_imported(install: Install, error: BaseException) -> None:
    """Whatever its module raises, also an exit, the other plugins work."""
    install(FakeEntryPoint("bad", error), GOOD)
    said = rf"'bad' \(dist-bad 1\.2\) is not loaded: {type(error).__name__}: {error}"
    with pytest.warns(PluginWarning, match=said):
        assert list(amanda.tools.available()) == ["good"]
    assert attached() == ["fake"]
    with pytest.raises(LookupError, match="dist-bad is not loaded"):
        amanda.tools.load("bad")


@pytest.mark.parametrize("name", ["drivers", "tools", "mapping_rules"])
@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(1)])
def test_a_hook_that_raises(install: Install, name: str, error: BaseException) -> None:
    """The plugin is left out when it is loaded."""
    broken = answering(f"amanda_register_{name}", raising(error))
    install(FakeEntryPoint("bad", broken), GOOD)
    with pytest.warns(PluginWarning, match=f"dist-bad.*{type(error).__name__}"):
        assert attached() == ["fake"]
    assert list(amanda.tools.available()) == ["good"]


class NotADriver:
    """No subclass of amanda.Driver."""


GARBAGE = [
    ("drivers", 3, "gave int 3, not a list of drivers"),
    ("drivers", [NotADriver], "which is not a subclass of amanda.Driver"),
    ("drivers", [driver("x", interface_version=None)], "no interface_version of type int"),
    ("drivers", [driver("x", priority="high")], "no priority of type int"),
    ("tools", ["a"], r"gave a list of 1 \(str\), not a dict of tools"),
    ("tools", {"a b": "m:A"}, "'a b', which is not a valid tool name"),
    ("tools", {"a": "m.A"}, "'m.A' for 'a', which is not 'module:Class'"),
    ("mapping_rules", [str], "not a dict of rules"),
    ("mapping_rules", {"torch": str}, "for 'torch', not a list of rules"),
    ("mapping_rules", {"torch": ["conv"]}, "neither a function of a context nor a pair"),
]


@pytest.mark.parametrize(("name", "answer", "said"), GARBAGE)
def test_a_hook_that_answers_garbage(install: Install, name: str, answer: Any, said: str) -> None:
    """The plugin is left out when it is loaded, with what it gave and should have given."""
    broken = answering(f"amanda_register_{name}", lambda: answer)
    install(FakeEntryPoint("bad", broken), GOOD)
    with pytest.warns(PluginWarning, match=rf"dist-bad.*amanda_register_{name}|driver x") as caught:
        assert attached() == ["fake"]
    with pytest.raises(PluginWarning, match=said):
        raise caught[0].message
    assert list(amanda.tools.available()) == ["good"]
    assert plugins.mapping_rules() == []


def test_a_plugin_is_asked_once(install: Install) -> None:
    """What it would answer later counts for nothing."""
    answers = iter([{"a": "m:A"}])
    install(FakeEntryPoint("fickle", answering("amanda_register_tools", lambda: next(answers))))
    assert list(plugins.tools()) == list(plugins.tools()) == ["a"]


def test_one_module_in_two_entry_points(install: Install) -> None:
    """The second one is named and left out."""
    install(FakeEntryPoint("one", GOOD.load()), FakeEntryPoint("two", GOOD.load()))
    with pytest.warns(PluginWarning, match=r"'two' \(dist-two 1\.2\) is not loaded: ValueError"):
        assert list(amanda.tools.available()) == ["good"]


# -- tools --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "ModuleNotFoundError: No module named 'sick_tool'"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
        ("class Sick(:\n", "SyntaxError"),
        ("", "AttributeError: module 'sick_tool' has no attribute 'Sick'"),
        ("class Sick: pass\n", "which is not a subclass of amanda.Tool"),
        ("Sick = 3\n", "which is not a subclass of amanda.Tool: int 3"),
    ],
)
def test_a_tool_that_cannot_be_loaded(
    install: Install, text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, it is an error that names its package; ``amanda tools`` says why, and goes on."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sick_tool", raising=False)
    if text is not None:
        (tmp_path / "sick_tool.py").write_text(text)
    importlib.invalidate_caches()
    install(FakeEntryPoint("bad", plugin(tools={"sick": "sick_tool:Sick"})), GOOD)
    origin = "'sick' of dist-bad is registered as sick_tool:Sick, which"
    with pytest.raises(PluginError, match=origin) as caught:
        amanda.tools.load("sick")
    assert said in str(caught.value)
    listed = "\n".join(list_installed.tool_lines())
    assert "other:\n  good  " in listed
    assert "\n  sick  cannot be loaded: tool" in listed
    assert said in listed


def test_the_list_of_tools_tells_of_hidden_ones(install: Install) -> None:
    """Each tool is listed by the name that chooses it."""
    target = "amanda.tools.mapping:MappingTool"
    install(
        FakeEntryPoint("one", plugin(tools={"a": target})),
        FakeEntryPoint("two", plugin(tools={"a": target})),
    )
    lines = list_installed.tool_lines()
    about = "Runs rules on the context of each operator before other tools analyse it."
    assert lines[1] == f"  a           {about}"
    assert lines[2] == f"  dist-two/a  {about} (a means the tool of dist-one)"


# -- drivers ------------------------------------------------------------------


def failing_to_attach(error: BaseException) -> Any:
    """``attach`` of a driver that has done half of it."""

    def attach(self: FakeDriver) -> None:
        self.attached.append("half")
        raise error

    return attach


def drivers_in_use() -> list[str]:
    """The names of the drivers of the one scope."""
    [scope] = LIVE_SCOPES
    return [used.name for used in scope.drivers]


def undone(self: FakeDriver) -> None:
    """``detach`` of that driver."""
    self.attached.remove("half")


@pytest.mark.parametrize("error", [OSError("no way"), SystemExit(2)])
def test_a_driver_that_cannot_be_attached(install: Install, error: BaseException) -> None:
    """The next one for its framework and mode is used, with one warning; nothing of it is left."""
    broken = sick(attach=failing_to_attach(error), detach=undone)
    install(FakeEntryPoint("bad", plugin(drivers=[broken])), GOOD)
    said = rf"driver sick of dist-bad is left out: .*{error}; fake is used instead"
    with pytest.warns(PluginWarning, match=said) as caught:
        assert attached() == ["fake"]
    assert len(caught) == 1
    assert attached() == ["fake"]
    reasons = {entry.cls.name: entry.reason for entry in drivers.drivers()}
    assert reasons["sick"] == f"it could not be attached: {type(error).__name__}: {error}"


def test_a_driver_that_cannot_be_made(install: Install) -> None:
    """An abstract class, or a constructor that raises, counts as one that cannot be attached."""
    unfinished = type("Unfinished", (amanda.Driver,), dict(vars(driver("x"))))
    unfinished.name, unfinished.framework, unfinished.priority = "unfinished", FRAMEWORK, 1
    unfinished.interface_version = INTERFACE_VERSION
    install(FakeEntryPoint("bad", plugin(drivers=[unfinished])), GOOD)
    with pytest.warns(PluginWarning, match=r"unfinished of dist-bad .* TypeError: .*abstract"):
        assert attached() == ["fake"]


def test_a_driver_of_another_mode_goes_on(install: Install) -> None:
    """Where nothing else covers the mode, the other modes are instrumented all the same."""
    broken = sick(mode="graph", attach=failing_to_attach(OSError("no way")), detach=undone)
    install(FakeEntryPoint("bad", plugin(drivers=[broken])), GOOD)
    with pytest.warns(PluginWarning, match=r"no way$"):
        assert attached() == ["fake"]


FAILING = pytest.mark.parametrize(
    "failing",
    [
        {"attach": failing_to_attach(OSError("no way")), "detach": undone},
        {
            "enter_thread": raising(OSError("no way")),
            "detach": lambda self: self.attached.remove("sick"),
        },
    ],
    ids=["attach", "enter_thread"],
)


@FAILING
def test_the_only_driver_fails(install: Install, failing: dict[str, Any]) -> None:
    """Nothing would be instrumented: that is an error, and nothing stays attached."""
    install(FakeEntryPoint("bad", plugin(drivers=[sick(**failing)])))
    said = r"sick: (it could not be attached|its enter_thread\(\) has failed): OSError: no way"
    with pytest.warns(PluginWarning), pytest.raises(NoDriverError, match=said):
        attached()
    assert (ATTACHED, FakeDriver.attached) == ({}, [])
    with pytest.raises(NoDriverError, match=said):
        attached()


@FAILING
def test_a_driver_that_fails_when_its_framework_comes(
    failing: dict[str, Any], install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's import goes on, and the scope without the driver."""
    name = "fake_framework_that_comes_later"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    install(FakeEntryPoint("bad", plugin(drivers=[sick(framework=name, **failing)])), GOOD)
    with amanda.apply(amanda.Tool()):
        with pytest.warns(PluginWarning, match="sick .*no way"):
            module = importlib.import_module(name)
        assert module.value == 1
        assert drivers_in_use() == ["fake"]
    sys.modules.pop(name)


@pytest.mark.parametrize("error", [OSError("stuck"), SystemExit(2)])
def test_a_driver_that_fails_to_detach(install: Install, error: BaseException) -> None:
    """The others are detached all the same; it is a warning, and the driver is not used again."""
    gone: list[str] = []
    first = driver("first", mode="one", detach=lambda self: gone.append("first"))
    broken = driver("broken", mode="two", detach=raising(error))
    last = driver("last", mode="three", detach=lambda self: gone.append("last"))
    install(FakeEntryPoint("one", plugin(drivers=[first, broken, last])))
    said = rf"driver broken of dist-one is left out: its detach\(\) has failed: .*{error}"
    with pytest.warns(PluginWarning, match=said) as caught:
        assert attached() == ["first", "broken", "last"]
    assert len(caught) == 1
    assert gone == ["last", "first"]
    assert not ATTACHED
    assert attached() == ["first", "last"]


@pytest.mark.parametrize("step", ["attach", "enter_thread", "exit_thread", "detach", "invalidate"])
def test_a_driver_that_was_asked_for_ends_the_run(
    install: Install, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no stand-in: its own error reaches the user, as that of any driver does with
    AMANDA_PLUGINS=strict; nothing is left of it."""
    gone: list[str] = []
    broken = sick(**{step: raising(OSError("no way"))})
    other = driver("other", mode="two", detach=lambda self: gone.append("other"))
    install(FakeEntryPoint("bad", plugin(drivers=[other, broken])), GOOD)
    with pytest.raises(OSError, match="no way"):
        attached(drivers=["other", "sick"])
    assert gone == ["other"]
    assert not ATTACHED
    monkeypatch.setenv("AMANDA_PLUGINS", "strict")
    with pytest.raises(OSError, match="no way"):
        attached()
    assert not ATTACHED


NO_NAMESPACE = [
    (property(raising(OSError("no version"))), "OSError: no version"),
    (None, "TypeError: its namespace is None, which is not a Namespace"),
]


@pytest.mark.parametrize(("namespace", "said"), NO_NAMESPACE)
def test_a_driver_without_a_namespace(install: Install, namespace: Any, said: str) -> None:
    """It is asked for when the driver is attached, not at the first operator."""
    broken = sick(namespace=namespace, detach=lambda self: self.attached.remove("sick"))
    install(FakeEntryPoint("bad", plugin(drivers=[broken])), GOOD)
    with pytest.warns(PluginWarning, match=f"sick of dist-bad .*: {said}; fake is used instead"):
        assert attached() == ["fake"]


def test_a_driver_that_cannot_be_invalidated(install: Install) -> None:
    """It would work with plans that are out of date: another one is attached in its place."""
    broken = sick(invalidate=raising(OSError("no way")), detach=lambda self: None)
    install(FakeEntryPoint("bad", plugin(drivers=[broken])), GOOD)
    with pytest.warns(PluginWarning, match=r"sick of dist-bad .*no way; fake is used instead"):
        assert attached()[-1] == "fake"


def test_a_driver_that_cannot_enter_a_thread(install: Install) -> None:
    """The scope goes on without it, and detaches it at its end."""
    left: list[str] = []
    broken = sick(
        mode="graph",
        enter_thread=raising(OSError("no way")),
        exit_thread=lambda self: left.append("thread"),
        detach=lambda self: left.append("framework"),
    )
    install(FakeEntryPoint("bad", plugin(drivers=[broken])), GOOD)
    said = r"driver sick of dist-bad is left out: its enter_thread\(\) has failed: OSError: no way"
    scope = amanda.apply(amanda.Tool())
    with pytest.warns(PluginWarning, match=said):
        scope.__enter__()
    assert drivers_in_use() == ["fake"]
    assert left == ["thread"]
    scope.__exit__(None, None, None)
    assert left == ["thread", "framework"]


@amanda.apply(amanda.Tool())
def run_in_thread(done: list[int]) -> None:
    """Append to a list in a thread that inherits a scope."""
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("step", ["enter_thread", "exit_thread"])
def test_a_driver_that_fails_in_another_thread(install: Install, step: str) -> None:
    """What the thread is there for is done."""
    done: list[int] = []

    def fail(self: FakeDriver) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no way")

    install(FakeEntryPoint("bad", plugin(drivers=[sick(**{step: fail})])))
    with pytest.warns(PluginWarning, match=rf"sick of dist-bad .*{step}\(\) .*no way") as caught:
        run_in_thread(done)
    assert done == [1]
    assert len(caught) == 1


def test_a_driver_that_fails_at_a_new_iteration(install: Install) -> None:
    """The program's loop goes on, and the other drivers are told."""
    told: list[str] = []
    broken = sick(mode="graph", new_iteration=raising(OSError("no way")))
    other = driver("other", new_iteration=lambda self: told.append("other"))
    install(FakeEntryPoint("bad", plugin(drivers=[broken, other])))
    said = r"sick of dist-bad .*new_iteration\(\) .*no way"
    with amanda.apply(amanda.Tool()), pytest.warns(PluginWarning, match=said):
        amanda.new_iteration()
    assert told == ["other"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on this system")
def test_a_driver_that_fails_in_a_forked_child(install: Install) -> None:
    """The others are detached there, and the child goes on."""
    gone: list[str] = []
    broken = sick(mode="graph", detach=raising(OSError("no way")))
    other = driver("other", detach=lambda self: gone.append("other"))
    install(FakeEntryPoint("bad", plugin(drivers=[broken, other])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with amanda.apply(amanda.Tool()):
            child = os.fork()
            if not child:
                os._exit(0 if (gone, ATTACHED) == (["other"], {}) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("error", [OSError("no moon"), SystemExit(2)])
def test_a_function_for_the_import_of_a_framework_that_fails(
    install: Install, error: BaseException
) -> None:
    """An entry point of amanda_imports that fails is a warning, and the others are called."""
    called: list[str] = []
    install(
        FakeEntryPoint(FRAMEWORK, raising(error), "dist-bad"),
        FakeEntryPoint(FRAMEWORK, lambda: called.append(FRAMEWORK)),
    )
    with pytest.warns(PluginWarning, match=f"dist-bad failed when .* was imported.*{error}"):
        drivers.watch_imports()
    assert called == [FRAMEWORK]


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (INTERFACE_VERSION + 1, "update amanda-core"),
        (INTERFACE_VERSION - 1, "update the package that provides it"),
    ],
)
def test_a_driver_of_another_interface(install: Install, version: int, advice: str) -> None:
    """It is not used; the reason says which side is to be updated."""
    other = sick(interface_version=version)
    install(FakeEntryPoint("bad", plugin(drivers=[other])), GOOD)
    assert attached() == ["fake"]
    reasons = {entry.cls.name: entry.reason for entry in drivers.drivers()}
    assert reasons["sick"] == (
        f"it was written for driver interface {version}, and this amanda-core has "
        f"{INTERFACE_VERSION}: {advice}"
    )


def test_two_drivers_of_one_name(install: Install) -> None:
    """A full name tells which is meant; of equal priority the first one wins."""
    one, two = driver("same", mark=1), driver("same", mark=2)
    install(
        FakeEntryPoint("one", plugin(drivers=[one])), FakeEntryPoint("two", plugin(drivers=[two]))
    )
    assert drivers.select(None).ready == (one,)
    assert drivers.select(["dist-two/same"]).ready == (two,)
    assert drivers.drivers()[1].reason == "same was registered first, with the same priority"


# -- doctor -------------------------------------------------------------------


CHECKED = {"self_test": classmethod(lambda cls: []), "check_internals": classmethod(lambda cls: [])}


def doctored(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """The lines of the doctor's checks, without the seconds, and the problems; status checked."""
    status = doctor.main([])
    shown = capsys.readouterr().out.partition("\nchecks\n")[2]
    checks, _, rest = re.sub(r"(?m)^\d+ problems?\n", "\0", shown).partition("\0")
    problems = [line.strip() for line in rest.splitlines()]
    lines = [line for line in checks.splitlines() if line.startswith("  ")]
    assert status == (1 if problems else 0)
    assert bool(problems) == ("all is well" not in checks)
    return [line.strip().partition(" (")[0] for line in lines], problems


def test_the_doctor_survives_all_of_it(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each problem is named once, and the other checks are made."""
    reporting = answering("amanda_report_problems", raising(ValueError("no line")))
    checked = driver(
        "checked",
        mode="two",
        self_test=classmethod(lambda cls: [3]),
        check_internals=classmethod(raising(SystemExit(2))),
    )
    install(
        FakeEntryPoint("bad", SystemExit(3)),
        FakeEntryPoint("mute", reporting),
        FakeEntryPoint("ill", plugin(drivers=[checked])),
        FakeEntryPoint("good", plugin(drivers=[driver("well", **CHECKED)])),
    )
    _, problems = doctored(capsys)
    assert problems == [
        "plugin bad (dist-bad 1.2) is not loaded: SystemExit: 3",
        "plugin mute (dist-mute 1.2) cannot report: ValueError: no line",
        "checked check_internals: SystemExit: 2",
        "checked self_test: 3",
    ]


def test_the_doctor_attaches_each_driver_once(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a scope does, one that is used only when asked for included; and detaches it."""
    steps: list[str] = []

    def noting(step: str) -> Callable[[Any], None]:
        return lambda self: steps.append(f"{step} {self.name}")

    names = ("attach", "enter_thread", "exit_thread", "detach")
    methods = {name: noting(name) for name in names}
    one = driver("one", **CHECKED, **methods)
    shy = driver("shy", opt_in=True, **CHECKED, **methods)
    install(FakeEntryPoint("good", plugin(drivers=[one, shy])))
    lines, problems = doctored(capsys)
    assert steps == [f"{step} {name}" for name in ("one", "shy") for step in names]
    assert problems == []
    assert lines == [
        f"{name}: {outcome}"
        for name in ("one", "shy")
        for outcome in (
            "reason_unusable is not implemented",
            "check_internals passed",
            "attach passed",
            "self_test passed",
        )
    ]


class Running(FakeDriver):
    """What a declared driver names as the class that runs."""

    name = "declared"

    @classmethod
    def self_test(cls) -> list[str]:
        return ["of the class that runs"]


def test_the_doctor_looks_at_the_class_that_runs(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check may be implemented there; if it cannot be imported, that is a problem once."""
    declared = driver("declared", target=f"{__name__}:Running", **CHECKED)
    del declared.self_test  # type: ignore[attr-defined]
    lost = driver("lost", mode="b", target="no_such_module:Driver", **CHECKED)
    install(FakeEntryPoint("one", plugin(drivers=[declared, lost])))
    _, problems = doctored(capsys)
    assert problems == [
        "declared self_test: of the class that runs",
        "lost attach: ModuleNotFoundError: No module named 'no_such_module'",
    ]


def test_a_target_that_is_no_driver_is_named(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor goes on, and a scope uses the next driver."""
    wrong = driver("wrong", priority=2, target=f"{__name__}:Install", **CHECKED)
    install(FakeEntryPoint("one", plugin(drivers=[wrong, driver("well", **CHECKED)])))
    lines, problems = doctored(capsys)
    (problem,) = problems
    assert problem.startswith(f"wrong attach: TypeError: target {__name__}:Install of wrong names ")
    assert problem.endswith("not a subclass of amanda.Driver")
    assert "well: attach passed" in lines
    said = r"not a subclass of amanda\.Driver; well is used"
    with pytest.warns(PluginWarning, match=said), amanda.apply():
        pass


@pytest.mark.parametrize("step", ["attach", "enter_thread", "exit_thread", "detach"])
def test_the_doctor_finds_a_driver_that_fails(
    install: Install, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    """Each step that a scope needs is a problem if it raises; the other drivers are checked."""
    broken = driver("broken", **{**CHECKED, step: raising(OSError("no way"))})
    install(FakeEntryPoint("one", plugin(drivers=[broken, driver("well", mode="b", **CHECKED)])))
    lines, problems = doctored(capsys)
    assert problems == ["broken attach: OSError: no way"]
    assert "well: attach passed" in lines
    assert not ATTACHED


def test_the_doctor_finds_drivers_that_cannot_work(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """An abstract one, one whose check raises, one for another interface, one without framework."""
    unfinished = type("Unfinished", (amanda.Driver,), {**vars(driver("x")), **CHECKED})
    unfinished.name, unfinished.framework, unfinished.mode = "unfinished", FRAMEWORK, "b"
    unfinished.interface_version = INTERFACE_VERSION
    failing = driver("failing", mode="c", reason_unusable=classmethod(raising(OSError("no moon"))))
    old = driver("old", mode="d", interface_version=0)
    apart = driver("apart", mode="e", framework="no_such_framework", **CHECKED)
    install(FakeEntryPoint("one", plugin(drivers=[unfinished, failing, old, apart])))
    _, problems = doctored(capsys)
    assert [problem.partition(" (")[0][:60] for problem in problems] == [
        "unfinished attach: TypeError: Can't instantiate abstract cla",
        "failing is left out: its check failed with OSError: no moon",
        "old is left out: it was written for driver interface 0, and ",
        "apart attach: ModuleNotFoundError: No module named 'no_such_",
    ]


def test_the_doctor_is_content_without_a_framework(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that says why it cannot be used is left out, and is not a problem."""
    absent = driver("absent", reason_unusable=classmethod(lambda cls: "it is not installed"))
    install(FakeEntryPoint("one", plugin(drivers=[absent])))
    assert doctored(capsys) == (["absent: left out"], [])
