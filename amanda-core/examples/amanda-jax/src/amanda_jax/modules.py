"""Modules: ``jax.named_scope``, and the calls of modules of Flax and Equinox.

JAX's transformations and optimizers copy modules. Ids need an object that stays: a :class:`Place`
for each path in a model. A model is known by its parameters, and by what was made of these.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import jax
from amanda.driver import ParameterName, PatchSet

from amanda_jax._internals import LINEN_CALL, NamedScope, current_trace, evaluates
from amanda_jax.marks import Marks
from amanda_jax.plugin import JaxDriver

NOTHING: Mapping[str, Any] = {}

NAME = re.compile(r"[A-Za-z_][\w.-]*")
"""The names of scopes that are modules: not those of ``jnp.einsum``, nor of layers of Equinox."""


class Place:
    """Stands for a module; the name of its class is that of the module."""


@attrs.frozen(eq=False)
class Running:
    """A module call that runs.

    Attributes:
        module: the module; of a named scope, the scope.
        model: identifies the outermost one.
        path: within the outermost one.
        call: its context.
    """

    module: Any
    model: str
    path: str
    call: AbstractContextManager[Any]


class Thread(threading.local):
    """State of one thread.

    Attributes:
        running: the module calls, the innermost last.
        paths: by id of the modules of the outermost one, their paths.
    """

    def __init__(self) -> None:
        self.running: list[Running] = []
        self.paths: dict[int, str] = {}


class Modules:
    """Reports the module calls of a program to its driver.

    Args:
        driver: a driver of JAX.
        parameters: gets the names of parameters.
    """

    def __init__(self, driver: JaxDriver, parameters: Marks) -> None:
        self._driver = driver
        self._parameters = parameters
        self._thread = Thread()
        self._models: dict[tuple[str, str | None, str | None], str] = {}
        self._places: dict[tuple[str, str], Place] = {}
        self._patched: set[Any] = set()
        self._bases: set[Any] = set()

    def patch(self, patches: PatchSet) -> None:
        """See named scopes, and the modules of the libraries that are imported."""
        if not self._patched:
            self._patched.add(NamedScope)
            patches.wrap(NamedScope, "__enter__", self._entering)
            patches.wrap(NamedScope, "__exit__", self._exiting)
        for linen in bases("flax.linen") - self._patched:
            self._patched.add(linen)
            patches.wrap(linen, LINEN_CALL, self._calling_linen)
        for base in bases("flax.nnx", "equinox") - self._bases:
            self._bases.add(base)
            self._patch_classes(patches, base)

    def _patch_classes(self, patches: PatchSet, base: Any) -> None:
        """See the calls of the modules of a library's classes, which may be defined later."""
        pending = [base]
        while pending:
            cls = pending.pop()
            pending += cls.__subclasses__()
            self._patch_class(patches, cls)

        def making(vanilla: Callable[..., Any]) -> Callable[..., Any]:
            def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
                if issubclass(cls, base):
                    self._patch_class(patches, cls)
                with self._driver.in_phase("setup"):
                    return vanilla(cls, *args, **kwargs)

            return make

        patches.wrap(type(base), "__call__", making)

    def _patch_class(self, patches: PatchSet, cls: Any) -> None:
        if cls not in self._patched:
            self._patched.add(cls)
            # Equinox's own are wrappers of functions, but for its layers.
            library, _, rest = cls.__module__.partition(".")
            if "__call__" in vars(cls) and (library != "equinox" or rest.startswith("nn")):
                patches.wrap(cls, "__call__", self._calling)

    # -- calls ------------------------------------------------------------

    @property
    def _sees(self) -> bool:
        return self._driver.is_active and evaluates(current_trace())

    def _begun(
        self,
        module: Any,
        name: str,
        path: str,
        inputs: Sequence[Any] = (),
        members: Mapping[str, Any] = NOTHING,
    ) -> Callable[[Any], Any]:
        """Begin the call of a module; the function that is to get its result.

        Args:
            name: of the module within the one that calls it.
            path: within the outermost module.
            members: of an outermost module, its modules and parameters by path.
        """
        running = self._thread.running
        model = running[-1].model if running else self._model(name, members)
        place = self._place(model, path, name)
        inner = [(p, self._place(model, p, p)) for p, m in members.items() if not is_array(m)]
        call = self._driver.module_call(place, lambda: inner, inputs)
        returned = call.__enter__()
        running.append(Running(module, model, path, call))
        return returned

    def _model(self, name: str, members: Mapping[str, Any]) -> str:
        """What identifies a model: the name of its class, with a number from the second one on."""
        arrays = {path: value for path, value in members.items() if is_array(value)}
        if not arrays:
            return name
        # A part of a model that is called by itself is another one.
        known = next(filter(None, map(self._parameters.name, arrays.values())), None)
        origin = name, getattr(known, "model", None), known
        if known is None or origin not in self._models:
            number = sum(other[0] == name for other in self._models)
            model = f"{name}@{number}" if number else name
            for path, value in arrays.items():
                self._parameters.mark(value, ParameterName(path, model))
            first = known or next(iter(arrays))
            self._models[name, origin[1] or model, first] = model
            return model
        return self._models[origin]

    def _ended(self, kind: Any = None, error: Any = None, traceback: Any = None) -> None:
        self._thread.running.pop().call.__exit__(kind, error, traceback)

    def _place(self, model: str, path: str, name: str) -> Place:
        if (model, path) not in self._places:
            self._places[model, path] = type(name, (Place,), {})()
        return self._places[model, path]

    def _below(self, name: str) -> str:
        running = self._thread.running
        return f"{running[-1].path}.{name}".lstrip(".") if running else ""

    def _is_running(self, module: Any) -> bool:
        return bool(self._thread.running) and self._thread.running[-1].module is module

    def _call(self, call: Callable[[], Any], *begun: Any) -> Any:
        returned = self._begun(*begun)
        try:
            result = returned(call())
        except BaseException:
            self._ended(*sys.exc_info())
            raise
        self._ended()
        return result

    # -- the patches ------------------------------------------------------

    def _entering(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def enter(scope: Any) -> Any:
            name, frame = scope.name, sys._getframe(1)
            library = str(frame.f_globals.get("__name__")).partition(".")[0]
            is_module = NAME.fullmatch(name) and not name.startswith("eqx.") and library != "flax"
            if is_module and self._sees:
                self._begun(scope, name, self._below(name))
            return vanilla(scope)

        return enter

    def _exiting(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def exit(scope: Any, *error: Any) -> Any:
            vanilla(scope, *error)
            if self._is_running(scope):
                self._ended(*error)

        return exit

    def _calling_linen(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
            if not self._sees or method.__name__ == "setup" or self._is_running(module):
                return vanilla(module, method, args, kwargs)
            if module.scope is not None and module.is_initializing():
                with self._driver.in_phase("setup"):
                    return vanilla(module, method, args, kwargs)
            name, path, found = type(module).__name__, "", {}
            if self._thread.running:
                name = module.name or name
                path = self._below(name)
            elif module.scope is not None:
                found = dict(members(dict(module.variables).get("params"), ""))
            inputs = [*args, *kwargs.values()]
            return self._call(
                lambda: vanilla(module, method, args, kwargs), module, name, path, inputs, found
            )

        return call

    def _calling(self, vanilla: Any) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            bound = vanilla.__get__(module, type(module))
            if not self._sees or self._is_running(module):
                return bound(*args, **kwargs)
            name, thread, found = type(module).__name__, self._thread, {}
            if not thread.running:
                found = dict(members(module, ""))
                thread.paths = {id(m): p for p, m in reversed(found.items())}
            path = thread.paths.get(id(module)) if thread.running else ""
            path = self._below(name) if path is None else path
            inputs = [*args, *kwargs.values()]
            return self._call(lambda: bound(*args, **kwargs), module, name, path, inputs, found)

        return call


def is_array(value: Any) -> bool:
    """True for an array of numbers, not of keys or counts."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def members(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of the modules and arrays in a module, itself included."""
    if hasattr(value, "get_value"):  # a variable of Flax
        value = value.get_value()
    if is_array(value):
        yield path, value
        return
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif is_module(value):
        yield path, value
        items = [(k, v) for k, v in vars(value).items() if not k.startswith("_")]
    else:
        items = ()
    for key, inner in items:
        yield from members(inner, f"{path}.{key}".lstrip("."))


def bases(*libraries: str) -> set[Any]:
    """The base classes of modules in the libraries that are imported."""
    found = [getattr(sys.modules.get(name), "Module", None) for name in libraries]
    return {base for base in found if base is not None}


def is_module(value: Any) -> bool:
    """True for a module of Equinox or ``flax.nnx``."""
    return isinstance(value, tuple(bases("flax.nnx", "equinox")))
