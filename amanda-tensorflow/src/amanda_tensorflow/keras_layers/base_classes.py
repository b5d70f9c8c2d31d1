"""Patches a method of the base class of Keras' layers, or of its optimizers, once that is defined.

Keras 3 and Keras 2, which is called ``tf_keras``, are imported before or after this package::

    layers = BaseClass("layers", "Layer", {"keras": "__call__"}, wrapper)
    layers.install()
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from amanda.python.patching import PatchSet
from amanda.registry.import_hook import Watch


class BaseClass:
    """A base class of Keras, by package, and the patch of a method of it.

    Args:
        part: the module in the package that has the class.
        name: that of the class.
        methods: by package, the name of the method.
        wrapper: gets the method; returns what takes its place.
    """

    def __init__(
        self, part: str, name: str, methods: Mapping[str, str], wrapper: Callable[[Any], Any]
    ) -> None:
        self._part = part
        self._name = name
        self._methods = methods
        self._wrapper = wrapper
        self._patches = PatchSet()
        self._patched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: set[str] = set()

    def install(self) -> None:
        """Patch the method now or as soon as Keras is imported; harmless when called twice."""
        for package in self._methods:
            if self._found(package) is not None:
                self._patch(package)
            # Keras itself imports TensorFlow, before it defines its classes.
            watched = f"{package}.{self._part}" if package in sys.modules else package
            if watched not in sys.modules and watched not in self._watched:
                Watch(self._patch).add([watched])
                # Last: what an interrupt comes before is done again.
                self._watched.add(watched)

    def _patch(self, module: str) -> None:
        """Patch the method in a package that is imported, or in its part."""
        package = module.partition(".")[0]
        found = self._found(package)
        is_new = found is not None and found not in self._patched
        if is_new and _computes_with_tensorflow(package):
            self._patched.add(found)
            self._patches.wrap(found, self._methods[package], self._wrapper)

    def _found(self, package: str) -> Any:
        """The class; None if the package has not defined it yet."""
        module = sys.modules.get(f"{package}.{self._part}")
        module = module or getattr(sys.modules.get(package), self._part, None)
        found = getattr(module, self._name, None)
        return found if hasattr(found, self._methods[package]) else None


def _computes_with_tensorflow(package: str) -> bool:
    """True if a package of Keras has TensorFlow as its backend: Keras 3 may have another one."""
    backend = getattr(sys.modules.get(f"{package}.config"), "backend", None)
    return backend is None or backend() == "tensorflow"
