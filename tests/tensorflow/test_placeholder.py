"""amanda-tensorflow holds no driver yet, and says so wherever it matters."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import amanda
from amanda import _plugins
from amanda.errors import NoDriverError
from amanda_tensorflow.plugin import TensorFlowDriver

REASON = "holds no TensorFlow driver yet"


@pytest.fixture
def imported_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has imported TensorFlow, and no other framework."""
    for framework in (*_plugins.KNOWN_FRAMEWORKS, "amanda.testing.loopback"):
        monkeypatch.delitem(sys.modules, framework, raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))


def test_driver_is_registered_and_gives_its_reason() -> None:
    """`amanda drivers` lists it as not used, and why."""
    (entry,) = [entry for entry in _plugins.drivers() if entry.cls is TensorFlowDriver]
    assert entry.distribution == "amanda-tensorflow"
    assert REASON in entry.reason
    assert TensorFlowDriver.capabilities == frozenset()


@pytest.mark.usefixtures("imported_tensorflow")
def test_apply_refuses_a_program_on_tensorflow_alone() -> None:
    """Nothing could be instrumented: an error that names the reason, and no scope."""
    with pytest.raises(NoDriverError, match=REASON), amanda.apply(amanda.Tool()):
        pass


@pytest.mark.usefixtures("imported_tensorflow")
def test_asking_for_the_driver_by_name_gives_the_reason() -> None:
    """The same for an explicit choice."""
    with (
        pytest.raises(NoDriverError, match=REASON),
        amanda.apply(amanda.Tool(), drivers=["tensorflow"]),
    ):
        pass


def test_plugin_imports_no_framework() -> None:
    """Loading it leaves TensorFlow and all others alone."""
    code = (
        "import sys, amanda_tensorflow.plugin\n"
        "print({'tensorflow', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
