"""What a soak tells to have grown."""

from __future__ import annotations

import json
from typing import Any

from amanda.testing import soak
from tests.running import run_python

_STRINGS = """
def one_scope():
    kept.extend(f"scope {len(kept)}, {i}" for i in range(10))
"""
_BEGINNING = """
def one_scope():
    if len(kept) < soak.LONG // 4:
        kept.append([f"scope {len(kept)}"])
"""


def _grow(one_scope: str) -> dict[str, Any]:
    """Measure in a process of its own: other tests' memory may be given back while one runs."""
    program = (
        f"import attrs, json\nfrom amanda.testing import soak\nkept = []\n{one_scope}\n"
        "growth = soak.grow(one_scope)\n"
        "print(json.dumps(attrs.asdict(growth) | dict(kept=len(kept), long=growth.is_long)))"
    )
    run = run_python("-c", program, env={soak.VARIABLE: str(soak.LONG)}, check=True)
    return json.loads(run.stdout)


def test_memory_that_the_garbage_collector_does_not_know_is_told() -> None:
    """Strings that each scope leaves behind are growth: blocks of the allocator, and no objects."""
    growth = _grow(_STRINGS)
    assert growth["long"]
    assert growth["objects"] < 1 < 9 <= growth["blocks"]
    assert growth["kept"] == 10 * growth["scopes"]


def test_what_is_made_in_the_beginning_is_no_growth() -> None:
    """What the first quarter of the scopes leaves behind, and no later one, is not told."""
    growth = _grow(_BEGINNING)
    assert growth["kept"] == soak.LONG // 4
    assert growth["objects"] < 1 > growth["blocks"]
