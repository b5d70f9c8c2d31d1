"""Replaced attributes of a framework, put back exactly.

A driver replaces attributes in ``attach()`` and puts them back in ``detach()``::

    patches = PatchSet()
    patches.wrap(framework, "execute", lambda vanilla: instrumented(vanilla))
    patches.set(framework.Tensor, "backward", own_backward)
    ...
    patches.undo()
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ABSENT: Any = object()


class PatchSet:
    """Replaces attributes of modules, classes, functions and other objects, and puts them back.

    An attribute of a class is read from the class's own ``__dict__``, so that static and class
    methods come back as the descriptors that they are, and an attribute that was only inherited
    is removed again. An attribute that is kept by a data descriptor of the object's type, such as
    ``__code__`` of a function, a slot or a property with a setter, is read and put back through
    the descriptor. Annotations, and the module of a class, are not to be set: Python keeps further
    entries for them (3.13, 3.14).
    """

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    def __len__(self) -> int:
        return len(self._replaced)

    def set(self, target: Any, name: str, value: Any, *, create: bool = False) -> None:
        """Set ``target.name`` to `value`.

        Args:
            target: a module, class, function or other object.
            name: the attribute.
            value: its value until :meth:`undo`.
            create: allow an attribute that `target` does not have yet.

        Raises:
            AttributeError: there is no such attribute and `create` is not given, or it cannot
                be set.
        """
        replaced = _Replaced.read(target, name)
        if replaced.value is _ABSENT and not create:
            raise AttributeError(f"{target!r} has no attribute {name!r} to patch")
        self._set(replaced, value)

    def _set(self, replaced: _Replaced, value: Any) -> None:
        # Noted first: an interrupt may come next.
        self._replaced.append(replaced)
        try:
            setattr(replaced.target, replaced.name, value)
            replaced.shadows = not replaced.was_own and replaced.name in _own(replaced.target)
        except Exception:
            self._replaced.pop()
            raise

    def wrap(self, target: Any, name: str, wrapper: Callable[[Any], Any]) -> Any:
        """Replace ``target.name`` by ``wrapper(vanilla)``.

        Args:
            target: a module, class, function or other object.
            name: the attribute.
            wrapper: gets the attribute as it is, of a class as its ``__dict__`` holds it;
                returns what takes its place.

        Returns:
            The vanilla attribute.

        Raises:
            AttributeError: there is no such attribute, or it cannot be set.
        """
        # Checked before it is read, since reading may create it.
        replaced = _Replaced.read(target, name)
        vanilla = _ABSENT
        if not _is_described(target, name):
            vanilla = inspect.getattr_static(target, name, _ABSENT)
        if vanilla is _ABSENT:
            vanilla = getattr(target, name)
        self._set(replaced, wrapper(vanilla))
        return vanilla

    def undo(self) -> None:
        """Put every attribute back, the last one first; harmless when called twice.

        Raises:
            Exception: an attribute cannot be put back; all others have been.
        """
        failed: Exception | None = None
        while self._replaced:
            # An interrupt leaves it in the list, so that another call of undo() goes on here.
            replaced = self._replaced[-1]
            try:
                replaced.restore()
            except Exception as error:
                failed = failed or error
            self._replaced.pop()
        if failed is not None:
            raise failed


def named_as(vanilla: Any, function: _Function) -> _Function:
    """`function` with the name and parameters of the one that it replaces.

    Python's errors about wrong arguments have the name; with parameters of the same names they are
    the errors of the original. ``functools.wraps`` would take the module, too, and link the two
    functions: it is for functions whose origin no program asks for.
    """
    # Another library may have put an object without a name there.
    function.__name__ = getattr(vanilla, "__name__", function.__name__)
    function.__qualname__ = getattr(vanilla, "__qualname__", function.__qualname__)
    return function


def hide_own_frames(error: BaseException) -> None:
    """Remove a patch's own frames from the traceback of an exception that it passes on.

    For patches that stay where no scope is open; the program's tracebacks are vanilla then::

        with OWN_FRAMES_HIDDEN:
            return vanilla(*args, **kwargs)

    The frames of the package that handles the exception are removed, up to the first frame of
    another package. If all frames are of that package, it has raised the exception and the frames
    stay; but if the handler's frame is the only one, a function in C has raised it.
    """
    handler = kept = error.__traceback__
    package = _package(handler)
    while kept is not None and _package(kept) == package:
        kept = kept.tb_next
    if handler is not None and (kept is not None or handler.tb_next is None):
        # `raise` does not add the frame that has caught the exception once more.
        error.__traceback__ = kept


class _OwnFramesHidden:
    """Within it, an exception that is passed on loses the frames of :func:`hide_own_frames`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            hide_own_frames(error)


OWN_FRAMES_HIDDEN = _OwnFramesHidden()


def _package(traceback: types.TracebackType | None) -> str:
    """The package in whose code a frame is."""
    module = traceback.tb_frame.f_globals.get("__name__", "") if traceback is not None else ""
    return str(module).partition(".")[0]


@attrs.define(eq=False)
class _Replaced:
    """An attribute as it was.

    Attributes:
        target, name: the attribute.
        value: its value; ``_ABSENT`` if it did not exist.
        was_own: True if it was in the object's own ``__dict__``.
        shadows: True if the replacement only shadows an attribute of the type, so that removing it
            restores that. None until it is set.
    """

    target: Any
    name: str
    value: Any
    was_own: bool = False
    shadows: bool | None = None

    @classmethod
    def read(cls, target: Any, name: str) -> _Replaced:
        own = _own(target)
        was_own = name in own
        if was_own and (inspect.isclass(target) or not _is_described(target, name)):
            return cls(target, name, own[name], was_own)
        return cls(target, name, getattr(target, name, _ABSENT), was_own)

    def restore(self) -> None:
        """Put it back; harmless when called twice, and where it was not replaced."""
        if self.shadows is None:  # an interrupt has come first
            self.shadows = not self.was_own and self.name in _own(self.target)
            current = getattr(self.target, self.name, _ABSENT)
            if not self.shadows and (current is self.value or inspect.ismethod(current)):
                return
        if self.shadows:
            if self.name in _own(self.target):
                delattr(self.target, self.name)
        elif self.value is not _ABSENT:
            setattr(self.target, self.name, self.value)
        elif getattr(self.target, self.name, _ABSENT) is not _ABSENT:
            delattr(self.target, self.name)


def _own(target: Any) -> Mapping[str, Any]:
    """The object's own ``__dict__``; empty for an object with slots only."""
    own: Mapping[str, Any] = getattr(target, "__dict__", {})
    return own


def _is_described(target: Any, name: str) -> bool:
    """True if a data descriptor of the object's type keeps the attribute."""
    for cls in type(target).__mro__:
        if name in vars(cls):
            return inspect.isdatadescriptor(vars(cls)[name])
    return False
