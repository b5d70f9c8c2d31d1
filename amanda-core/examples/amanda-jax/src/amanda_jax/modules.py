"""Modules: ``jax.named_scope``, and the calls of modules of Flax and Equinox.

JAX's transformations copy modules of Equinox and ``flax.nnx``. Ids need an object that stays: a
:class:`Place` for each path in a model of each name.
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
from amanda.driver import PatchSet

from amanda_jax._internals import NamedScope, current_trace, evaluates
from amanda_jax.plugin import JaxDriver

NAME = re.compile(r"[A-Za-z_][\w.-]*")
"""The names of scopes that are modules: not those of ``jnp.einsum``, nor of layers of Equinox."""


class Place:
    """Stands for a module; the name of its class is that of the module."""


@attrs.frozen(eq=False)
class Running:
    """A module call that runs.

    Attributes:
        module: the module; of a named scope, the scope.
        path: within the outermost one.
        call: its context.
    """

    module: Any
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
        note_parameter: called with the name and the array of each parameter of an outermost module.
    """

    def __init__(self, driver: JaxDriver, note_parameter: Callable[[str, Any], None]) -> None:
        self._driver = driver
        self._note_parameter = note_parameter
        self._thread = Thread()
        self._places: dict[tuple[str, str], Place] = {}
        self._patched: set[Any] = set()

    def patch(self, patches: PatchSet) -> None:
        """See named scopes, and the modules of the libraries that are imported."""
        if not self._patched:
            self._patched.add(NamedScope)
            patches.wrap(NamedScope, "__enter__", self._entering)
            patches.wrap(NamedScope, "__exit__", self._exiting)
        linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
        if linen is not None and linen.Module not in self._patched:
            self._patched.add(linen.Module)
            patches.wrap(linen.Module, "_call_wrapped_method", self._calling_linen)
        for base in (getattr(nnx, "Module", None), getattr(equinox(), "Module", None)):
            if base is not None and base not in self._patched:
                self._patched.add(base)
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
            if "__call__" in vars(cls):
                patches.wrap(cls, "__call__", self._calling)

    # -- calls ------------------------------------------------------------

    @property
    def _sees(self) -> bool:
        return self._driver.is_active and evaluates(current_trace())

    def _begun(
        self, module: Any, name: str, path: str, inputs: Sequence[Any], children: Any = ()
    ) -> Callable[[Any], Any]:
        """Begin the call of a module; the function that is to get its result.

        Args:
            name: of the module within the one that calls it.
            path: within the outermost module.
            children: paths of the modules in an outermost one.
        """
        thread = self._thread
        root = type(thread.running[0].call.place).__name__ if thread.running else name
        named = [(p, self._place(root, p, p)) for p in children]
        place = self._place(root, path, name)
        call = Call(place, self._driver.module_call(place, lambda: named, inputs))
        returned = call.__enter__()
        thread.running.append(Running(module, path, call))
        return returned

    def _ended(self, error: Any = (None, None, None)) -> None:
        self._thread.running.pop().call.__exit__(*error)

    def _place(self, root: str, path: str, name: str) -> Place:
        found = self._places.get((root, path))
        if found is None:
            found = self._places.setdefault((root, path), type(name, (Place,), {})())
        return found

    def _below(self, name: str) -> str:
        running = self._thread.running
        return f"{running[-1].path}.{name}".lstrip(".") if running else ""

    def _is_running(self, module: Any) -> bool:
        return bool(self._thread.running) and self._thread.running[-1].module is module

    def _call(
        self, module: Any, name: str, path: str, children: Any, args: Any, call: Callable[[], Any]
    ) -> Any:
        returned = self._begun(module, name, path, args, children)
        try:
            result = returned(call())
        except BaseException:
            self._ended(sys.exc_info())
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
                self._begun(scope, name, self._below(name), ())
            return vanilla(scope)

        return enter

    def _exiting(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def exit(scope: Any, *error: Any) -> Any:
            vanilla(scope, *error)
            if self._is_running(scope):
                self._ended(error)

        return exit

    def _calling_linen(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
            if not self._sees or method.__name__ == "setup" or self._is_running(module):
                return vanilla(module, method, args, kwargs)
            if module.scope is not None and module.is_initializing():
                with self._driver.in_phase("setup"):
                    return vanilla(module, method, args, kwargs)
            name, path = type(module).__name__, ""
            if self._thread.running:
                name = module.name or name
                path = self._below(name)
            elif module.scope is not None:
                for keys, value in jax.tree_util.tree_leaves_with_path(dict(module.variables)):
                    self._note_parameter(".".join(str(key.key) for key in keys[1:]), value)
            inputs = [*args, *kwargs.values()]
            return self._call(
                module, name, path, (), inputs, lambda: vanilla(module, method, args, kwargs)
            )

        return call

    def _calling(self, vanilla: Any) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            bound = vanilla.__get__(module, type(module))
            if not self._sees or self._is_running(module):
                return bound(*args, **kwargs)
            name, thread = type(module).__name__, self._thread
            children: Mapping[str, Any] = {}
            if not thread.running:
                found = dict(members(module, ""))
                children = {p: m for p, m in found.items() if not is_array(m)}
                thread.paths = {id(m): p for p, m in reversed(children.items())}
                for path, value in found.items():
                    if is_array(value):
                        self._note_parameter(path, value)
            path = thread.paths.get(id(module)) if thread.running else ""
            path = self._below(name) if path is None else path
            inputs = [*args, *kwargs.values()]
            return self._call(
                module, name, path, children, inputs, lambda: bound(*args, **kwargs)
            )

        return call


@attrs.frozen(eq=False)
class Call(AbstractContextManager[Any]):
    """The context of a module call, with the place of the module."""

    place: Place
    _context: AbstractContextManager[Any]

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def equinox() -> Any:
    """Equinox, if its import has ended; None otherwise."""
    return sys.modules.get("equinox")


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


def is_module(value: Any) -> bool:
    """True for a module of Equinox or ``flax.nnx``."""
    nnx = sys.modules.get("flax.nnx")
    kinds = [library.Module for library in (nnx, equinox()) if hasattr(library, "Module")]
    return isinstance(value, tuple(kinds))
