"""Changes of the memory in use, as routines around an operator measure them."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from amanda.inline import MemoryChange, MemoryUse, resident_bytes

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="no /proc/self/statm elsewhere")


def counting() -> Callable[[], int]:
    """Gives 10, 20, 30 and so on."""
    return itertools.count(10, 10).__next__


def test_a_change_is_the_sum_over_executions() -> None:
    """What is read after an execution, less what was read before it; the peak is the most."""
    use = MemoryUse(iter([5, 8, 20, 1]).__next__)
    change = MemoryChange(use)
    for expected in (3, 3 - 19):
        change.before()
        change.after()
        assert change.bytes == expected
    assert use.peak == 20
    change.add(7, 30)
    assert (change.bytes, use.peak) == (7, 30)


def test_an_execution_that_ends_on_another_thread_is_measured() -> None:
    """It is that of the thread that has begun one; an end without a begin reads nothing."""
    change = MemoryChange(MemoryUse(counting()))
    change.before()
    for _ in range(2):
        thread = threading.Thread(target=change.after)
        thread.start()
        thread.join()
    assert change.bytes == 10
    assert change.use.read() == 30


def test_an_operator_that_raises_is_not_counted_as_a_change() -> None:
    """The next execution of the thread begins anew."""
    change = MemoryChange(MemoryUse(counting()))
    for _ in range(3):
        change.before()
    change.after()
    assert change.bytes == 10


@needs_linux
def test_the_memory_of_the_process_is_read_without_a_function() -> None:
    """Without a function it is what the process has in main memory."""
    change = MemoryChange(MemoryUse())
    with mmap.mmap(-1, 1 << 26) as memory:
        change.before()
        memory.write(bytes([1]) * len(memory))
        change.after()
        assert change.bytes > len(memory) / 2
    assert change.use.peak > change.bytes


_CLOSED = """
import os
from amanda.inline import resident_bytes

assert resident_bytes() > 0
os.closerange(3, 256)
assert resident_bytes() == 0
assert resident_bytes() > 0
"""

_FORKED = """
import mmap, os
from amanda.inline import resident_bytes

memory = mmap.mmap(-1, 1 << 27)
before = resident_bytes()
child = os.fork()
if not child:
    memory.write(bytes([1]) * len(memory))
    os._exit(not resident_bytes() > before + len(memory) / 2)
assert os.waitpid(child, 0)[1] == 0
# The child's pages are not in this process's main memory.
assert resident_bytes() < before + len(memory) / 2
"""


@needs_linux
@pytest.mark.parametrize("script", [_CLOSED, _FORKED], ids=["a daemon", "a child"])
def test_a_process_reads_its_own_memory(script: str) -> None:
    """A child of a fork does not read its parent's. In a process that closes all files, as a daemon
    does, one look finds nothing, and the next one opens the file again."""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("use", [None, resident_bytes, 0])
def test_a_change_needs_a_use_of_memory(use: object) -> None:
    """Anything else is refused, as the error would come later."""
    with pytest.raises(TypeError, match=r"MemoryChange\(\) needs a MemoryUse as use, got"):
        MemoryChange(use)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"MemoryUse\(\) needs a function as used, got 3"):
        MemoryUse(3)  # type: ignore[arg-type]
