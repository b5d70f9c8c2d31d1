"""Weak references of Amanda's to objects of the program."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from amanda.references import Reference

class Held:
    pass

class Looking:
    def __del__(self):
        found.append(Reference(held)() is held)

def within(inner, depth):
    for _ in range(depth):
        inner = [inner]
    return inner

held, found = Held(), []
for depth in [*range(60, 160)] * 10:
    for first in (True, False):
        # CPython puts the end of what is so deep off, until that of all around it.
        both = [Reference(held), Looking()]
        nested = within(both[::1 if first else -1], depth)
        del both, nested
        others = [{} for _ in range(50)] + [Reference(held) for _ in range(50)]
        del others
assert all(found)
print(len(found))
"""


def test_a_reference_can_be_made_while_others_come_to_their_end() -> None:
    """It is none of those that are about to be freed, which would be freed twice then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "2000"), done.stderr
