"""``nan``: finds the first operator that produces NaN or an infinity, forward or backward.

::

    tool = NanTool(action="record")
    with amanda.apply(tool):
        torch.zeros(2).log()
    tool.events[0].op.id, tool.replay.run()
"""

from __future__ import annotations

import collections
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from amanda import OpContext
from amanda.errors import CapabilityError
from amanda.inline import Check
from amanda.interface.points import PointContext
from amanda.python.nested import plain
from amanda.python.text import printable
from amanda.results import Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._bases.ranks import current_rank, tell
from amanda_tools._operators.model_phases import MODEL
from amanda_tools._operators.op_table import can_produce, row_of, updates_a_value
from amanda_tools._operators.parameters import parameters_of
from amanda_tools._operators.source_lines import line_made_at, source_line
from amanda_tools._values.gaps import NotLookedAt
from amanda_tools._values.tensors import reader_of
from amanda_tools.nan.events import (
    NonFiniteError,
    NonFiniteEvent,
    NonFiniteWarning,
    describe_tensors,
    find_new_kind,
)
from amanda_tools.nan.fates import Fates
from amanda_tools.nan.replay import OpReplay

__all__ = ["NanOptions", "NanTool", "NonFiniteError", "NonFiniteWarning"]

_ENDS = "an output of the model or a step of training"
_UNKNOWN = f" (whether it reached {_ENDS} is not known)"

_CHECKS = frozenset({"isfinite", "isinf", "isnan", "nan_to_num"})
"""Types by which a program finds gradients that are not finite."""

_SETUP = "setup"
"""The phase in which a model is built and initialised."""


@attrs.frozen(kw_only=True)
class NanOptions:
    """The options of ``nan``.

    Attributes:
        action: ``warn`` once, of the first finding; ``abort``: raise at each operator that produces
            one, masked later or not, but for those that build the model; or only ``record`` them.
        inf: also look for infinities.
        ignore: op types that may produce them, as log where a zero is expected.
        history: number of preceding operators to name.
        limit: number of producing operators to record, besides those masked or skipped.
        replay: keep the inputs of the first producing operator, and write them with the results.
    """

    action: Literal["abort", "warn", "record"] = "warn"
    inf: bool = True
    ignore: Sequence[str] = attrs.field(default=(), converter=type_names)
    history: int = attrs.field(default=8, validator=attrs.validators.ge(0))
    limit: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    replay: bool = True


class NanTool(PrintingTool[NanOptions]):
    """Finds the operators that produce NaN or infinities.

    Example: ``amanda run -t nan:action=abort -o out -- train.py``

    Attributes:
        events: producing operators, in the order in which they produced.
        replay: the first producing operator with its inputs, to run it again; None without one.
        recent: ids of the operators watched last, the current one included.
    """

    name = "nan"
    group = "find"
    Options = NanOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events: list[NonFiniteEvent] = []
        self._received: dict[str, Any] | None = None
        # True if an operator received a NaN before any operator of the model produced one.
        self._passed_on = False
        self._watches: dict[str, OpWatch] = {}
        self._not_looked_at = NotLookedAt()
        self._fates = Fates()
        self._has_warned = False
        # What has been told of this rank last, and in which step.
        self._told: tuple[NonFiniteEvent | None, int] = None, -1
        self._sources: dict[str, str] = {}
        self._met: set[str] = set()
        # The operator that runs is the last entry.
        most = min(self.options.history + 1, sys.maxsize)
        self.recent: collections.deque[str] = collections.deque(maxlen=most)
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_pass(self._end_forward, end=True)
        self.add_inst_for_iteration(self._end_iteration, end=True)
        self.add_inst_for_op(self._analyse_backward, backward=True)
        self.add_inst_for_pass(self._end_backward, backward=True, end=True)

    # -- what becomes of it -------------------------------------------------

    def _end_forward(self, point: PointContext) -> None:
        were_finite = {self._look_at(tensor) for tensor in point.outputs or ()}
        self._fates.end_forward(point.id, were_finite or {None})
        if False in were_finite:
            self.tell_ranks()

    def _end_backward(self, _: PointContext) -> None:
        # A gradient that is not finite has been noted where an operator gave it.
        self._fates.look(True)

    def _end_iteration(self, _: PointContext) -> None:
        # Of the one before: a gradient scaler says after an iteration that it has skipped it.
        self._warn_of_first([event for event in self.findings() if event.fate])
        self._fates.end_iteration()
        self._keep_one_replay()

    def _see_scale(self, *tensors: Any) -> None:
        """Instrumentation routine: a gradient scaler updates its scale after a step or none."""
        self._fates.end_step(bool(reader_of(tensors[-1]).numpy(tensors[-1]).any()))

    def _see_check(self, gradient: Any, phase: str) -> None:
        """Instrumentation routine: before a step a tensor is asked whether it is finite."""
        if self._look_at(gradient) is False:
            self._fates.note_check(phase)

    def exit_scope(self) -> None:
        """End an iteration that has not ended, as evaluations after training, and warn."""
        self._fates.end_iteration()
        self._warn_of_first(self.findings())

    def _warn_of_first(self, events: Sequence[NonFiniteEvent]) -> None:
        if events and not self._has_warned and self.options.action == "warn":
            self._has_warned = True
            _warn(_placed(events[0].message(), events[0].step), events[0].source)

    def tell_ranks(self) -> None:
        """On one of several ranks, print the first finding before collectives spread it: a gradient
        or an output of the model has it now. Whether the step will be skipped is not known yet."""
        # What a step was skipped for is no reason to keep silent about the next one.
        told, step = self._told
        if told in self.findings() or step == self.steps or self.options.action != "warn":
            return
        found = (event for event in self._concerning() if event.fate != "masked")
        first = next(filter(self._fates.is_current, found), None)
        if first is None:
            return
        self._told = first, self.steps
        if (text := _placed(first.message(), self.steps)) != first.message():
            tell(f"nan: {text}")

    def _keep_one_replay(self) -> None:
        first = next(iter(self.findings() or self.masked_or_skipped()), None)
        for event in self.events:
            if event is not first and event.fate:
                event.replay = None

    @property
    def replay(self) -> OpReplay | None:
        """The first producing operator with its inputs."""
        return next((e.replay for e in self.findings() or self.masked_or_skipped()), None)

    # -- analyses ---------------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        if op.name == "_amp_update_scale_":
            context.insert_before_op(self._see_scale, inputs=[0, 1, 2])
        elif op.type in _CHECKS and op.phase != "forward":
            context.insert_before_op(self._see_check, inputs=[0], phase=op.phase)
        elif op.phase == "optimizer" and updates_a_value(context, op.name):
            context.insert_after_op(self._fates.updates, outputs=[])
        made_at = line_made_at(context)
        self._sources[op.id] = made_at or source_line()
        if not any(tensor is not None for tensor in context.get_inputs()):
            return
        parameters = parameters_of(context)
        if self._is_watched(op, moves_parameter=bool(parameters) and op.phase in MODEL):
            watch = self._watch(op, context)
            watch.made_at = made_at
            watch.parameters, watch.states = parameters, _states_of(context, parameters)
            # A driver may not be able to run a single operator again.
            with contextlib.suppress(CapabilityError):
                watch.function = context.get_function()
            check = self._check(watch)
            context.insert_before_op(check.before)
            context.insert_after_op(check.after)

    def _analyse_backward(self, context: OpContext) -> None:
        op = describe(context)
        if self._is_watched(op):
            watch = self._watch(op, context)
            watch.parameters = parameters_of(context)
            check = self._check(watch)
            context.insert_before_backward_op(check.before)
            context.insert_after_backward_op(check.after)

    def _is_watched(self, op: OpDescription, *, moves_parameter: bool = False) -> bool:
        """True for an operator that may produce a NaN, or be the first to read one in a parameter.

        Where an embedding selects rows of a parameter, the next operator does not read that.
        """
        ignored = self.options.ignore
        self._met.update(kind for kind in ignored if kind in (op.type, op.name))
        moves_parameter &= "places_values" not in row_of(op.type).traits
        is_of_interest = moves_parameter or can_produce(op)
        return is_of_interest and op.type not in ignored and op.name not in ignored

    def _watch(self, op: OpDescription, context: OpContext) -> OpWatch:
        # As text at once: an argument may hold references to models and tensors.
        attributes = {name: plain(value) for name, value in context.get_attrs().items()}
        names = context.get_input_names() if context.is_forward() else ()
        watch = self._watches[op.id] = OpWatch(self, op, attributes, names)
        return watch

    def _check(self, watch: OpWatch) -> Check:
        # Checking inputs costs as much as checking outputs: only for operators that overwrite them.
        return Check(
            lambda tensor: self._look_at(tensor) is not False,
            watch.found,
            overwrites=False if watch.op.forward else None,
            trail=self.recent,
            name=watch.op.id,
        )

    # -- routines ---------------------------------------------------------

    def _look_at(self, tensor: Any) -> bool | None:
        """Return True if a tensor is finite; None if its numbers cannot be read."""
        is_clean = reader_of(tensor).is_clean(tensor)
        if is_clean is None:
            self._not_looked_at.note(tensor)
        return is_clean

    def note_reach(self, op: OpDescription) -> None:
        """Note that a gradient or a parameter is not finite, if the operator has written one."""
        if op.phase == "optimizer":
            self._fates.note_update()
        elif op.direction == "backward":
            self._fates.look(False)

    def suspect(
        self, watch: OpWatch, inputs: Sequence[Any], outputs: Sequence[Any], was_clean: bool
    ) -> None:
        """Examine an execution whose outputs are not all finite.

        Args:
            watch: the watched operator.
            inputs, outputs: tensors of the execution.
            was_clean: True if inputs that the operator has overwritten were finite before.

        Raises:
            NonFiniteError: the operator produced it, and the option ``action`` is ``abort``.
        """
        # The values that the operator read from overwritten inputs are lost: `was_clean` replaces
        # them.
        written = [i for i, t in enumerate(inputs) if any(t is o for o in outputs)]
        others = [None if i in written else t for i, t in enumerate(inputs)]
        kind = self._new_kind(others, outputs) if was_clean else ""
        # A backward operator may read a saved NaN that came with the program's data.
        if kind and not (watch.op.forward and self._received):
            self._found(watch, kind, inputs, outputs, written)
            return
        if watch.op.phase != _SETUP and not self._of_model():
            self._passed_on = True
        if not self.events and self._received is None and was_clean:
            self._note_received(watch, others)

    def _new_kind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
        """Return the kind that the operator itself produced, else ""."""
        # Values in a list, an iterator or a variable were produced earlier.
        if any(t is not None and reader_of(t).is_opaque(t) for t in inputs):
            return ""
        return find_new_kind(inputs, outputs, infinities=self.options.inf)

    def _note_received(self, watch: OpWatch, inputs: Sequence[Any]) -> None:
        """Record the first operator that reads a NaN which no operator has produced."""
        for position, tensor in enumerate(inputs):
            is_variable = position in watch.parameters and reader_of(tensor).is_opaque(tensor)
            if tensor is not None and (is_variable or _has_nan(tensor)):
                name = watch.names[position] if position < len(watch.names) else ""
                source = self._source(watch)
                self._received = {
                    **watch.op.identity(),
                    "input": name or position,
                    "is_parameter": position in watch.parameters,
                    "is_state": position in watch.states,
                    "parameter": watch.parameters.get(position),
                    "source": source,
                }
                # Data may hold NaN on purpose, for values that are missing; a model never does.
                is_of_model = position in (*watch.parameters, *watch.states)
                if is_of_model and self.options.action == "warn":
                    _warn(_placed(_received_message(self._received), self.steps), source)
                return

    def _found(
        self,
        watch: OpWatch,
        kind: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        written: list[int],
    ) -> None:
        """Record an execution of a producing operator; abort at one of the model."""
        event = self._event_of(watch.op)
        if event is None:
            # Only the first execution of an operator is described.
            event = NonFiniteEvent(
                op=watch.op,
                kind=kind,
                source=self._source(watch),
                inputs=describe_tensors(inputs),
                outputs=describe_tensors(outputs),
                overwritten=written,
                parameter=self._parameter(watch, inputs, outputs),
                attributes=dict(watch.attributes),
                step=self.steps,
                last=list(self.recent)[:-1],
            )
            is_first = not any(e.fate == "reached" for e in self.findings())
            self.events.append(event)
            if self.options.replay and is_first and event in self.findings():
                event.replay = OpReplay.of(watch.op, watch.function, watch.names, inputs)
        event.times += 1
        if watch.op.phase != _SETUP:
            self._fates.note(event)
            if self.options.action == "abort":
                raise NonFiniteError(_placed(event.message(), event.step))

    def _parameter(
        self, watch: OpWatch, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> str | None:
        """Return the path of the parameter that an execution has made not finite, or whose
        gradient; None for neither."""
        if not watch.op.forward and len(inputs) != len(watch.names):
            # Lists of other lengths than in the analysis: positions are of other tensors.
            return None
        tensors = outputs if watch.op.forward else inputs
        made = [t for t in outputs if t is not None and self._look_at(t) is False]
        named = ((t, name) for i, name in watch.parameters.items() for t in tensors[i : i + 1])
        return next((name for t, name in named if any(t is one for one in made)), None)

    def _source(self, watch: OpWatch) -> str:
        op = watch.op
        if op.direction == "backward":
            return self._sources.get(op.forward, "")
        # A line that runs the operator again may be another one; a line that runs a graph did not
        # make the operator.
        return watch.made_at or source_line() or self._sources.get(op.id, "")

    def _event_of(self, op: OpDescription) -> NonFiniteEvent | None:
        return next((event for event in self.events if event.op.id == op.id), None)

    def examines(self, op: OpDescription) -> bool:
        """True for recorded operators, and for all others until the limit is reached."""
        count = sum(event.fate in ("", "reached") for event in self.events)
        return count < self.options.limit or self._event_of(op) is not None

    def findings(self) -> list[NonFiniteEvent]:
        """The :attr:`events` that concern the model, and were neither masked nor skipped.

        Initialisers that clip a distribution may produce infinities and remove them again: in the
        phase ``setup`` only those count that a later operator received. All count in a program
        without a model.
        """
        return [event for event in self._concerning() if event.fate in ("", "reached")]

    def masked_or_skipped(self) -> list[NonFiniteEvent]:
        """The :attr:`events` of the model that were masked or skipped."""
        return [event for event in self._concerning() if event.fate not in ("", "reached")]

    def _concerning(self) -> list[NonFiniteEvent]:
        is_model = any(watch.op.phase != _SETUP for watch in self._watches.values())
        return list(self.events) if self._passed_on or not is_model else self._of_model()

    def _of_model(self) -> list[NonFiniteEvent]:
        return [event for event in self.events if event.op.phase != _SETUP]

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per producing operator, in the order in which they produced."""
        return [event.row() for event in self.events]

    def result(self) -> dict[str, Any]:
        """The common form, with the namespaces of all operators watched."""
        namespaces = {watch.op.namespace for watch in self._watches.values()}
        return {**super().result(), "namespaces": sorted(namespaces)}

    def summary(self) -> dict[str, Any]:
        """``first``, ``producers``, ``received``, ``watched``, ``not_looked_at`` and
        ``ignore_never_met``.

        ``first`` is the first of the :meth:`findings`, null if there is none; ``received`` is the
        first operator that read a NaN which no operator had produced, with the ``input`` and
        whether that ``is_parameter`` of the model; ``not_looked_at`` counts tensors whose numbers
        cannot be read, by kind; ``ignore_never_met`` lists the types of ``ignore`` that no operator
        had, as misspelt ones.
        """
        found = self.findings() or self.masked_or_skipped()
        first = found[0].row() if found else None
        keys = "id type name module source direction kind fate parameter".split()
        return {
            "first": first and {key: first[key] for key in keys},
            "producers": len(self.events),
            "received": self._received,
            "watched": len(self._watches),
            "not_looked_at": self._not_looked_at.by_kind(),
            "ignore_never_met": self._never_met(),
        }

    def _never_met(self) -> list[str]:
        return [kind for kind in self.options.ignore if kind not in self._met]

    def tables(self) -> Iterable[Table]:
        """The first producing operator with its tensors and history, and the others."""
        yield from self._about_received()
        harmless = self.masked_or_skipped()
        events = self.findings() or harmless[:1]
        if events:
            yield from self._about_findings(events)
        else:
            count = len(self._watches)
            of_model = " of the model" if self.events else ""
            yield Table(f"nan: no operator{of_model} produced any, of {count:,} watched", (), ())
        yield from self._about_others([event for event in self.events if event not in events])
        yield from self._not_looked_at.tables(self.name)
        yield from self.unseen_tables("what they produced is not known")
        if missing := self._never_met():
            title = "nan: types of ignore= that no operator has"
            yield Table(title, ("type",), [(kind,) for kind in missing])

    def _about_others(self, events: Sequence[NonFiniteEvent]) -> Iterable[Table]:
        """Those that reached nothing, in the model and while it was built."""
        harmless = [event for event in self.masked_or_skipped() if event in events]
        if harmless:
            rows = [(e.op.id, e.kind, e.source, e.times, e.fate) for e in harmless]
            title = "nan: masked before an output or a step of training, or skipped with the step"
            yield Table(title, ("op", "kind", "source", "times", "fate"), rows)
        if only_in_setup := [event for event in events if event not in harmless]:
            title = "nan: made while the model was built, and removed before it was used"
            made = [(event.op.id, event.kind, event.source) for event in only_in_setup]
            yield Table(title, ("op", "kind", "source"), made)

    def _about_findings(self, events: Sequence[NonFiniteEvent]) -> Iterable[Table]:
        """The first finding with its tensors and history, and the others."""
        first = events[0]
        if first.fate in ("masked", "skipped"):
            but = ", but in steps that were skipped" if first.fate == "skipped" else ""
            yield Table(f"nan: no operator's NaN or infinity reached {_ENDS}{but}", (), ())
        yield Table(f"nan: {first.message()}{'' if first.fate else _UNKNOWN}", (), ())
        columns = ("tensor", "shape", "dtype", "nan", "inf", "min", "max", "mean", "std")
        names = [f"input {i}" for i in range(len(first.inputs))]
        names += [f"output {i}" for i in range(len(first.outputs))]
        tensors = zip(names, [*first.inputs, *first.outputs], strict=True)
        rows = [_row_of(name, found) for name, found in tensors if found is not None]
        yield Table("nan: its tensors", columns, rows)
        # Beside an operator of the model, those of the model; beside another one, all of them.
        is_of_model = first.op.phase in MODEL
        last = [
            op_id
            for op_id in first.last
            if not is_of_model or self._watches[op_id].op.phase in MODEL
        ]
        if last:
            yield Table("nan: watched before it", ("op",), [(op_id,) for op_id in last])
        if len(events) > 1:
            others = [
                (e.op.id, e.op.direction, e.kind, e.source, e.fate or "not known")
                for e in events[1:]
            ]
            title = "nan: later ones, which may follow from it"
            yield Table(title, ("op", "direction", "kind", "source", "fate"), others)

    def _about_received(self) -> Iterable[Table]:
        """The first NaN in a parameter or in the data, which no operator has produced."""
        if found := self._received:
            rows = [(found["id"], found["input"], found["source"])]
            yield Table(f"nan: {_received_message(found)}", ("op", "input", "source"), rows)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write the inputs of the first producing operator as ``<stem>.inputs.npz``."""
        return [self.replay.write(folder / f"{stem}.inputs.npz")] if self.replay else []


@attrs.define(eq=False)
class OpWatch:
    """One watched operator, and the function that is called when one of its outputs is not
    finite.

    Attributes:
        op: the operator.
        attributes: its non-tensor arguments, as text where they are not plain data.
        names: names of its inputs; empty for a backward operator.
        function: runs a forward operator again; None where that is not possible.
        made_at: line of the program that made an operator of a graph; "" if unknown.
        parameters: by position the paths of the inputs that are parameters, None for one without;
            of a backward operator, of the parameters whose gradients its outputs are.
        states: positions of the inputs that are buffers of a model or variables.
    """

    _tool: NanTool
    op: OpDescription
    attributes: Mapping[str, Any]
    names: Sequence[str]
    function: Callable[..., Any] | None = None
    made_at: str = ""
    parameters: Mapping[int, str | None] = attrs.field(factory=dict)
    states: Sequence[int] = ()

    def found(self, inputs: Sequence[Any], outputs: Sequence[Any], was_clean: bool) -> None:
        """Examine an execution with an output that is not finite (:class:`amanda.inline.Check`)."""
        self._tool.note_reach(self.op)
        if self._tool.examines(self.op):
            self._tool.suspect(self, inputs, outputs, was_clean)
            if self.op.direction == "backward":
                self._tool.tell_ranks()


def _placed(message: str, step: int) -> str:
    """Add to a message the rank and the step, if there are several ranks."""
    rank, size = current_rank()
    return message if size == 1 else f"rank {rank}, step {step}: {message}"


def _warn(message: str, source: str) -> None:
    """Warn at a line of the program, ``file:line``."""
    file, _, line = source.rpartition(":")
    warnings.warn_explicit(message, NonFiniteWarning, file or "amanda", int(line or 1))


def _received_message(found: Mapping[str, Any]) -> str:
    what = "a parameter of the model" if found["is_parameter"] else "data of the program"
    if found["is_state"]:
        is_outside = found["id"].startswith("/")
        what = "a variable of the program" if is_outside else "a buffer of the model"
    if found["parameter"]:
        what = f"parameter {found['parameter']} of the model"
    return printable(
        f"{what} holds NaN: {found['input']} of op {found['id']}, which read it first; "
        "no operator produced it"
    )


def _states_of(context: OpContext, parameters: Mapping[int, str | None]) -> Sequence[int]:
    """Return the positions of the inputs that keep their values, beside parameters."""
    if not context.runs_at_once:
        return ()
    others = [
        i for i, t in enumerate(context.get_inputs()) if t is not None and i not in parameters
    ]
    return [i for i in others if context.get_value(i) is not None]


def _has_nan(tensor: Any) -> bool:
    reader = reader_of(tensor)
    return reader.may_hold_nan(tensor) and bool(reader.has_nan(tensor))


def _row_of(name: str, found: dict[str, Any]) -> tuple[Any, ...]:
    def number(key: str) -> str:
        value = found.get(key)
        return "-" if value is None else f"{value:.4g}"

    shape = "x".join(map(str, found["shape"])) or "scalar"
    infinities = found.get("posinf", 0) + found.get("neginf", 0)
    figures = tuple(number(key) for key in ("min", "max", "mean", "std"))
    return (name, shape, found["dtype"], found.get("nan", 0), infinities, *figures)
