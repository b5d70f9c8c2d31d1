"""Dynamo: its callbacks, captures and compiled code."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from amanda_torch._internals.modules import MODULE_CALL, standing_for
from amanda_torch._internals.notes import COMPILER_MODULE, MODULE_MARKS
from amanda_torch._internals.operators import OVERRIDE_CHECKS
from amanda_torch._internals.symbols import ABSENT, COMPILER_SYMBOLS, find_symbol, symbol

_HANDLERS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers"
COMPILER_SYMBOLS.extend(
    (
        _HANDLERS,
        "torch._dynamo.lookup_backend",
        "torch._subclasses.FakeTensor",
        "torch._dynamo.source.LocalSource",
        "torch._dynamo.convert_frame.catch_errors_wrapper",
        "torch._dynamo.convert_frame.convert_frame",
        "torch._dynamo.convert_frame.convert_frame_assert",
        "torch._dynamo.convert_frame.compile_lock",
        "torch._dynamo.convert_frame.input_codes",
        "torch._dynamo.hooks.Hooks",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._dynamo.variables.torch.tracing_state_functions",
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.reset_code",
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


_HOOKS_GUARD = "EMPTY_NN_MODULE_HOOKS_DICT"
"""The guard by which Dynamo captures anew when a module has hooks."""


def _without_guards_on(is_checked: Callable[[Any], bool], entries: Sequence[Any]) -> Sequence[bool]:
    return [
        kept and not (entry.guard_type == _HOOKS_GUARD and is_checked(entry.value))
        for entry, kept in zip(entries, _without_guards_of_ours(entries), strict=True)
    ]


class _Refused(set[type[Any]]):
    """Replaces Dynamo's set of opaque tensor classes, which it checks for each tensor of a subclass
    before it reads the tensor: the check calls `refuse`, whose error ends the capture."""

    def __init__(self, refuse: Callable[[type[Any]], Any]) -> None:
        super().__init__()
        self._refuse = refuse

    def __contains__(self, cls: Any) -> bool:
        self._refuse(cls)
        return False


def frame_converter(
    backend: Callable[..., Any],
    eager: bool = False,
    marks: bool = False,
    refuse: Callable[[type[Any]], Any] | None = None,
    is_checked: Callable[[Any], bool] | None = None,
) -> Callable[..., Any]:
    """Dynamo's own callback for frames, which hands captured graphs to `backend`.

    What it captures is used under any function modes: whoever lets it capture takes care of them.

    Args:
        eager: capture code that nobody has compiled: as one graph or not at all, as it runs where
            it is not compiled, and with all guards.
        refuse: called with the class of each tensor of a subclass that a frame uses, before
            anything is read of it; an error of it ends the attempt.
        is_checked: called with each dict of a module's hooks that is empty and stays so; where it
            is true, the caller checks that, and Dynamo does not.
    """
    from torch._dynamo import config, convert_frame, hooks

    kept: Any = _without_guards_of_ours
    if is_checked is not None:
        kept = functools.partial(_without_guards_on, is_checked)
    own = hooks.Hooks(guard_filter_fn=kept)
    if eager:
        inner: Any = convert_frame.convert_frame_assert(backend, one_graph=True)
    else:
        inner = convert_frame.convert_frame(backend, own)
    convert: Callable[..., Any] = convert_frame.catch_errors_wrapper(inner, own)
    options = _capture_options(eager, refuse)

    def converter(*args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(convert_frame.compile_lock)
            stack.enter_context(config.patch(options))
            if eager:
                for unnoticed in (
                    _told_not_compiled,
                    _fakes_uncached,
                    _generators_untouched,
                    _tensors_unmarked,
                    _errors_unlogged,
                ):
                    stack.enter_context(unnoticed())
                stack.enter_context(_warnings_noted())
            stack.enter_context(_transforms_as_they_were())
            stack.enter_context(_marked(marks))
            return convert(*args)

    setattr(converter, FRAME_CALLBACK_OF, convert)
    return converter


class _Noted(threading.local):
    warnings: Sequence[warnings.WarningMessage] = ()


_NOTED = _Noted()


@contextmanager
def _warnings_noted() -> Iterator[None]:
    """Show no warnings, and note them."""
    outer = _NOTED.warnings
    with warnings.catch_warnings(record=True, action="always") as noted:
        try:
            _NOTED.warnings = noted
            yield
        finally:
            _NOTED.warnings = outer


def warned_in_capture() -> str:
    """Of what the code has warned that Dynamo captures in this thread; "" for nothing.

    Dynamo runs PyTorch's functions on fake tensors, where they warn as ever. It also reads `grad`
    of the inputs, among others, of which PyTorch warns.
    """
    texts = (str(warning.message) for warning in _NOTED.warnings)
    return next((text for text in texts if not text.startswith(_WARNED_OF_GRAD)), "")


_WARNED_OF_GRAD = "The .grad attribute of a Tensor that is not a leaf"


def _capture_options(eager: bool, refuse: Callable[[type[Any]], Any] | None) -> dict[str, Any]:
    """Dynamo's settings for a capture; the arguments are those of :func:`frame_converter`."""
    from torch._dynamo import config

    # Otherwise it makes tensors of floats that change, in code around the graph.
    options: dict[str, Any] = {"specialize_float": True, **(_EAGER_CAPTURE if eager else {})}
    names = (
        # The program sets these two for the code that it compiles; captured code runs uncompiled
        # where a limit is reached.
        "error_on_recompile",
        "fail_on_recompile_limit_hit",
        # Two calls at each run that tell profilers of the code before a graph (2.13).
        "record_runtime_overhead",
    )
    options.update((name, False) for name in names if hasattr(config, name))
    if refuse is not None:
        options["nontraceable_tensor_subclasses"] = _Refused(refuse)
    return options


@contextmanager
def _marked(marks: bool) -> Iterator[None]:
    """Whether Dynamo writes marks of modules."""
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


_EAGER_CAPTURE = {
    # It would compute with torch what the program computes with NumPy.
    "trace_numpy": False,
    "optimize_ddp": False,
    # Both leave guards out, by default: hooks that are added to a module, and `Tensor.data` that
    # becomes another one (as in `Module.double()`), would not be noticed.
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
}
"""Dynamo's settings for the capture of code that the program does not compile."""


_TOLD_COMPILED = "transformers."
"""The package whose code is told the truth. 5.23 keeps a context variable, which Dynamo cannot
capture, and an attribute instead where it is compiled; it looks at values for warnings and for
attention masks that it could leave out, and does not where it is compiled. Where that makes a
difference, the operators are others than those of eager mode."""


@contextmanager
def _errors_unlogged() -> Iterator[None]:
    """Log no errors of operators meanwhile: the module then runs uncaptured, and raises them.

    PyTorch 2.13 logs a traceback of each operator whose inputs do not fit; to be used with
    Dynamo's lock."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    try:
        # Within, as in the others here: an interrupt may come as the call returns.
        logger.setLevel(logging.CRITICAL)
        yield
    finally:
        logger.setLevel(level)


_ASKING_FOR_OTHERS = frozenset({"transformers.utils.import_utils"})
"""Modules whose functions ask for their callers."""

_TRACERS_STATE = "tracing_state_functions"


class _EagerAnswers(dict[Any, Any]):
    """The answers for code that checks whether it is compiled: no, as in eager mode."""

    def __getitem__(self, question: Any) -> Any:
        answer = super().__getitem__(question)
        if answer is not True:
            return answer
        # Dynamo's descriptions of the function that asks, and of those that call it.
        asking = sys._getframe(1).f_locals.get("tx")
        while asking is not None and asking.f_globals.get("__name__") in _ASKING_FOR_OTHERS:
            asking = asking.parent
        name = "" if asking is None else str(asking.f_globals.get("__name__"))
        return name.startswith(_TOLD_COMPILED)


@contextmanager
def _told_not_compiled() -> Iterator[None]:
    """Code that Dynamo captures meanwhile runs as in eager mode; to be used with Dynamo's lock."""
    from torch._dynamo.variables import torch as variables

    vanilla = getattr(variables, _TRACERS_STATE)
    answers = _EagerAnswers(vanilla())
    try:
        setattr(variables, _TRACERS_STATE, lambda: answers)
        yield
    finally:
        setattr(variables, _TRACERS_STATE, vanilla)


@contextmanager
def _fakes_uncached() -> Iterator[None]:
    """What PyTorch keeps of operators on tensors without values is dropped with the capture; to be
    used with Dynamo's lock.

    Its table is one for the process and has no end (2.13): with symbolic sizes each capture would
    leave its own, and all that these sizes lead to.
    """
    modes = torch._subclasses.fake_tensor.FakeTensorMode
    kept = modes.cache
    try:
        modes.cache = {}
        yield
    finally:
        modes.cache = kept


_NO_STATE = torch.empty(0, dtype=torch.uint8, device="cpu")


@contextmanager
def _generators_untouched() -> Iterator[None]:
    """Random numbers of accelerators are neither asked for nor set by this thread meanwhile; to be
    used with Dynamo's lock.

    Dynamo keeps their state around each capture, which draws none. To ask for it begins to use the
    device; to set it, though to the same, has cuDNN begin the dropout of RNNs anew (2.13, H100: the
    next training steps of an LSTM gave other losses).
    """
    with ExitStack() as stack:
        for module in (torch.cuda, torch.xpu):
            for name, answer in (("get_rng_state", _NO_STATE), ("set_rng_state", None)):
                stack.enter_context(_answered(module, name, answer))
        yield


_STATIC = "_dynamo_static_input_type"


@contextmanager
def _tensors_unmarked() -> Iterator[None]:
    """Parameters and buffers lose the marks that Dynamo sets on them; to be used with its lock.

    It marks them as static, for the compilers of CUDA graphs, by an attribute that copies and
    pickles of the module would hold as well (2.13). Those that the program has set stay.
    """
    decorators: Any = sys.modules["torch._dynamo.decorators"]
    vanilla = decorators.mark_static_address
    thread, marked = threading.get_ident(), list[torch.Tensor]()

    @functools.wraps(vanilla)
    def marking(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not hasattr(tensor, _STATIC):
            marked.append(tensor)
        return vanilla(tensor, *args, **kwargs)

    try:
        decorators.mark_static_address = marking
        yield
    finally:
        if decorators.mark_static_address is marking:
            decorators.mark_static_address = vanilla
        for tensor in marked:
            vars(tensor).pop(_STATIC, None)


@contextmanager
def _answered(module: Any, name: str, answer: Any) -> Iterator[None]:
    """A function of a module gives an answer in this thread, and runs in others."""
    vanilla, thread = getattr(module, name), threading.get_ident()

    @functools.wraps(vanilla)
    def answering(*args: Any, **kwargs: Any) -> Any:
        return answer if threading.get_ident() == thread else vanilla(*args, **kwargs)

    try:
        setattr(module, name, answering)
        yield
    finally:
        if getattr(module, name) is answering:
            setattr(module, name, vanilla)


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
    """Whether Dynamo has given a frame up because its code was captured too often."""
    from torch._C._dynamo import eval_frame

    strategy = getattr(converted, "frame_exec_strategy", None)
    return strategy is not None and strategy.cur_action == eval_frame._FrameAction.RUN_ONLY


def is_unsupported(error: BaseException) -> bool:
    """Whether an error of Dynamo says what of a function it cannot take."""
    return isinstance(error, torch._dynamo.exc.Unsupported)


def not_taken() -> dict[str, int]:
    """The constructs that Dynamo could not capture, with their counts; empty if PyTorch does not
    count them.

    PyTorch 2.13 counts the explanations that ``torch._dynamo.explain`` and its logs show.
    """
    counters = find_symbol("torch._dynamo.utils.counters")
    return {} if counters is ABSENT else dict(counters["unimplemented"])


def is_layer_called_as_is(frame: Any) -> bool:
    """Whether a frame is that of a recurrent layer that Dynamo's code calls uncompiled.

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
    """Whether a frame is of a function by which PyTorch runs a higher-order operator eagerly.

    ``torch.cond`` and its like have Dynamo capture a function that calls the operator, whose
    gradients want what Dynamo makes of the branches: functions that return tuples (2.13).
    """
    function = frame.f_locals.get("fn")
    names = frame.f_globals.get("__name__"), getattr(function, "__module__", None)
    return any(str(name).startswith("torch._higher_order_ops.") for name in names)


def captured_alone(found: Any) -> Any:
    """What a frame callback returns for captured code, when functions that this calls run as they
    are: Dynamo asks nothing about their frames, which would cost microseconds for each."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    actions = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(actions.DEFAULT, actions.SKIP)
    return ConvertFrameReturn(
        frame_exec_strategy=strategy, apply_to_code=True, guarded_code=found.guarded_code
    )


@standing_for("_call_impl")
def call_captured(callback: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as Dynamo captures it, in place of a module.

    Args:
        callback: what Dynamo asks about frames.
    """
    from torch._C._dynamo import eval_frame

    before = eval_frame.set_eval_frame(callback)
    try:
        return function(*args)
    finally:
        eval_frame.set_eval_frame(before)


def forget_captured(code: types.CodeType, loaded: dict[str, Any] = sys.modules) -> None:
    """Drop Dynamo's captures of some code, which keep the callback that made them.

    That is memory of C++: the garbage collector finds no cycle through it.

    Args:
        code: the code.
        loaded: the loaded modules; at the end of the process nothing else leads to them.
    """
    eval_frame = loaded.get("torch._C._dynamo.eval_frame")
    if eval_frame is not None:
        eval_frame.reset_code(code)


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
    """Whether Dynamo has seen some code since it was last reset."""
    from torch._dynamo import convert_frame

    return code in convert_frame.input_codes


_AROUND_GRAPHS = (COMPILER_MODULE, "torch._dynamo.output_graph")
"""The modules of Dynamo whose functions stand around a graph; of the second one where a graph holds
operators that a ``__torch_function__`` of the program has called (2.13)."""


def program_frame() -> Any:
    """The frame of the program that runs a captured graph, asked for by a method of what Dynamo
    calls, which calls this."""
    frame: Any = sys._getframe(3)
    while frame.f_globals.get("__name__") in _AROUND_GRAPHS:
        frame = frame.f_back
    return frame


def is_higher_order(function: Any) -> bool:
    """Whether the function of a graph's node has graphs among its arguments."""
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
