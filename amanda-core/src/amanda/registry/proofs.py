"""Makes the proofs of drivers before they are attached to a framework that is not a tested one.

A scope calls :func:`prove` before it begins. The outcome of each driver is kept for the process.
With a version and build of the framework that the driver was tested with, the tests have made the
proofs, and nothing is done.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence

from amanda.errors import CapabilityError, CoverageWarning
from amanda.interface.driver import Driver
from amanda.interface.proofs import Proof
from amanda.registry.plugins import BROKEN
from amanda.state import ATTACHED, Lock, owns_tool_lock

_PATIENCE = 60.0
"""Seconds after which proofs are not waited for any longer; they take less than one."""

_OUTCOMES: dict[tuple[type[Driver], str], Mapping[Proof, str]] = {}
"""The problem of each proof that has failed, by driver and version."""

_LOCK = Lock()


class _Proving(threading.local):
    """Whether the current thread makes proofs, under scopes of their own."""

    active = False


_PROVING = _Proving()


def is_proving() -> bool:
    """Whether the current thread makes proofs."""
    return _PROVING.active


def untested_version(cls: type[Driver]) -> str:
    """What a driver answers to :meth:`Driver.untested_version`; "" if it cannot be loaded."""
    try:
        return cls.loaded().untested_version()
    except BROKEN:
        # Attaching it fails in the same way, and is reported.
        return ""


def prove(classes: Sequence[type[Driver]], importing: bool = False) -> None:
    """Make the proofs of drivers that are about to be attached, where that is still to be done.

    What fails is a :class:`~amanda.errors.CoverageWarning`, and :func:`failures` tells of it.

    Args:
        classes: the drivers.
        importing: whether their framework is being imported by the current thread.
    """
    if _PROVING.active:
        return
    for cls in classes:
        version = untested_version(cls)
        if not version or cls in ATTACHED or (cls, version) in _OUTCOMES:
            continue
        if _LOCK.hold(_prove, cls, version, importing):
            _warn(cls, version)


def _prove(cls: type[Driver], version: str, importing: bool) -> bool:
    """Make the proofs of a driver, unless another thread has just done so."""
    if (cls, version) in _OUTCOMES:
        return False
    # Other threads would wait for the import, or for the tool that opens this scope.
    here = importing or owns_tool_lock()
    _OUTCOMES[cls, version] = _make(cls) if here else _make_elsewhere(cls)
    return True


def failures(cls: type[Driver]) -> Mapping[Proof, str]:
    """The proofs of a driver that have failed in this process, and the problem of each."""
    version = untested_version(cls)
    return _OUTCOMES.get((cls, version), {}) if version else {}


def switched_off(cls: type[Driver]) -> dict[str, str]:
    """The mechanisms that a driver does without, and what holds without each.

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


def _make(cls: type[Driver]) -> dict[Proof, str]:
    with proving():
        found = {proof: "; ".join(proof.problems()) for proof in cls.loaded().proofs()}
    return {proof: problems for proof, problems in found.items() if problems}


def _make_elsewhere(cls: type[Driver]) -> dict[Proof, str]:
    """Make the proofs in a thread of their own.

    No scope covers it, and what the user's thread has switched on does not hold there: modes, AD,
    autocast. It is not made by ``threading``, whose threads inherit scopes.
    """
    done, failed = threading.Event(), dict[Proof, str]()

    def run() -> None:
        try:
            failed.update(_make(cls))
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    if not done.wait(_PATIENCE):
        return {Proof("proofs", lambda: ()): f"they have not ended within {_PATIENCE:.0f} s"}
    return failed


def _warn(cls: type[Driver], version: str) -> None:
    for proof, problem in failures(cls).items():
        if proof.without:
            warnings.warn(
                f"{proof.mechanism}: switched off in the driver {cls.name}, which was not tested "
                f"with {version} and does not work there ({problem}); {proof.without}. See "
                "amanda doctor, or install a version from the table in the driver's README",
                CoverageWarning,
                stacklevel=6,
            )
