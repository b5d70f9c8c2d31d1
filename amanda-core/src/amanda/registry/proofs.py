"""Runs the proofs of drivers before they are attached to an untested version of a framework.

A scope calls :func:`prove` before it begins. The outcome of each driver is kept for the process.
With a version and build of the framework that the driver was tested with, the tests have made the
proofs, and nothing is done.

A proof that needs a module which is not imported (``Proof.needs``) waits for it. A scope that ends
calls :func:`prove_late`, since operators have run unproven, and warns if the proof fails.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

from amanda.errors import CapabilityError, CoverageWarning
from amanda.interface.driver import Driver
from amanda.interface.proofs import Proof
from amanda.registry.plugins import BROKEN
from amanda.state import ATTACHED, Lock, owns_tool_lock

_PATIENCE = 60.0
"""Seconds after which proofs are not waited for any longer; they take less than one."""

_OUTCOMES: dict[tuple[type[Driver], str], dict[Proof, str]] = {}
"""The problem of each proof that has failed, by driver and version."""

_WAITING: dict[tuple[type[Driver], str], frozenset[str]] = {}
"""The modules that proofs wait for, by driver and version."""

_LOCK = Lock()


class _Proving(threading.local):
    """Per thread: `active` is True while it makes proofs, under scopes of their own."""

    active = False


_PROVING = _Proving()


def is_proving() -> bool:
    """True if the current thread makes proofs."""
    return _PROVING.active


def untested_version(cls: type[Driver]) -> str:
    """The driver's :meth:`Driver.untested_version`; "" if it cannot be loaded."""
    try:
        return cls.loaded().untested_version()
    except BROKEN:
        # Attaching it fails in the same way, and is reported.
        return ""


def prove(classes: Sequence[type[Driver]], importing: bool = False) -> None:
    """Make the proofs of drivers that are about to be attached, where that is still to be done.

    A failure is a :class:`~amanda.errors.CoverageWarning`, and :func:`failures` lists it.

    Args:
        classes: the drivers.
        importing: True if their framework is being imported by the current thread.
    """
    if _PROVING.active:
        return
    for cls in classes:
        version = untested_version(cls)
        if not version or cls in ATTACHED or not _is_due(cls, version):
            continue
        for proof, problem in _LOCK.hold(_prove, cls, version, importing).items():
            if proof.without:
                _warn(cls, version, proof, problem, proof.without, stacklevel=6)


def prove_late(classes: Sequence[type[Driver]], tell: Callable[[str], None]) -> None:
    """Make the proofs that have waited for a module, where a scope ends that has imported it.

    A failure is a :class:`~amanda.errors.CoverageWarning`, since the scope has used the mechanism.

    Args:
        classes: the drivers that were attached.
        tell: is given a line for each proof that fails.
    """
    if not _WAITING or _PROVING.active:
        return
    for cls in classes:
        version = untested_version(cls)
        # While another scope needs the driver, it is the end of that one.
        if (cls, version) not in _WAITING or cls in ATTACHED or not _is_due(cls, version):
            continue
        for proof, problem in _LOCK.hold(_prove, cls, version, False).items():
            tell(f"{proof.mechanism} did not work in {cls.name}")
            effect = (
                "this scope ran before that was detected, and what it has seen and changed may be "
                f"wrong; from now on {proof.without or 'no scope begins'}"
            )
            _warn(cls, version, proof, problem, effect, stacklevel=9)


def _is_due(cls: type[Driver], version: str) -> bool:
    """True if a driver has a proof that is still to be made and can be."""
    key = cls, version
    return key not in _OUTCOMES or not sys.modules.keys().isdisjoint(_WAITING.get(key, ()))


def _prove(cls: type[Driver], version: str, importing: bool) -> Mapping[Proof, str]:
    """Make the proofs of a driver that are due, unless another thread has just done so.

    Returns:
        The problem of each proof that fails now.
    """
    key = cls, version
    if not _is_due(cls, version):
        return {}
    waiting = _WAITING.pop(key, None)
    # Other threads would wait for the import, or for the tool that opens this scope.
    here = importing or owns_tool_lock()
    failed, missing = (_make if here else _make_elsewhere)(cls, waiting)
    if missing:
        _WAITING[key] = missing
    known = _OUTCOMES.get(key, {})
    off = {proof.mechanism for proof in known}
    new = {proof: problem for proof, problem in failed.items() if proof.mechanism not in off}
    _OUTCOMES[key] = {**known, **new}
    return new


def failures(cls: type[Driver]) -> Mapping[Proof, str]:
    """The proofs of a driver that have failed in this process, and the problem of each."""
    version = untested_version(cls)
    return _OUTCOMES.get((cls, version), {}) if version else {}


def switched_off(cls: type[Driver]) -> dict[str, str]:
    """The mechanisms that are switched off in a driver, and the consequence of each.

    Raises:
        CapabilityError: a proof has failed that the driver cannot work without.
    """
    failed = {} if _PROVING.active else failures(cls)
    for proof, problem in failed.items():
        if not proof.without:
            raise CapabilityError(
                f"{proof.mechanism}: the driver {cls.name} does not work with "
                f"{untested_version(cls)}, which it was not tested with ({problem})"
            )
    return {proof.mechanism: proof.without for proof in failed}


@contextlib.contextmanager
def proving() -> Iterator[None]:
    """Within it, the current thread makes proofs: drivers that it attaches switch nothing off."""
    outer, _PROVING.active = _PROVING.active, True
    try:
        yield
    finally:
        _PROVING.active = outer


_Made = tuple[dict[Proof, str], frozenset[str]]
"""The proofs that have failed, and the modules that others wait for."""


def _make(cls: type[Driver], waiting: frozenset[str] | None) -> _Made:
    """Make the proofs of a driver that can be made.

    Args:
        waiting: modules; only proofs that wait for one of them are made. None for all proofs.
    """
    with proving():
        made = [p for p in cls.loaded().proofs() if waiting is None or p.needs in waiting]
        found = {proof: "; ".join(proof.problems()) for proof in made if proof.can_run()}
    missing = frozenset(proof.needs for proof in made if proof not in found)
    return {proof: problems for proof, problems in found.items() if problems}, missing


def _make_elsewhere(cls: type[Driver], waiting: frozenset[str] | None) -> _Made:
    """Make the proofs in a thread of their own.

    No scope covers it, and the modes of the user's thread (AD, autocast and others) do not hold
    there. It is not made by ``threading``, whose threads inherit scopes.
    """
    done, made = threading.Event(), list[_Made]()

    def run() -> None:
        try:
            made.append(_make(cls, waiting))
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    has_ended = done.wait(_PATIENCE)
    if made:
        return made[0]
    problem = "they raised" if has_ended else f"they have not ended within {_PATIENCE:.0f} s"
    return {Proof("proofs", lambda: ()): problem}, frozenset()


def _warn(
    cls: type[Driver], version: str, proof: Proof, problem: str, effect: str, stacklevel: int
) -> None:
    warnings.warn(
        f"{proof.mechanism}: switched off in the driver {cls.name}, which was not tested "
        f"with {version} and does not work there ({problem}); {effect}. See "
        "amanda doctor, or install a version from the table in the driver's README",
        CoverageWarning,
        stacklevel=stacklevel,
    )
