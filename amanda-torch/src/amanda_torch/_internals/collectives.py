"""Operators of several processes: functions of ``torch.distributed``, and functional forms."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

from amanda_torch._internals.operators import is_registered, namespace_of
from amanda_torch._internals.symbols import require, symbol

COLLECTIVES: Any = torch.distributed.distributed_c10d if torch.distributed.is_available() else None
"""The module of the functions; they report themselves to modes, but ``barrier`` (2.13)."""

_MODULE = "torch.distributed.distributed_c10d"


def library_of(function: Any) -> str:
    """The namespace of an operator: ``c10d`` for a function of ``torch.distributed``."""
    if type(function) is types.FunctionType:
        return "c10d" if function.__module__ == _MODULE else "aten"
    return namespace_of(function) if is_registered(function) else "aten"


def is_collective(function: Any) -> bool:
    """True if a function is an operator of several processes."""
    return library_of(function).startswith(("c10d", "_c10d"))


if COLLECTIVES is not None:
    _group_named = symbol(f"{_MODULE}._resolve_process_group")
    _world = symbol(f"{_MODULE}._world")
    require(f"{_MODULE}._world.pg_map")
    # By these the functions report themselves.
    require(f"{_MODULE}.has_torch_function", f"{_MODULE}.handle_torch_function")


def mesh_places() -> dict[str, int]:
    """The coordinate of this process in each named axis of meshes of several axes, as
    ``DeviceMesh`` has described their groups."""
    groups = [(group.group_desc, group) for group in _world.pg_map]
    unnamed = ("mesh_dim_", "mesh_default")
    return {
        name.removeprefix("mesh_"): group.rank()
        for name, group in groups
        if name.startswith("mesh_") and not name.startswith(unnamed)
    }


def group_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The name of the group of a collective's arguments, and the ranks in it.

    The group itself has threads and connections, which end with its last reference.
    """
    group = attributes.get("group")
    if "group" not in attributes and "group_name" not in attributes:
        return {}
    if name := attributes.get("group_name"):
        try:
            group = _group_named(name)
        except (RuntimeError, ValueError):
            # The program has ended it.
            return {"group": name}
    group = group or torch.distributed.group.WORLD
    if not isinstance(group, torch.distributed.ProcessGroup):
        return {"group": None}
    ranks = torch.distributed.get_process_group_ranks(group)
    return {"group": group.group_name, "ranks": tuple(ranks)}
