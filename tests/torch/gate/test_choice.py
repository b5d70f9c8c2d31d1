"""Whether the gate is used, or the mode, and what is said of it."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any

import pytest
import torch

from amanda.errors import CoverageWarning
from amanda_torch import _internals, accel
from amanda_torch.eager import gate
from amanda_torch.eager.interceptors import Interceptor
from amanda_torch.plugin import TorchEagerDriver
from tests.running import run_python
from tests.torch.gate.programs import VARIABLE, needs_gate
from tests.torch.support import Counter, applied


def test_untested_versions_of_pytorch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is not used with a PyTorch that it was not tested with, and the reason is given."""
    with monkeypatch.context() as patched:
        patched.setattr("torch.__version__", "2.99.0")
        found = accel.refusal()
    assert found == "amanda-torch-accel was not tested with PyTorch 2.99.0"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("platform.python_implementation", lambda: "PyPy", "with this PyPy 3."),
        ("sysconfig.get_config_var", lambda name: 1, "with this CPython 3."),
        ("amanda_torch._internals.has_jit", lambda: True, "with this CPython 3."),
        ("sys.version_info", (3, 10, 0), "with this CPython 3."),
        ("sys.platform", "plan9", " on plan9"),
    ],
)
def test_other_pythons_are_refused(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of what it was not tested with."""
    with monkeypatch.context() as patched:
        patched.setattr(name, value)
        found = accel.refusal()
    assert found.startswith("amanda-torch-accel was not tested")
    assert reason in found


def test_packages_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without its extension, and one of another release: each says what to do."""

    def load() -> None:
        raise ImportError("it was built for PyTorch 1: install it anew")

    made = types.SimpleNamespace(VERSION=21, load=load)
    monkeypatch.setitem(sys.modules, "amanda_torch_accel", made)
    monkeypatch.setattr(accel, "load", load)
    assert accel.refusal().endswith("cannot be loaded: it was built for PyTorch 1: install it anew")
    made.VERSION = 2
    assert accel.refusal().endswith("are of different releases; reinstall both")


@pytest.mark.parametrize("asked", ["auto", "mode", "gate"])
def test_without_it_the_mode_is_used(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gate cannot be used the mode is; it is a warning if the gate was asked for."""
    monkeypatch.setattr(gate, "reason_unusable", lambda: "for a test")
    monkeypatch.setenv(VARIABLE, asked)
    tool = Counter()
    warns = pytest.warns(CoverageWarning, match="gate, which cannot be used \\(for a test\\)")
    with warns if asked == "gate" else contextlib.nullcontext(), applied(tool):
        torch.ones(2).exp()
        assert type(_internals.mode_at(0)) is Interceptor
    assert tool.ops == {"ones": 1, "exp": 1}


def test_an_unknown_interceptor_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names one of three; another word counts as auto, and is a warning."""
    monkeypatch.setenv(VARIABLE, "gat")
    with pytest.warns(CoverageWarning, match="'gat', not one of auto, gate, mode"):
        gate.choose()


def test_doctor_says_which_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of checks names the interceptor, and the reason where it is the mode."""
    driver = TorchEagerDriver.loaded()
    monkeypatch.setattr(gate, "reason_unusable", lambda: "for a test")
    assert driver.remarks() == ["operators are noticed by a TorchFunctionMode (for a test)"]
    monkeypatch.setattr(gate, "reason_unusable", lambda: "")
    monkeypatch.setenv(VARIABLE, "gate")
    assert driver.remarks() == ["operators are noticed by the gate, in C++"]


@needs_gate
def test_the_gate_is_used_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gate works it notices the operators, unless another interceptor is asked for."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, is_used in (("", True), ("auto", True), ("gate", True), ("mode", False)):
        if name:
            monkeypatch.setenv(VARIABLE, name)
        with applied(Counter()):
            assert accel.load().is_installed() == is_used


def test_the_package_needs_no_extension() -> None:
    """amanda-torch works where amanda-torch-accel is not installed."""
    code = (
        "import sys; sys.modules['amanda_torch_accel'] = None\n"
        "import torch, amanda\n"
        "from amanda_torch.eager import gate\n"
        "tool = amanda.Tool(); seen = []\n"
        "tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))\n"
        "with amanda.apply(tool): torch.ones(2).exp()\n"
        "print(seen, gate.reason_unusable())"
    )
    run = run_python("-c", code, check=True)
    assert run.stdout.startswith("['/other/ones:0', '/exp:0'] amanda-torch-accel is not installed")


@needs_gate
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed on Linux")
def test_the_self_test_starts_no_thread() -> None:
    """A program that forks after a scope has no more threads than it had."""
    code = (
        "import os, torch, amanda\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "with amanda.apply(amanda.Tool()):\n    pass\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    run = run_python("-c", code, env={VARIABLE: "gate"}, check=True)
    assert run.stdout.strip() == "0", run.stderr
