"""What a soak tells to have grown."""

from __future__ import annotations

import json
from typing import Any

from amanda.testing import growth
from tests.running import run_python

_STRINGS = """
def one_scope():
    kept.extend(f"scope {len(kept)}, {i}" for i in range(10))
"""
_BEGINNING = """
def one_scope():
    if len(kept) < growth.LONG // 4:
        kept.append([f"scope {len(kept)}"])
"""


def _grow(one_scope: str) -> dict[str, Any]:
    """Measure in a process of its own: other tests' memory may be given back while one runs."""
    program = (
        f"import attrs, json\nfrom amanda.testing import growth\nkept = []\n{one_scope}\n"
        "grown = growth.grow(one_scope)\n"
        "print(json.dumps(attrs.asdict(grown) | dict(kept=len(kept), long=grown.is_long)))"
    )
    run = run_python("-c", program, env={growth.VARIABLE: str(growth.LONG)}, check=True)
    return json.loads(run.stdout)


def test_memory_that_the_garbage_collector_does_not_know_is_told() -> None:
    """Strings that each scope leaves behind are growth: blocks of the allocator, and no objects."""
    grown = _grow(_STRINGS)
    assert grown["long"]
    assert grown["objects"] < 1 < 9 <= grown["blocks"]
    assert grown["kept"] == 10 * grown["scopes"]


def test_what_is_made_in_the_beginning_is_no_growth() -> None:
    """What the first quarter of the scopes leaves behind, and no later one, is not told."""
    grown = _grow(_BEGINNING)
    assert grown["kept"] == growth.LONG // 4
    assert grown["objects"] < 1 > grown["blocks"]
