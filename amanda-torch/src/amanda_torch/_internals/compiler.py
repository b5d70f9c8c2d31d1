"""Dynamo: its callbacks, captures and compiled code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amanda_torch._internals.modules import MODULE_CALL
from amanda_torch._internals.notes import COMPILER_MODULE, MODULE_MARKS
from amanda_torch._internals.operators import OVERRIDE_CHECKS
from amanda_torch._internals.symbols import ABSENT, COMPILER_SYMBOLS, find_symbol, symbol

_HANDLERS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers"
COMPILER_SYMBOLS.extend(
    (
        _HANDLERS,
        "torch._dynamo.lookup_backend",
        "torch._dynamo.source.LocalSource",
        "torch._dynamo.convert_frame.catch_errors_wrapper",
        "torch._dynamo.convert_frame.convert_frame",
        "torch._dynamo.convert_frame.compile_lock",
        "torch._dynamo.convert_frame.input_codes",
        "torch._dynamo.hooks.Hooks",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "torch._ops.HigherOrderOperator",
        "torch.utils._pytree.tree_map",
    )
)


def look_up_handlers() -> None:
    """Let Dynamo look up the functions of PyTorch that it evaluates itself, among them the checks
    for overrides. Dynamo does so once per process, and evaluates whatever functions have these
    names then."""
    handlers = find_symbol(_HANDLERS)
    if handlers is not ABSENT:
        handlers()


_MODE_GUARDS = frozenset({"TORCH_FUNCTION_STATE"})
"""The guards that make Dynamo compile again under other function modes."""


_VANILLA_CHECKS = [getattr(torch.overrides, check) for check in OVERRIDE_CHECKS]

_OURS = f"{__package__.removesuffix('._internals')}."
"""The common beginning of the modules whose functions replace PyTorch's."""
_OUR_GLOBALS = f"G['__import_{_OURS.replace('.', '_dot_')}"
"""The globals of these modules, as they are named in guards."""


def _without_guards_of_ours(entries: Sequence[Any]) -> Sequence[bool]:
    # Nor the guards on the checks and on the call of modules that the driver replaces, and on the
    # globals and closures in them. Dynamo captures these functions where a module has hooks; their
    # state differs when the code runs, so that each call would be captured again.
    vanilla = (*_VANILLA_CHECKS, MODULE_CALL)
    ours = [
        str(getattr(entry.value, "__module__", None)).startswith(_OURS)
        or any(entry.value is check for check in vanilla)
        for entry in entries
    ]
    # The variables of the call of modules are in its closure: their names do not begin with a
    # global.
    parts = tuple(f"{entry.name}." for entry, is_ours in zip(entries, ours, strict=True) if is_ours)
    return [
        not is_ours
        and entry.guard_type not in _MODE_GUARDS
        and not entry.name.startswith((_OUR_GLOBALS, *parts))
        for entry, is_ours in zip(entries, ours, strict=True)
    ]


def frame_converter(backend: Callable[..., Any], marks: bool = False) -> Callable[..., Any]:
    """Dynamo's own callback for frames, which hands captured graphs to `backend`.

    The captured code is used under any function modes: the caller takes care of them.

    Args:
        marks: whether the calls of modules are marked in the graphs.
    """
    from torch._dynamo import config, convert_frame, hooks

    own = hooks.Hooks(guard_filter_fn=_without_guards_of_ours)
    inner = convert_frame.convert_frame(backend, own)
    convert: Callable[..., Any] = convert_frame.catch_errors_wrapper(inner, own)
    options = _capture_options()

    def converter(*args: Any) -> Any:
        with (
            convert_frame.compile_lock,
            config.patch(options),
            _transforms_restored(),
            _marked(marks),
        ):
            return convert(*args)

    setattr(converter, FRAME_CALLBACK_OF, convert)
    return converter


def _capture_options() -> dict[str, Any]:
    """Dynamo's settings for a capture."""
    from torch._dynamo import config

    # Otherwise Dynamo converts floats that change into tensors, in code around the graph.
    options: dict[str, Any] = {"specialize_float": True}
    names = (
        # The program sets these two for the code that it compiles; captured code runs uncompiled
        # where a limit is reached.
        "error_on_recompile",
        "fail_on_recompile_limit_hit",
        # Two calls per run that report the code before a graph to profilers (2.13).
        "record_runtime_overhead",
    )
    options.update((name, False) for name in names if hasattr(config, name))
    return options


@contextmanager
def _marked(marks: bool) -> Iterator[None]:
    """Within it, Dynamo writes marks of modules if `marks` is true."""
    # A nested capture, as for a higher-order operator, has marks of its own.
    outer = vars(MODULE_MARKS).copy()
    try:
        vars(MODULE_MARKS).update(is_on=marks, refused="", calls=[])
        yield
    finally:
        vars(MODULE_MARKS).update(outer)


_transform_depth = symbol("torch._C._functorch.get_dynamic_layer_stack_depth")
_leave_transforms = symbol("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth")


@contextmanager
def _transforms_restored() -> Iterator[None]:
    """Leave the functorch transforms that Dynamo has entered and not left because it gave up
    (2.13)."""
    depth = _transform_depth()
    try:
        yield
    finally:
        if _transform_depth() != depth:
            _leave_transforms(depth)


_REGIONS = 1 << 40
"""Where the numbers of our regions begin: Dynamo counts its own up from 0."""


def count_captures_apart() -> None:
    """Make Dynamo count its captures in the present call of a compiled function separately.

    The code that it has captured counts towards ``recompile_limit`` and ``error_on_recompile`` by
    regions, one for each function compiled with ``isolate_recompiles`` and one for all others
    (2.13). Dynamo sets the region before it gets the frame callback, and resets it afterwards.
    """
    set_region = _region_setter()
    if set_region is not ABSENT:
        region = set_region(_REGIONS)
        if region < _REGIONS:
            set_region(_REGIONS + 1 + region)


@functools.cache
def _region_setter() -> Any:
    # Only Dynamo's callback calls this: Dynamo is imported by then.
    return find_symbol("torch._C._dynamo.eval_frame.set_eval_frame_isolate_recompiles_id")


@contextmanager
def captures_uncounted() -> Iterator[None]:
    """Keep Dynamo's work out of the counters that programs read; to be used with Dynamo's lock."""
    counters = find_symbol("torch._dynamo.utils.counters")
    if counters is ABSENT:
        yield
        return
    before = {name: dict(found) for name, found in counters.items()}
    try:
        yield
    finally:
        for name in list(counters):
            if name not in before:
                del counters[name]
                continue
            counters[name].clear()
            counters[name].update(before[name])


FRAME_CALLBACK_OF = "_torchdynamo_orig_backend"
"""The attribute by which Dynamo follows a chain of frame callbacks to the compiler. Code that was
captured with one compiler is not run with another one."""


def compiler_of(callback: Any) -> Any:
    """The compiler that a frame callback hands its graphs to."""
    while hasattr(callback, FRAME_CALLBACK_OF):
        callback = getattr(callback, FRAME_CALLBACK_OF)
    return callback


def not_captured(*, recursive: bool = False, always: bool = False) -> Any:
    """The return value of a frame callback for a frame that is to run uncompiled.

    Args:
        recursive: whether the functions that the frame calls run uncompiled, too.
        always: whether all later frames of the same code run uncompiled, under any callback;
            otherwise this frame only.
    """
    from torch._C._dynamo import eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    actions = eval_frame._FrameAction
    inner = actions.SKIP if recursive else actions.DEFAULT
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, inner)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=always)


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that Dynamo does not trace: captured code calls it.

    The mark is that of ``torch.compiler.disable``, which itself imports Dynamo (2.13).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def has_reached_limit(converted: Any) -> bool:
    """True if Dynamo has given a frame up because its code was captured too often."""
    from torch._C._dynamo import eval_frame

    strategy = getattr(converted, "frame_exec_strategy", None)
    return strategy is not None and strategy.cur_action == eval_frame._FrameAction.RUN_ONLY


def is_unsupported(error: BaseException) -> bool:
    """True if an error of Dynamo names a construct that it does not support."""
    return isinstance(error, torch._dynamo.exc.Unsupported)


def capture_failures() -> dict[str, int]:
    """The constructs that Dynamo could not capture, with their counts; empty if PyTorch does not
    count them.

    PyTorch 2.13 counts the explanations that ``torch._dynamo.explain`` and its logs show.
    """
    counters = find_symbol("torch._dynamo.utils.counters")
    return {} if counters is ABSENT else dict(counters["unimplemented"])


def is_layer_called_as_is(frame: Any) -> bool:
    """True if a frame is the call of a recurrent layer, which Dynamo's code runs uncompiled.

    PyTorch 2.15 breaks the graph before such a layer and counts no reason for the layer's frame;
    2.13 and 2.14 do not compile the function that calls it, and count the reason.
    """
    from torch._dynamo import config

    layer = frame.f_locals.get("self")
    return (
        _VERSION >= (2, 15)
        and isinstance(layer, _RECURRENT)
        and frame.f_code is getattr(type(layer).forward, "__code__", None)
        and not config.allow_rnn
    )


_RECURRENT = (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)
_VERSION: Any = torch.__version__


def runs_higher_order(frame: Any) -> bool:
    """True if a frame is of a function by which PyTorch runs a higher-order operator eagerly.

    Functions such as ``torch.cond`` let Dynamo capture a function that calls the operator. The
    gradients need the branches as Dynamo rewrites them: functions that return tuples (2.13).
    """
    function = frame.f_locals.get("fn")
    names = frame.f_globals.get("__name__"), getattr(function, "__module__", None)
    return any(str(name).startswith("torch._higher_order_ops.") for name in names)


class Uncompiled:
    """Makes the rest of a compiled function, in the current thread, run uncompiled.

    It is Dynamo's frame callback until the compiled function ends, when Dynamo restores the earlier
    one.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Leave a frame alone."""
        return not_captured(recursive=True)

    def begin(self) -> None:
        """Become the frame callback."""
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        if eval_frame is None:
            return
        before = eval_frame.set_eval_frame(None)
        if before is not None:
            self._before = before
            eval_frame.set_eval_frame(self)

    def end(self) -> None:
        """Restore the earlier callback; harmless when called twice, or after the compiled
        function."""
        before, self._before = self._before, None
        if before is not None:
            from torch._C._dynamo import eval_frame

            now: Any = eval_frame.set_eval_frame(None)
            eval_frame.set_eval_frame(before if now is self else now)


def is_compiled_code(code: Any) -> bool:
    """True if Dynamo has seen some code since it was last reset."""
    from torch._dynamo import convert_frame

    return code in convert_frame.input_codes


_AROUND_GRAPHS = (COMPILER_MODULE, "torch._dynamo.output_graph")
"""The modules of Dynamo whose functions stand around a graph; the second one where a graph holds
operators that a ``__torch_function__`` of the program has called (2.13)."""


def program_frame() -> Any:
    """The frame of the program that runs a captured graph, above those of Dynamo and of the module
    that calls this."""
    frame: Any = sys._getframe(1)
    around = *_AROUND_GRAPHS, frame.f_globals["__name__"]
    while frame.f_globals.get("__name__") in around:
        frame = frame.f_back
    return frame


def is_higher_order(function: Any) -> bool:
    """True if the function of a graph's node has graphs among its arguments."""
    return isinstance(function, torch._ops.HigherOrderOperator)


def count_eager_as_compiled() -> None:
    """Let a function compiled with ``fullgraph=True`` run eagerly in this thread.

    Dynamo counts the frames that it has compiled within a call of such a function, and raises an
    error where there is none. -1 means that nothing is counted. PyTorch's own higher-order
    operators set the counter likewise, where their body has to run eagerly.
    """
    set_count = find_symbol(f"{COMPILER_MODULE}.set_fullgraph_compiled_frame_count")
    if set_count is not ABSENT:
        count = set_count(-1)
        set_count(count if count < 0 else count + 1)
