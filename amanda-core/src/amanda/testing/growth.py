"""Opens scope after scope, and reports what has grown.

For tests that scopes leave nothing behind::

    grown = growth.grow(one_scope)
    assert grown.objects < 1

Only growth that goes on is told: what a framework makes once, in whichever scope, is none. A
usual run is short; ``AMANDA_SOAK`` tells how many scopes a long one has, of which the memory of
the process can be judged, too. The first quarter of a long run is not measured: allocators take
pages then that they never give back (250 kilobytes of the process for 2,000 scopes of the loopback
driver, while the memory in use stayed the same to a few blocks; Python 3.11).
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

VARIABLE = "AMANDA_SOAK"
"""The environment variable with the number of scopes of a long run."""

LONG = 1000
"""Scopes from which on the memory of the process is judged."""

_USUAL = 8
_WARM = 2
_BATCHES = 2
_LONG_PARTS = 4
"""Of a long run, the first part is not measured, and each other one is a batch."""
_COLLECTIONS = 10
_STATM = Path("/proc/self/statm")


@attrs.frozen
class Growth:
    """The remains of each scope, in the batch of scopes that has left the least.

    Attributes:
        scopes: how many scopes there were.
        objects: objects that the garbage collector knows, for each scope.
        ours: those of them that are of classes of Amanda's packages.
        blocks: blocks that Python's allocator has given away, for each scope: also of strings and
            numbers, which the garbage collector does not know; 0 where it is not told.
        resident: bytes of the process in main memory, for each scope; 0 where it is not told.
        threads: threads of Python, and finders of modules, from the first batch to the last.
    """

    scopes: int
    objects: float
    ours: float
    blocks: float
    resident: float
    threads: int

    @property
    def is_long(self) -> bool:
        """True if there were enough scopes for ``resident`` to mean anything."""
        return self.scopes >= LONG

    def __str__(self) -> str:
        return (
            f"{self.scopes} scopes: {self.objects:+.2f} objects ({self.ours:+.2f} ours), "
            f"{self.blocks:+.2f} blocks and {self.resident:+.0f} bytes for each, "
            f"{self.threads:+d} threads"
        )


def grow(one_scope: Callable[[], Any]) -> Growth:
    """Open scopes, as many as ``AMANDA_SOAK`` says, and measure between batches of them.

    Args:
        one_scope: enters a scope, works in it, and leaves it.
    """
    count = int(os.environ.get(VARIABLE, str(_USUAL)))
    is_long = count >= LONG
    warm = count // _LONG_PARTS if is_long else _WARM
    batches = _LONG_PARTS - 1 if is_long else _BATCHES
    batch = max(1, (count - warm) // batches)
    for _ in range(warm):
        one_scope()
    found = [_measured()]
    for _ in range(batches):
        for _ in range(batch):
            one_scope()
        found.append(_measured())
    objects, ours, blocks, resident = (
        min(after[kind] - before[kind] for before, after in itertools.pairwise(found)) / batch
        for kind in range(4)
    )
    threads = found[-1][4] - found[0][4]
    return Growth(warm + batches * batch, objects, ours, blocks, resident, threads)


def _measured() -> tuple[int, int, int, int, int]:
    # What a collection ends may release more: finalizers of frameworks do.
    for _ in range(_COLLECTIONS):
        if not gc.collect():
            break
    resident = 0
    if _STATM.exists():
        resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    blocks = getattr(sys, "getallocatedblocks", int)()
    objects = gc.get_objects()
    ours = sum(str(type(thing).__module__).startswith("amanda") for thing in objects)
    return len(objects), ours, blocks, resident, threading.active_count() + len(sys.meta_path)
