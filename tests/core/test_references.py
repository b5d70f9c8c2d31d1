"""Weak references of Amanda's to objects of the program."""

from __future__ import annotations

from tests.running import run_python

PROGRAM = """
from amanda.python.references import Reference, nothing

class Held:
    pass

class Looking:
    def __del__(self):
        found.append(Reference(held, nothing)() is held)

def within(inner, depth):
    for _ in range(depth):
        inner = [inner]
    return inner

held, found = Held(), []
for depth in [*range(60, 160)] * 10:
    for first in (True, False):
        # CPython puts the end of what is so deep off, until that of all around it.
        both = [Reference(held, nothing), Looking()]
        nested = within(both[::1 if first else -1], depth)
        del both, nested
        others = [{} for _ in range(50)] + [Reference(held, nothing) for _ in range(50)]
        del others
assert all(found)
print(len(found))
"""


def test_a_reference_can_be_made_while_others_come_to_their_end() -> None:
    """It is none of those that are about to be freed, which would be freed twice then."""
    done = run_python("-c", PROGRAM)
    assert (done.returncode, done.stdout.strip()) == (0, "2000"), done.stderr


ENDING = """
from amanda.python.references import Reference, nothing

class Held:
    pass

for depth in range(40, 160):
    held = Held()
    nested = [Reference(held, nothing)]
    others = [Reference(held, nothing) for _ in range(5)]
    for _ in range(depth):
        nested = [nested]
    # The last one ends first.
    both = [held, nested]
    del held, nested
    del both
    assert [other() for other in others] == [None] * 5
print("ended")
"""


def test_an_object_ends_while_the_end_of_a_reference_to_it_is_put_off() -> None:
    """A reference has a callback, which CPython releases even where there is none, and crashes."""
    done = run_python("-c", ENDING)
    assert (done.returncode, done.stdout.strip()) == (0, "ended"), done.stderr
