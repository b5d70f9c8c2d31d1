"""Proofs of the driver's mechanisms: when they are made, and what follows from one that fails."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.cli import doctor
from amanda.errors import CapabilityError, CoverageWarning
from amanda.interface.proofs import Proof
from amanda.registry import proofs as made
from amanda_torch import _internals, plugin
from amanda_torch.compiled.driver import GraphDriver
from amanda_torch.driver import TESTED
from amanda_torch.eager import checkpoints, functions, proofs, tracers
from amanda_torch.eager.backward_passes import BackwardPasses
from amanda_torch.eager.driver import InterceptingDriver
from tests.running import in_threads
from tests.torch.support import Counter, applied

_VERSIONS = itertools.count()


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> str:
    """A PyTorch of another version than the tested ones, for which no proof was made."""
    version = f"99.0.{next(_VERSIONS)}"
    monkeypatch.setattr(torch, "__version__", version)
    return version


def _unpatched(*_: Any) -> None:
    """In place of a function that patches."""


def _same(*args: Any) -> Any:
    """In place of a wrapper: nothing is wrapped."""
    return args[-1]


BREAKING: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    proofs.MODULE_CALLS: lambda m: m.setattr(InterceptingDriver, "_called_modules", _same),
    proofs.BACKWARD_PASSES: lambda m: m.setattr(BackwardPasses, "_engine", _same),
    proofs.FUNCTIONS: lambda m: m.setattr(functions, "patch", _unpatched),
    proofs.CHECKPOINTS: lambda m: m.setattr(
        _internals, "CHECKPOINT_GENERATOR", "get_device_states"
    ),
    proofs.REENTRANT_CHECKPOINTS: lambda m: m.setattr(
        checkpoints.Checkpoints, "patch_reentrant", _unpatched
    ),
    proofs.FAST_PATHS: lambda m: m.setattr(tracers.Tracers, "_patch_checks", _unpatched),
    proofs.SCRIPTS: lambda m: m.setattr(InterceptingDriver, "_script_call", _same),
    proofs.COMPILED: lambda m: m.setattr(tracers.Tracers, "_uncompiled", _same),
}
"""Ways in which another PyTorch would not be patched where the driver thinks it is."""


def _program() -> Sequence[torch.Tensor]:
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    y = nn.Sequential(nn.ReLU(), nn.Tanh())(x) * 2
    for reentrant in (False, True):
        y = checkpoint(torch.exp, y, use_reentrant=reentrant)
    y = nn.functional.normalize(torch.func.vmap(torch.sin)(y), dim=0)
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("mechanism", BREAKING)
def test_a_mechanism_that_fails_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, untested: str, mechanism: str
) -> None:
    """A warning names it once, each scope counts it, the doctor tells; results stay the same."""
    BREAKING[mechanism](monkeypatch)
    vanilla = _program()
    for attempt in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scope = applied(Counter())
            with scope:
                results = _program()
        told = [str(w.message) for w in caught if issubclass(w.category, CoverageWarning)]
        assert [text.partition(":")[0] for text in told] == [mechanism] * (attempt == 0)
        assert all(untested in text and "switched off" in text for text in told)
        assert [r for r in scope.statistics.not_seen if r.startswith(f"{mechanism} switched off")]
        for got, expected in zip(results, vanilla, strict=True):
            assert torch.equal(got, expected)
    problems: list[str] = []
    lines = list(doctor.check_driver(plugin.TorchEagerDriver, problems))
    assert f"torch-eager: was not tested with PyTorch {untested}" in lines
    assert any(line.startswith(f"torch-eager self_test: {mechanism}: ") for line in problems)


@pytest.mark.parametrize(
    ("mechanism", "seen"),
    [
        (proofs.TRANSFORMS, {"tensor", "linalg_vector_norm", "clamp_min", "expand_as", "div"}),
        (proofs.COMPOSITES, {"tensor", "sin", "clamp_min", "expand_as", "div"}),
    ],
)
def test_what_is_not_seen_without_a_mechanism(
    monkeypatch: pytest.MonkeyPatch, untested: str, mechanism: str, seen: set[str]
) -> None:
    """Operators that would not be seen rightly run vanilla."""
    found = [Proof(mechanism, lambda: ["wrong"], without="it is not seen")]
    monkeypatch.setattr(InterceptingDriver, "proofs", classmethod(lambda cls: found))
    counter = Counter()
    with pytest.warns(CoverageWarning, match=f"{mechanism}: switched off"):
        made.prove([plugin.TorchEagerDriver])
    with applied(counter):
        x = torch.tensor([1.0, 2.0])
        torch.func.vmap(torch.sin)(x)
        nn.functional.normalize(x, dim=0)
    assert set(counter.ops) == seen


def test_a_driver_that_cannot_do_without_is_refused(
    monkeypatch: pytest.MonkeyPatch, untested: str
) -> None:
    """Where operators are not seen at all, the error names what fails, and the version."""
    failing = classmethod(lambda cls: [Proof("operators", lambda: ["none was seen"])])
    monkeypatch.setattr(InterceptingDriver, "proofs", failing)
    expected = rf"operators: the driver torch-eager .* {untested}.*\(none was seen\)"
    with pytest.raises(CapabilityError, match=expected), applied(Counter()):
        pass


def _raising(cls: Any) -> Any:
    raise AssertionError("proofs are made")


def test_a_tested_version_needs_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a version and build that the tests run with, attaching makes no proofs."""
    monkeypatch.setattr(InterceptingDriver, "proofs", classmethod(_raising))
    for release in TESTED:
        for build in ("", "+cpu", "+cu132"):
            monkeypatch.setattr(torch, "__version__", release + build)
            assert InterceptingDriver.untested_version() == ""
            with applied(Counter()):
                pass


@pytest.mark.parametrize(
    "version",
    ["2.12.1+cpu", "2.13.7", "99.0.0", "2.15.0a0+git1234567", "2.14.0.dev20260101", "2.14.0+rocm7"],
)
def test_another_version_or_build_is_untested(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Proofs are made where the release is not one that the tests run with, also between two of
    these, and where the build is another one."""
    monkeypatch.setattr(torch, "__version__", version)
    assert InterceptingDriver.untested_version() == f"PyTorch {version}"


def test_proofs_are_made_once(monkeypatch: pytest.MonkeyPatch, untested: str) -> None:
    """All scopes of a process share the outcome, those of other threads included."""
    calls: list[int] = []

    def count() -> list[str]:
        calls.append(threading.get_ident())
        return []

    monkeypatch.setattr(InterceptingDriver, "proofs", classmethod(lambda c: [Proof("p", count)]))

    def enter() -> None:
        with applied(Counter()):
            torch.ones(1)

    in_threads(*[enter] * 4)
    enter()
    assert len(calls) == 1


@pytest.fixture(params=["plain", "no_grad", "inference", "float64", "meta", "autocast", "hooks"])
def surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a user's program may have switched on where its scope begins."""
    if request.param == "float64":
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)
        return
    hooks = torch.autograd.graph.saved_tensors_hooks(_raising, _raising)
    contexts: dict[str, Any] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "meta": lambda: torch.device("meta"),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "hooks": lambda: hooks,
    }
    with contexts.get(request.param, lambda: warnings.catch_warnings())():
        yield


def test_proofs_leave_everything_as_it_is(surroundings: None, untested: str) -> None:
    """They pass wherever a scope begins, draw no random numbers, and change no switch."""

    def state() -> list[Any]:
        return [
            torch.get_rng_state().tolist() if not torch.is_inference_mode_enabled() else None,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            _internals.mode_depth(),
        ]

    before = state()
    with applied(amanda.Tool()):
        pass
    assert made.failures(plugin.TorchEagerDriver) == {}
    assert state() == before


def test_proofs_inside_an_import_run_in_its_thread(
    monkeypatch: pytest.MonkeyPatch, untested: str
) -> None:
    """Another thread would wait for the import, which waits for the proofs."""
    threads: list[int] = []
    proof = Proof("p", lambda: threads.append(threading.get_ident()) or [])  # type: ignore[func-returns-value]
    monkeypatch.setattr(InterceptingDriver, "proofs", classmethod(lambda cls: [proof]))
    made.prove([plugin.TorchEagerDriver], importing=True)
    assert threads == [threading.get_ident()]


def test_both_drivers_prove_themselves() -> None:
    """The self-test of each driver consists of its proofs, and finds nothing here."""
    assert [proof.mechanism for proof in GraphDriver.proofs()] == ["graphs of torch.compile"]
    assert plugin.TorchGraphDriver.self_test() == []
    assert plugin.TorchEagerDriver.self_test() == []
