"""Follows the calls of modules of ``tf.Module``, as those of Keras layers are followed.

A call of a module is one of its method ``__call__``, or of another one that is decorated with
``tf.Module.with_name_scope``, from the import of TensorFlow beside Amanda on. These methods of a
class are replaced (:func:`following`); one that is a ``tf.function`` stays, and is noted where it
is traced::

    install()
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import tensorflow as tf

from amanda.python.patching import OWN_FRAMES_HIDDEN, PatchSet
from amanda_tensorflow import _internals
from amanda_tensorflow.keras_layers.module_names import is_plain_class, is_plain_module
from amanda_tensorflow.keras_layers.recording import EAGER, note_call

_PATCHES = PatchSet()
_INSTALLED: list[bool] = []
_FOLLOWING: weakref.WeakSet[Any] = weakref.WeakSet()


def following(vanilla: types.FunctionType) -> Any:
    """The function that replaces a method by which modules are called, in their class."""
    in_graphs = _internals.undecorated(vanilla)

    @functools.wraps(vanilla)
    def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        with OWN_FRAMES_HIDDEN:
            if not _internals.executing_eagerly():
                return note_call(_internals.converted(in_graphs), module, args, kwargs)
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
    """Follow the calls by the methods that a class of modules has of its own."""
    if not is_plain_class(cls):
        return
    for name, found in list(vars(cls).items()):
        is_vanilla = isinstance(found, types.FunctionType) and found not in _FOLLOWING
        if is_vanilla and _calls(name, found):
            setattr(cls, name, following(found))


def _calls(name: str, method: Any) -> bool:
    """True if a method is one by which a module is called."""
    if name == "__call__":
        return True
    # What makes a module and its variables computes nothing.
    is_other = name.startswith("__") or name == "build"
    return not is_other and _internals.is_in_name_scope(method)


def _defining(vanilla: Any) -> Any:
    """The patch of ``tf.Module.__init_subclass__``, which runs where a class is defined."""

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:  # noqa: N807
        # The next class after it, which may be one of the program's.
        with OWN_FRAMES_HIDDEN:
            super(tf.Module, cls).__init_subclass__(**kwargs)
        _follow(cls)

    return classmethod(__init_subclass__)  # type: ignore[arg-type]


def _tracing(vanilla: Any) -> Any:
    """The patch of ``func_graph_from_py_func``, which traces a ``tf.function``."""

    @functools.wraps(vanilla)
    def func_graph_from_py_func(name: Any, python_func: Any, *args: Any, **kwargs: Any) -> Any:
        module = _internals.called_instance(python_func)

        def noted(*inner_args: Any, **inner_kwargs: Any) -> Any:
            def run(_: Any, *args: Any, **kwargs: Any) -> Any:
                return python_func(*args, **kwargs)

            with OWN_FRAMES_HIDDEN:
                return note_call(run, module, inner_args, inner_kwargs)

        with OWN_FRAMES_HIDDEN:
            traced = noted if is_plain_module(module) else python_func
            return vanilla(name, traced, *args, **kwargs)

    return func_graph_from_py_func
