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
    for overrides. It does so once per process, and takes what it finds in their places."""
    handlers = find_symbol(_HANDLERS)
    if handlers is not ABSENT:
        handlers()


_MODE_GUARDS = frozenset({"TORCH_FUNCTION_STATE"})
"""The guards by which Dynamo compiles anew under other function modes."""


_VANILLA_CHECKS = [getattr(torch.overrides, check) for check in OVERRIDE_CHECKS]

_OURS = f"{__package__.removesuffix('._internals')}."
"""The common beginning of the modules whose functions replace PyTorch's."""
_OUR_GLOBALS = f"G['__import_{_OURS.replace('.', '_dot_')}"
"""The globals of these modules, as they are named in guards."""


def _without_guards_of_ours(entries: Sequence[Any]) -> Sequence[bool]:
    # Nor by the checks and the call of modules that the driver replaces, which Dynamo looks into
    # where a module has hooks, nor by what is asked in them, of which something is another where
    # the code runs: it would be captured at each call.
    vanilla = (*_VANILLA_CHECKS, MODULE_CALL)
    ours = [
        str(getattr(entry.value, "__module__", None)).startswith(_OURS)
        or any(entry.value is check for check in vanilla)
        for entry in entries
    ]
    # What the call of modules knows is in its closure, of no global name.
    parts = tuple(f"{entry.name}." for entry, is_ours in zip(entries, ours, strict=True) if is_ours)
    return [
        not is_ours
        and entry.guard_type not in _MODE_GUARDS
        and not entry.name.startswith((_OUR_GLOBALS, *parts))
        for entry, is_ours in zip(entries, ours, strict=True)
    ]


def frame_converter(backend: Callable[..., Any], marks: bool = False) -> Callable[..., Any]:
    """Dynamo's own callback for frames, which hands captured graphs to `backend`.

    What it captures is used under any function modes: whoever lets it capture takes care of them.

    Args:
        marks: whether the calls of modules are marked in what is captured.
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
            _transforms_as_they_were(),
            _marked(marks),
        ):
            return convert(*args)

    setattr(converter, FRAME_CALLBACK_OF, convert)
    return converter


def _capture_options() -> dict[str, Any]:
    """Dynamo's settings for a capture."""
    from torch._dynamo import config

    # Otherwise it makes tensors of floats that change, in code around the graph.
    options: dict[str, Any] = {"specialize_float": True}
    names = (
        # The program sets these two for the code that it compiles; captured code runs uncompiled
        # where a limit is reached.
        "error_on_recompile",
        "fail_on_recompile_limit_hit",
        # Two calls at each run that tell profilers of the code before a graph (2.13).
        "record_runtime_overhead",
    )
    options.update((name, False) for name in names if hasattr(config, name))
    return options


@contextmanager
def _marked(marks: bool) -> Iterator[None]:
    """True if Dynamo writes marks of modules."""
    # What it captures within, as for a higher-order operator, has others.
    outer = vars(MODULE_MARKS).copy()
    try:
        vars(MODULE_MARKS).update(is_on=marks, refused="", calls=[])
        yield
    finally:
        vars(MODULE_MARKS).update(outer)


_transform_depth = symbol("torch._C._functorch.get_dynamic_layer_stack_depth")
_leave_transforms = symbol("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth")


@contextmanager
def _transforms_as_they_were() -> Iterator[None]:
    """Leave the functorch transforms that Dynamo has entered where it gives up (2.13)."""
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
    (2.13). It sets the region before it asks for the frame callback, and resets it afterwards.
    """
    set_region = _region_setter()
    if set_region is not ABSENT:
        region = set_region(_REGIONS)
        if region < _REGIONS:
            set_region(_REGIONS + 1 + region)


@functools.cache
def _region_setter() -> Any:
    # Asked for by Dynamo, which is imported then.
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
"""The attribute of a frame callback that leads Dynamo, step by step, to its compiler: the code that
it has captured with one compiler is not run with another one."""


def compiler_of(callback: Any) -> Any:
    """The compiler that a frame callback hands its graphs to."""
    while hasattr(callback, FRAME_CALLBACK_OF):
        callback = getattr(callback, FRAME_CALLBACK_OF)
    return callback


def not_captured(*, recursive: bool = False, always: bool = False) -> Any:
    """The return value of a frame callback for a frame that is to run uncompiled.

    Args:
        recursive: whether the functions that it calls run as they are, too.
        always: whether all later frames of its code do, under any callback; else this once.
    """
    from torch._C._dynamo import eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    actions = eval_frame._FrameAction
    inner = actions.SKIP if recursive else actions.DEFAULT
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, inner)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=always)


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that Dynamo is to call and not to trace where code calls it that it captures.

    The mark of ``torch.compiler.disable``, whose own way imports Dynamo (2.13).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def has_reached_limit(converted: Any) -> bool:
    """True if Dynamo has given a frame up because its code was captured too often."""
    from torch._C._dynamo import eval_frame

    strategy = getattr(converted, "frame_exec_strategy", None)
    return strategy is not None and strategy.cur_action == eval_frame._FrameAction.RUN_ONLY


def is_unsupported(error: BaseException) -> bool:
    """True if an error of Dynamo says what of a function it cannot take."""
    return isinstance(error, torch._dynamo.exc.Unsupported)


def not_taken() -> dict[str, int]:
    """The constructs that Dynamo could not capture, with their counts; empty if PyTorch does not
    count them.

    PyTorch 2.13 counts the explanations that ``torch._dynamo.explain`` and its logs show.
    """
    counters = find_symbol("torch._dynamo.utils.counters")
    return {} if counters is ABSENT else dict(counters["unimplemented"])


def is_layer_called_as_is(frame: Any) -> bool:
    """True if a frame is that of a recurrent layer that Dynamo's code calls uncompiled.

    PyTorch 2.15 breaks the graph before such a layer and counts no reason for the layer's frame;
    2.13 and 2.14 leave the function alone that calls it, and count why.
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

    ``torch.cond`` and its like have Dynamo capture a function that calls the operator, whose
    gradients want what Dynamo makes of the branches: functions that return tuples (2.13).
    """
    function = frame.f_locals.get("fn")
    names = frame.f_globals.get("__name__"), getattr(function, "__module__", None)
    return any(str(name).startswith("torch._higher_order_ops.") for name in names)


class Uncompiled:
    """Makes the rest of a compiled function, in the current thread, run uncompiled.

    It is Dynamo's frame callback meanwhile: whether it still is tells whether that function has
    ended.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Leave a frame alone."""
        return not_captured(recursive=True)

    def begin(self) -> None:
        """Do so from now on."""
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        if eval_frame is None:
            return
        before = eval_frame.set_eval_frame(None)
        if before is not None:
            self._before = before
            eval_frame.set_eval_frame(self)

    def end(self) -> None:
        """Do so no longer; harmless when called twice, or after the compiled function."""
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
"""The modules of Dynamo whose functions stand around a graph; of the second one where a graph holds
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
