"""Patches for PyTorch's tracers and compiler, and for the native fast paths.

The driver is inactive while ``torch.export``, ``make_fx``, ``torch.fx`` or ``torch.jit`` record a
model: otherwise its mode, module calls and override checks would be recorded, too. A function
compiled with ``torch.compile`` runs as it is captured, or eagerly, in covered threads, so that its
operators are seen.

``has_torch_function`` ignores our mode, so that modules with a fused native path
(``nn.MultiheadAttention`` in eval mode) still take it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from amanda.engine.frames import warn_of_lost_changes
from amanda.python.patching import PatchSet, named_as
from amanda.python.signatures import signature_of
from amanda.registry import import_hook
from amanda.registry.proofs import is_proving
from amanda.state import STATE, find_active
from amanda_torch import _internals
from amanda_torch.eager.fused_modules import ASKING
from amanda_torch.eager.interceptors import LOCAL, Interceptor
from amanda_torch.eager.module_calls import CallPatch, trace


class Tracers:
    """The patches of this module, attached and detached together."""

    def __init__(self, capture: Callable[[Any, Interceptor], Any]) -> None:
        """Create the patches without attaching them.

        Args:
            capture: returns the callback that replaces Dynamo's own for a compiled function under
                an interceptor, or the reason why the function runs eagerly.
        """
        self._patches = PatchSet()
        self._checks = PatchSet()
        self._call = CallPatch()
        self._capture = capture
        self._has_checks = True
        self._has_mode = True
        self._watches: list[import_hook.Watch] = []
        self._said_compiled = False

    def attach(
        self,
        called_modules: Callable[[Any], Any] | None,
        fast_paths: bool = True,
        compiled: bool = True,
        has_mode: bool = True,
    ) -> None:
        """Patch the imported tracers now, and others when they are imported.

        Args:
            called_modules: returns the replacement of ``nn.Module.__call__``; None to leave it.
            fast_paths: True to patch the checks by which modules choose their native fast paths.
            compiled: True to run compiled functions captured or eagerly.
            has_mode: True if our mode is on the stack that PyTorch's own checks read.
        """
        self._has_checks = fast_paths
        self._has_mode = has_mode
        self._when_imported(_internals.COMPILER, self._prepare_compiler)
        self._patch_checks()
        self._patch([(_internals.FX_TRACE, self._tracing)], _internals.FX)
        if called_modules is not None:
            self._call.replace(called_modules)
        for module, notes in _internals.COMPILER_NOTES.items():
            self._when_imported(module, functools.partial(self._patch_found, notes))
        for module, wrappers in self._entries(compiled).items():
            self._when_imported(module, functools.partial(self._patch, wrappers))

    def _entries(self, compiled: bool) -> Mapping[str, list[tuple[str, Callable[[Any], Any]]]]:
        """The replaced attributes of PyTorch, and the functions that make the replacements, by
        module."""
        entries: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
            module: [(path, self._suspending) for path in paths]
            for module, paths in _internals.TRACERS.items()
        }
        # Not the current attribute: another thread may have begun a trace.
        call = self._call.call
        # While one thread traces, modules of other threads are called by this.
        entries[_internals.FX] = [(_internals.FX_MODULE_CALL, lambda _: call)]
        entries[_internals.COMPILER_MODULE] = [
            *([(_internals.COMPILER_CALLBACK, self._uncompiled)] if compiled else ()),
            (_internals.COMPILED_MODULE_SETUP, _with_vanilla_call),
            *(
                (name, functools.partial(self._capturing, keyword))
                for name, keyword in _internals.COMPILER_CAPTURES.items()
            ),
        ]
        # Not in its own module, from which Dynamo's other modules import it.
        entries[_internals.COMPILER] = [(_internals.COMPILER_MODES, _keeping_mode)]
        entries[_internals.PROFILER] = [(_internals.PROFILER_START, _with_vanilla_class)]
        entries[_internals.COMPILER_MODULES] = [(_internals.COMPILER_MODULE_CALL, lambda _: call)]
        return entries

    def _when_imported(self, module: str, patch: Callable[[str], None]) -> None:
        if module in sys.modules:
            patch(module)
        else:
            watch = import_hook.Watch(patch)
            # Kept before it is put in place: detach() finds it also after an interrupt.
            self._watches.append(watch)
            watch.add([module])

    def detach(self) -> None:
        """Undo every patch."""
        while self._watches:
            self._watches[-1].close()
            self._watches.pop()
        self._call.restore()
        self._patches.undo()
        # Another thread may import the compiler, which would patch again.
        self._has_checks = False
        self._checks.undo()

    def _patch(self, wrappers: Sequence[tuple[str, Callable[[Any], Any]]], module: str) -> None:
        for path, wrapper in wrappers:
            owner: Any = sys.modules[module]
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            if hasattr(owner, name):
                self._patches.wrap(owner, name, wrapper)
                continue
            _internals.warn_program(
                f"PyTorch {torch.__version__} has no {module}.{path}: under amanda.apply() it "
                "would record Amanda along with the model; install a newer amanda-torch"
            )

    def _patch_found(self, wrappers: Mapping[str, Callable[[Any], Any]], module: str) -> None:
        """Patch the existing attributes of a module; without missing ones less is captured, but
        correctly."""
        for path, wrapper in wrappers.items():
            owner, _, name = path.rpartition(".")
            found = getattr(sys.modules[module], owner, None) if owner else sys.modules[module]
            if hasattr(found, name):
                self._patches.wrap(found, name, wrapper)

    # -- tracing ----------------------------------------------------------

    def _suspending(self, vanilla: Any) -> Any:
        # TorchScript looks up the names that a class uses in the frame of the program.
        names = list(signature_of(vanilla).parameters)
        is_counting_frames = _internals.FRAMES_UP in names
        place = names.index(_internals.FRAMES_UP) if is_counting_frames else 0

        @_internals.not_counted_by_warnings
        @functools.wraps(vanilla)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if is_counting_frames and len(args) > place:
                args = (*args[:place], args[place] + 1, *args[place + 1 :])
            elif is_counting_frames:
                kwargs[_internals.FRAMES_UP] = kwargs.get(_internals.FRAMES_UP, 0) + 1
            interceptor = LOCAL.interceptor
            is_seen = interceptor is not None and not interceptor.is_quiet()
            if is_seen and vanilla.__name__ == _internals.EXPORT:
                warn_of_lost_changes(("torch",))
            with self.suspended():
                return vanilla(*args, **kwargs)

        return traced

    def _tracing(self, vanilla: Any) -> Any:
        suspending = self._suspending(vanilla)

        @functools.wraps(vanilla)
        def traced(*args: Any, **kwargs: Any) -> Any:
            return trace(suspending, *args, **kwargs)

        return traced

    def _capturing(self, keyword: str, vanilla: Any) -> Any:
        """The patch by which Dynamo's ``explain`` and ``export`` compile as without a scope."""

        @functools.wraps(vanilla)
        def optimize(*args: Any, **kwargs: Any) -> Any:
            compiler = vanilla(*args, **kwargs)
            if not kwargs.get(keyword):
                return compiler

            def capturing(function: Any) -> Any:
                compiled = compiler(function)

                def run(*args: Any, **kwargs: Any) -> Any:
                    with self.suspended():
                        return compiled(*args, **kwargs)

                return run

            return capturing

        return optimize

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it, the current thread runs as without a scope."""
        interceptor = LOCAL.interceptor
        if interceptor is None:
            yield
            return
        listening, above = interceptor.is_listening(), 0
        try:
            LOCAL.interceptor = None
            if listening:
                above = interceptor.exit()
            yield
        finally:
            # First, so that the end of the scope drops it after an interrupt.
            LOCAL.interceptor = interceptor
            if listening and not interceptor.is_listening():
                interceptor.enter(above)

    # -- compiling --------------------------------------------------------

    def _uncompiled(self, vanilla: Any) -> Any:
        """The patch by which compiled functions run captured or eagerly in covered threads; the
        latter is reported."""

        @functools.partial(named_as, vanilla)
        def callback_from_stance(callback: Any) -> Any:
            # Called several times in each call of a compiled function.
            if callback is None or callback is False or not callable(callback):
                return vanilla(callback)
            interceptor = LOCAL.interceptor
            if interceptor is None or interceptor.is_quiet():
                return vanilla(callback)
            if not _is_covered():
                if not interceptor.is_listening():
                    return vanilla(callback)
                # Dynamo would write the mode into the graph.
                _internals.count_eager_as_compiled()
                return None
            captured: Any = "torch.compiler.set_stance() is in force"
            if vanilla(callback) is callback:
                captured = self._capture(callback, interceptor)
                if not isinstance(captured, str):
                    _internals.count_captures_apart()
                    return captured
            interceptor.note_compiled(f"function {id(callback)}", f"eagerly ({captured})")
            self._say_uncompiled(captured)
            _internals.count_eager_as_compiled()
            return None

        return callback_from_stance

    def _say_uncompiled(self, reason: str) -> None:
        if not self._said_compiled and not is_proving():
            self._said_compiled = True
            _internals.warn_program(
                "a function compiled with torch.compile runs eagerly under amanda.apply(), "
                f"so that its operators are seen: {reason}"
            )

    # -- override checks --------------------------------------------------

    def _prepare_compiler(self, _: str) -> None:
        """Have Dynamo look up PyTorch's own checks now, which it does once; ours call them."""
        self._checks.undo()
        _internals.look_up_handlers()
        self._patch_checks()

    def _patch_checks(self) -> None:
        if len(self._checks) or not self._has_checks:
            return
        self._checks.wrap(torch.overrides, "has_torch_function", _overrides_of_modules)
        for module in _internals.OVERRIDE_CHECKERS if self._has_mode else ():
            for name, check in zip(_internals.OVERRIDE_CHECKS, _CHECKS, strict=True):
                self._checks.wrap(module, name, check)


def _with_vanilla_call(vanilla: Any) -> Any:
    """Have a compiled module bind the vanilla call of its module, which it keeps."""

    @functools.wraps(vanilla)
    def initialize(self: Any) -> Any:
        compiled = self
        module = getattr(compiled, _internals.COMPILED_MODULE, None)
        if module is None:
            return vanilla(compiled)
        own = vars(module)
        if "__call__" in own or type(module).__call__ is not nn.Module.__call__:
            return vanilla(compiled)
        # Not in the class, through which other threads call modules meanwhile.
        own["__call__"] = types.MethodType(_internals.MODULE_CALL, module)
        try:
            return vanilla(compiled)
        finally:
            del own["__call__"]

    return initialize


def _keeping_mode(vanilla: Any) -> Any:
    """Keep the mode on the stack if captured code sets the function modes, which do not include
    Amanda's."""

    @functools.wraps(vanilla)
    def set_torch_function_mode_stack(stack: Sequence[Any]) -> None:
        interceptor = LOCAL.interceptor
        if (
            isinstance(stack, (list, tuple))
            and interceptor is not None
            and interceptor.is_listening()
            and interceptor not in stack
        ):
            # Code is captured without other modes: ours is below all modes that it enters.
            stack = [interceptor, *stack]
        vanilla(stack)

    return set_torch_function_mode_stack


def _with_vanilla_class(vanilla: Any) -> Any:
    """Have a function read the vanilla ``nn.Module.__call__``, which it keeps beyond the scope."""

    @functools.wraps(vanilla)
    def enable(*args: Any, **kwargs: Any) -> Any:
        ours = vars(nn.Module)["__call__"]
        nn.Module.__call__ = _internals.MODULE_CALL  # type: ignore[method-assign]
        try:
            return vanilla(*args, **kwargs)
        finally:
            nn.Module.__call__ = ours  # type: ignore[method-assign]

    return enable


_PLAIN = frozenset(
    {torch.Tensor, nn.Parameter, nn.Buffer, type(None), int, float, bool, str, tuple, list}
)
"""Types without a ``__torch_function__`` of their own, which most arguments have."""


def _overrides(asked: Callable[[tuple[Any, ...]], Sequence[Any] | None], vanilla: Any) -> Any:
    """A check for overrides of ``__torch_function__`` that ignores our mode.

    Functions written in Python then go straight to the operators that they call.

    Args:
        asked: function of the arguments of a check that returns the objects to check; None for a
            wrong call.
    """

    def has_torch_function(*args: Any, **kwargs: Any) -> bool:
        interceptor = LOCAL.interceptor
        if interceptor is None or not interceptor.is_alone():
            return bool(vanilla(*args, **kwargs))
        given = None if kwargs else asked(args)
        if given is not None and _PLAIN.issuperset(map(type, given)):
            return False
        interceptor.exit()
        try:
            return bool(vanilla(*args, **kwargs))
        finally:
            interceptor.enter()

    return has_torch_function


def _in_list(args: tuple[Any, ...]) -> Sequence[Any] | None:
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else None


def _single(args: tuple[Any, ...]) -> Sequence[Any] | None:
    return args if len(args) == 1 else None


def _overrides_of_modules(vanilla: Any) -> Any:
    """``torch.overrides.has_torch_function``, by which ``torch.nn`` chooses native fast paths.

    Higher-order operators (``torch.cond``) ask the same function whether to report themselves to
    a mode; they must go on to do so.
    """
    without_mode = _overrides(_in_list, vanilla)

    def has_torch_function(*args: Any, **kwargs: Any) -> bool:
        interceptor = LOCAL.interceptor
        if interceptor is None:
            # Before the frame is read, which Dynamo cannot compile.
            return bool(vanilla(*args, **kwargs))
        caller = _internals.caller_frame(1).f_globals.get("__name__")
        if caller in ASKING and interceptor.fused.is_denied:
            interceptor.fused.was_asked = True
            return True
        answer = vanilla if caller == _internals.OPERATORS_MODULE else without_mode
        return bool(answer(*args, **kwargs))

    return has_torch_function


_CHECKS = tuple(functools.partial(_overrides, asked) for asked in (_in_list, _single, tuple))


def _is_covered() -> bool:
    """True if a scope that has not ended covers the current thread."""
    if STATE.held:
        find_active(vars(STATE))
    # Called several times in each call of a compiled function: a generator would cost a frame.
    for scope in STATE.scopes:  # noqa: SIM110
        if scope.alive:
            return True
    return False
