"""Follows the calls of modules of ``tf.Module``, as those of Keras layers are followed.

A call of a module is one of its method ``__call__``, from the import of TensorFlow beside Amanda
on. That of a class is replaced (:func:`following`); one that is a ``tf.function`` stays, and is
noted where it is traced::

    install()
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import tensorflow as tf

from amanda.patching import PatchSet
from amanda_tensorflow import _internals
from amanda_tensorflow.keras_layers.module_names import is_plain_class, is_plain_module
from amanda_tensorflow.keras_layers.recording import EAGER, note_call

_PATCHES = PatchSet()
_INSTALLED: list[bool] = []
_FOLLOWING: weakref.WeakSet[Any] = weakref.WeakSet()


def following(vanilla: types.FunctionType) -> Any:
    """The function that takes the place of ``__call__`` in a class of modules."""

    @functools.wraps(vanilla)
    def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not _internals.executing_eagerly():
            return note_call(_internals.converted(vanilla), module, args, kwargs)
        follow = EAGER.call
        if follow is None:
            return vanilla(module, *args, **kwargs)
        return follow(vanilla, module, args, kwargs)

    _internals.leave_unconverted(__call__)
    _FOLLOWING.add(__call__)
    return __call__


def install() -> None:
    """Note the calls of modules from now on; harmless when called twice."""
    if _INSTALLED:
        return
    _INSTALLED.append(True)
    _PATCHES.wrap(_internals.FUNC_GRAPH, "func_graph_from_py_func", _tracing)
    _PATCHES.wrap(tf.Module, "__init_subclass__", _defining)
    waiting = type.__subclasses__(tf.Module)
    for cls in waiting:
        waiting += type.__subclasses__(cls)
        _follow(cls)


def _follow(cls: type[Any]) -> None:
    """Follow the calls of a class of modules that has a method ``__call__`` of its own."""
    found = vars(cls).get("__call__")
    is_vanilla = isinstance(found, types.FunctionType) and found not in _FOLLOWING
    if is_vanilla and is_plain_class(cls):
        cls.__call__ = following(found)


def _defining(vanilla: Any) -> Any:
    """The patch of ``tf.Module.__init_subclass__``, which runs where a class is defined."""

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:  # noqa: N807
        # The next class after it, which may be one of the program's.
        super(tf.Module, cls).__init_subclass__(**kwargs)
        _follow(cls)

    return classmethod(__init_subclass__)  # type: ignore[arg-type]


def _tracing(vanilla: Any) -> Any:
    """The patch of ``func_graph_from_py_func``, which traces a ``tf.function``."""

    @functools.wraps(vanilla)
    def func_graph_from_py_func(name: Any, python_func: Any, *args: Any, **kwargs: Any) -> Any:
        module = _internals.called_instance(python_func)
        if not is_plain_module(module):
            return vanilla(name, python_func, *args, **kwargs)

        def noted(*inner_args: Any, **inner_kwargs: Any) -> Any:
            def run(_: Any, *args: Any, **kwargs: Any) -> Any:
                return python_func(*args, **kwargs)

            return note_call(run, module, inner_args, inner_kwargs)

        return vanilla(name, noted, *args, **kwargs)

    return func_graph_from_py_func
