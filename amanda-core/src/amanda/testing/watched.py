"""Finds attributes of a framework that are still patched after a scope.

::

    before = snapshot([torch, torch.nn.functional])
    ...
    differences([torch, torch.nn.functional], before, snapshot([torch, torch.nn.functional]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT = object()
_OF_WARNINGS = "__warningregistry__"

Snapshot = Mapping[tuple[int, str], Any]


def snapshot(targets: Sequence[object]) -> Snapshot:
    """All attributes of some modules and classes, by the position of each and by name.

    Left out is what Python notes in a module that has warned.
    """
    return {
        (position, name): value
        for position, target in enumerate(targets)
        for name, value in vars(target).items()
        if name != _OF_WARNINGS
    }


def differences(targets: Sequence[object], before: Snapshot, after: Snapshot) -> list[str]:
    """The attributes that are not the same object in two snapshots of `targets`.

    Returns:
        Their names with the target's, such as ``torch.functional.split``.
    """
    return [
        f"{getattr(targets[position], '__name__', targets[position])}.{name}"
        for position, name in {**before, **after}
        if before.get((position, name), _ABSENT) is not after.get((position, name), _ABSENT)
    ]
