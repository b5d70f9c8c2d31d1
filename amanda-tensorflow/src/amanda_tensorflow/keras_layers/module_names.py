"""Names of modules in paths: those of Keras layers, and attributes of modules of ``tf.Module``.

A layer of Keras has its name. A module that a ``tf.Module`` calls has the attribute path that leads
to it from there, ``encoder/blocks.0`` for ``self.encoder.blocks[0]``, and an outermost one, or one
that no attribute leads to, its ``name``::

    name_within(caller, module)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

_KERAS = ("keras", "tf_keras")

_Known = dict[int, tuple[weakref.ref[Any], str]]
"""By ``id`` of a module, the module and the attribute path that leads to it; "" for none."""

_PATHS: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def is_plain_module(value: Any) -> bool:
    """True for a module of ``tf.Module`` that is no layer of Keras."""
    return is_plain_class(type(value))


def is_plain_class(cls: type[Any]) -> bool:
    """True for a class of modules of ``tf.Module`` that are no layers of Keras."""
    return issubclass(cls, tf.Module) and not _is_of_keras(cls)


def _is_of_keras(cls: type[Any]) -> bool:
    return any(base.__module__.partition(".")[0] in _KERAS for base in cls.__mro__)


def name_within(caller: Any, module: Any) -> str | None:
    """The name of a module in a path.

    Args:
        caller: the module that calls it; None for an outermost one.

    Returns:
        None for one without a name, which is not part of paths.
    """
    name = getattr(module, "name", None)
    if name is None or not is_plain_module(caller):
        return None if name is None else str(name)
    return _attribute_path(caller, module) or str(name)


def _attribute_path(caller: Any, module: Any) -> str:
    """The attribute path that leads from one module to another; "" if there is none."""
    try:
        known = _PATHS.setdefault(caller, {})
    except TypeError:
        # A module that has no hash.
        known = {}
    found = known.get(id(module))
    if found is None or found[0]() is not module:
        known.clear()
        known.update({id(part): (weakref.ref(part), path) for path, part in parts_of(caller)})
        found = known.setdefault(id(module), (weakref.ref(module), ""))
    return found[1]


def parts_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Attribute path and module of the modules and layers in a ``tf.Module``, each once.

    Those that fewer attributes lead to come first. Layers of Keras are not looked into.
    """
    seen, waiting = {id(module)}, [("", module)]
    for path, parent in waiting:
        for name, part in children_of(parent):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append((f"{path}/{name}" if path else name, part))
                yield waiting[-1]


def children_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of the modules and layers that attributes of a ``tf.Module`` hold."""
    if not is_plain_module(module):
        return
    for name, value in list(vars(module).items()):
        # What TensorFlow tracks for checkpoints.
        if not name.startswith("_self_"):
            yield from _items(name, value, set())


def _items(name: str, value: Any, around: set[int]) -> Iterator[tuple[str, Any]]:
    """The modules in a value: itself, or those in nested lists and dictionaries."""
    if isinstance(value, tf.Module) or (_is_of_keras(type(value)) and hasattr(value, "call")):
        yield name, value
    elif isinstance(value, (list, tuple, Mapping)) and id(value) not in around:
        inside = {*around, id(value)}
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _items(f"{name}.{key}", item, inside)
