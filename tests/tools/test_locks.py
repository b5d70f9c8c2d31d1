"""The tools' locks, where a fork or an interrupt comes while they are held."""

from __future__ import annotations

import io
import os
import random
import sys
import threading
from pathlib import Path

import pytest

import amanda_tools
from amanda import state
from amanda.testing import interrupts
from amanda_tools._output.private_imports import with_private_import
from amanda_tools.count import CountTool

SOURCES = sorted(Path(amanda_tools.__file__).parent.rglob("*.py"))


def test_all_locks_are_of_core() -> None:
    """A lock of the tools is one that neither an interrupt nor a fork leaves taken."""
    kinds = ("threading.Lock(", "threading.RLock(", "threading.Condition(", "Semaphore(")
    found = [path.name for path in SOURCES if any(kind in path.read_text() for kind in kinds)]
    assert found == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_prints_while_another_thread_did() -> None:
    """A process that is forked while a summary is printed can print its own."""
    inside, done = threading.Event(), threading.Event()

    def print_slowly() -> None:
        inside.set()
        done.wait(10)

    thread = threading.Thread(target=with_private_import, args=("rich", print_slowly))
    thread.start()
    inside.wait(10)
    child = os.fork()
    if not child:
        # Nothing of the tests is to run in the child.
        printed = threading.Thread(target=CountTool().print_summary, args=(io.StringIO(),))
        printed.daemon = True
        printed.start()
        printed.join(5)
        os._exit(int(printed.is_alive()))
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interrupt_while_a_summary_is_printed_leaves_nothing() -> None:
    """At any line the lock is free afterwards, and imports and generators are as they were."""
    programs = {n: m for n, m in sys.modules.items() if f"{n}.".startswith("rich.")}
    for name in programs:
        del sys.modules[name]

    def program() -> None:
        CountTool().print_summary(io.StringIO())

    def is_ours(code: object) -> bool:
        return str(getattr(code, "co_filename", "")).endswith(("private_imports.py", "state.py"))

    try:
        program()
        for point in interrupts.points(program, is_ours):
            before = random.getstate()
            assert interrupts.run(program, is_ours, point)
            assert not state.owned_locks(), str(point)
            assert random.getstate() == before, str(point)
            left = [name for name in sys.modules if name.partition(".")[0] == "rich"]
            # The lines that put things back can be interrupted themselves; the next call ends it.
            program()
            assert "rich" not in sys.modules, (str(point), left)
    finally:
        sys.modules.update(programs)
