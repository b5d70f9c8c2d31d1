"""Runs the operator itself, between the routines before and after it.

The operator computes with the values that the routines have returned, which may be substitutes of
the caller's tensors; a replacement may run instead; and routines on its gradients as a whole are
registered around it. In-place and view operators are special cases at each of these steps: the
tensors that they write into or alias must stay the caller's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amanda.engine.backward import OpHandle
from amanda.engine.dispatch import OpExecution
from amanda.engine.plan import ActionPlan
from amanda.errors import CapabilityError, RoutineResultError, described
from amanda.interface.action import Action, ActionKind
from amanda_torch import _internals
from amanda_torch.autograd.functions import AmandaGradients, AmandaOperator, AmandaViews
from amanda_torch.autograd.nodes import edge_of
from amanda_torch.autograd.substitution import alias_for
from amanda_torch.autograd.user_functions import (
    FunctionNode,
    created_nodes,
    is_function_call,
    skip_functions,
)
from amanda_torch.autograd.whole_operator import (
    DelayedGradients,
    ReplacedGradients,
    ViewGradients,
    WholeOperator,
    aliases_of,
    gather_inputs,
    hook_input_edges,
    hook_outputs,
)
from amanda_torch.operators.calls import TorchCall, outputs_of, tensors_of, with_tensors
from amanda_torch.operators.memory import copied_for, distinct_part, has_memory, overlap
from amanda_torch.operators.names import base_name, is_builtin, is_in_place, may_alias
from amanda_torch.operators.parameters import output_count
from amanda_torch.routines import RoutineDispatcher

_STATE = frozenset({"running_mean", "running_var"})
"""Inputs that ``batch_norm`` and ``instance_norm`` change, although their names do not end with an
underscore."""

_OVERRIDING = "tensors that override PyTorch's operators"

_SEVERAL_VIEWS = frozenset({"tensor_split", "hsplit", "vsplit", "dsplit"})
"""Views whose outputs have a node each, so that several nodes produce the input's gradient."""

_RESHAPING = frozenset(
    "squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_ detach_".split()
)
"""Operators in place that change a tensor's sizes and strides, or its place in autograd's graph,
and none of its elements."""

_ONE_NODE = frozenset(
    "batch_norm layer_norm true_divide divide multiply subtract var var_mean std std_mean".split()
)
"""Composite operators with a single autograd node."""

_IN_ORDER = frozenset({"lstm", "group_norm"})
"""Operators of several nodes whose first input gets its gradient first."""

_TENSORS = _internals.PLAIN_TENSORS | {type(None)}
"""Types of inputs whose operators run no code of the program."""


Behind = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[int] | None]
"""Function of the inputs and attributes of an operator that returns the positions of inputs that it
uses through views, if a single node produces the gradients of the views and of all other inputs;
else None."""


def _behind_linear(values: Sequence[Any], _: Mapping[str, Any]) -> Sequence[int] | None:
    # The weight is transposed. An input of more dimensions becomes a matrix, by a copy unless it is
    # contiguous.
    dimensions = values[0].dim()
    if dimensions < 2 or not values[0].is_contiguous():
        return None
    return (1,) if dimensions == 2 else (1, 0)


def _behind_matmul(values: Sequence[Any], _: Mapping[str, Any]) -> Sequence[int] | None:
    first, second = values[0].dim(), values[1].dim()
    if (first, second) in ((1, 1), (2, 1), (2, 2)):
        return ()
    is_folded = first > 2 and second == 2 and values[0].is_contiguous()
    return (0,) if is_folded and values[0].numel() else None


def _behind_prelu(values: Sequence[Any], _: Mapping[str, Any]) -> Sequence[int] | None:
    if values[0].dim() == values[1].dim():
        return ()
    return (1,) if values[1].is_contiguous() else None


def _behind_convolution(
    values: Sequence[Any], attributes: Mapping[str, Any]
) -> Sequence[int] | None:
    # Uneven padding by name has a node of its own.
    if isinstance(attributes.get("padding"), str) and attributes["padding"] != "valid":
        return None
    return (0,) if values[0].dim() < values[1].dim() else ()


def _behind_group_norm(values: Sequence[Any], _: Mapping[str, Any]) -> Sequence[int] | None:
    return () if all(value is None or value.is_contiguous() for value in values) else None


_BEHIND_VIEWS: Mapping[str, Behind] = {
    "group_norm": _behind_group_norm,
    "linear": _behind_linear,
    "matmul": _behind_matmul,
    "__matmul__": _behind_matmul,
    "prelu": _behind_prelu,
    **{
        f"{kind}{number}d": _behind_convolution
        for kind in ("conv", "conv_transpose")
        for number in (1, 2, 3)
    },
}
"""Composite operators that compute with views of inputs."""


class Operation:
    """One run of the operator itself, or of its replacement.

    Args:
        handle: handle of the operator's records, for hooks.
        execution: runs the pending analyses after the operator; None without one.
        outer: function modes of the program, for the call of the operator.

    Attributes:
        plan: the operator's actions; complete when :meth:`run` has returned.
        in_place: whether the operator writes into an input or an ``out=`` tensor.
        is_function: whether the operator is an ``autograd.Function``, run as it is.
        start: the sequence number read before the operator.
        values: the inputs with which it has run.
    """

    def __init__(
        self,
        dispatcher: RoutineDispatcher,
        plan: ActionPlan,
        call: TorchCall,
        handle: OpHandle,
        execution: OpExecution | None,
        outer: Sequence[Any],
    ) -> None:
        self._outer = outer
        self._dispatcher = dispatcher
        self._call = call
        self._handle = handle
        self._execution = execution
        self.plan = plan
        self._before = plan
        self._function: FunctionNode | None = None
        self._gathered = False
        self._alias: Any = None
        self._delayed: DelayedGradients | None = None
        self._overlaps = False
        self.values: list[Any] = []
        self._edges: list[Any] = []
        name = call.op.__name__
        self.in_place = is_in_place(name, call.kwargs)
        self.records_gradients = torch.is_grad_enabled() and not (
            # An autograd.Function that gets tensors with and without tangents aborts, or gives
            # zeros.
            _internals.in_functorch() or _internals.in_forward_ad()
        )
        self.is_function = plan.replace is None and is_function_call(call.func)
        self.start = _internals.sequence_number()

    def run(self, values: list[Any]) -> Any:
        """Run the operator on `values`, and then the analyses that see its outputs."""
        self.values = values
        if self.records_gradients and self.in_place:
            # Its run changes the edge of the tensor that it writes into.
            self._edges = [edge_of(value) for value in values]
            self._call.edges = [edge_of(value) for value in self._call.inputs]
        if self.is_function:
            result = self._run_function(values)
        elif self.records_gradients and self.plan.acts_on_gradients:
            result = self._run_with_gradients(values)
        else:
            result = self._vanilla(values)
        if self._execution is not None:
            outputs = outputs_of(result, self._call.inputs, self._call.written)
            self.plan = self._execution.finish(outputs)
        return result

    def _run_with_gradients(self, values: list[Any]) -> Any:
        """Run an operator with actions on its gradients."""
        on_inputs = self._acts_on_inputs(values)
        if self._makes_views(values) and (on_inputs or self.plan.before_backward):
            aliases = aliases_of(values)
            result = self._run_on(aliases)
            self._alias = aliases[0].grad_fn if aliases[0] is not values[0] else None
            return result
        return self._run_before_hooks(values) if on_inputs else self._vanilla(values)

    def _acts_on_inputs(self, values: list[Any]) -> bool:
        """True if actions on gradients of inputs require an identity on the inputs."""
        plan = self.plan
        if plan.after_backward and not self._refuses_identity:
            # Tensors whose class overrides operators are not replaced.
            return True
        return plan.replace_backward is not None and not self._is_nested(values)

    def _run_before_hooks(self, values: list[Any]) -> Any:
        """Run the operator, with the actions on the gradients of its inputs registered."""
        plan = self.plan
        if self._writes_by_copies(values) and plan.replace_backward is None:
            # For an in-place operator on a view, autograd rebuilds the nodes of all views of the
            # base, and the gathering identity with them: compute on a copy, and write it back.
            gathered = gather_inputs(self._whole.after_sums, values)
            self._gathered = True
            if plan.replace is None:
                return self._in_place_on_substitute(gathered)
            # A replacement may write into its inputs, too.
            return self._replaced(plan.replace, [gathered[0].clone(), *gathered[1:]])
        if self.in_place or self._is_view(values):
            return self._vanilla(values)
        if plan.replace_backward is not None:
            self._gathered = True
            return self._with_gradient(values)
        behind = self._behind_views(values)
        if behind and plan.claims:
            # Contract rule 8: the routines of all of its nodes run first.
            in_order = self._call.op.__name__ != "linear"
            self._delayed = DelayedGradients(self._whole, values, behind, in_order)
            self._gathered = True
            return self._run_on(self._delayed.before_views(values))
        if behind is not None:
            return self._vanilla(values)
        in_order = self._call.op.__name__ in _IN_ORDER
        self._gathered = True
        gathered = gather_inputs(
            self._whole.after_sums, values, in_order=in_order, identity=self._identity
        )
        return self._run_on(gathered)

    def _count_transformed(self) -> None:
        """Count and warn that actions on gradients do nothing under ``torch.func`` or with
        tangents."""
        needs_gradient = any(v is not None and _internals.needs_gradient(v) for v in self.values)
        if not (needs_gradient and torch.is_grad_enabled()):
            return
        if not _internals.in_functorch():
            self._dispatcher.not_seen("actions on gradients in forward-mode differentiation")
        else:
            self._dispatcher.not_seen("actions on gradients under a functorch transform")
            self._dispatcher.warn_once(
                "actions on the gradients of operators do nothing under a transform of torch.func",
                self.plan.op_id,
                ": compute its gradient by torch.autograd.grad() or backward(), outside of "
                "torch.func",
            )

    @property
    def _refuses_identity(self) -> bool:
        """True if no input may be replaced by an identity of it."""
        return _internals.refuse_identity(self._call.inputs)

    @property
    def _aliases(self) -> bool:
        """True if the result may alias an input."""
        return may_alias(self._call.op.__name__, self._call.kwargs)

    @property
    def _whole(self) -> WholeOperator:
        """The routines on the operator's gradients as a whole."""
        return WholeOperator(self._dispatcher, self._handle)

    def _run_function(self, values: list[Any]) -> Any:
        """Run an ``autograd.Function``, and keep its node."""
        with created_nodes() as nodes:
            result = self._vanilla(values)
        # A function that changes an argument in place returns that argument. If it ran with a
        # substitute, the caller's tensor is changed here.
        given = {id(new): old for new, old in zip(values, self._call.inputs, strict=True)}
        outputs = tensors_of(result)
        changed = [given.get(id(output), output) for output in outputs]
        for output, target in zip(outputs, changed, strict=True):
            if target is not output:
                target.copy_(output)
        if self.records_gradients and any(output.requires_grad for output in outputs):
            self._function = FunctionNode(nodes[0], self._whole, self._call, values, outputs)
        return with_tensors(result, outputs, changed)

    def _is_view(self, values: Sequence[Any]) -> bool:
        """True if the result may alias the one input that gets a gradient."""
        name = base_name(self._call.op.__name__)
        # With several operands einsum() computes products.
        if not self._aliases or (name == "einsum" and len(values) > 1):
            return False
        # `x.expand_as(y)` reads only the shape of `y`.
        inputs = values[:1] if name.endswith("_as") else values
        wanted = [value for value in inputs if value is not None and value.requires_grad]
        return len(wanted) <= 1

    def _makes_views(self, values: Sequence[Any]) -> bool:
        """True if it makes several views of its first input, each by a node of its own."""
        is_known = self.plan.replace is None and base_name(self._call.op.__name__) in _SEVERAL_VIEWS
        return is_known and not self.in_place and values[0].requires_grad

    @property
    def _identity(self) -> type[torch.autograd.Function]:
        """The class of the identity that gathers gradients."""
        return AmandaViews if self._aliases and not self.in_place else AmandaGradients

    def _behind_views(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Positions of the inputs that need a gradient and that the operator uses through views;
        None unless it is known before the run that one node produces the gradients of the views and
        of all other inputs."""
        if (
            self.plan.replace is not None
            or self._outer
            or _internals.is_autocasting()
            or not is_builtin(self._call.func)
            or not _TENSORS.issuperset(map(type, values))
        ):
            return None
        name = base_name(self._call.op.__name__)
        find = _BEHIND_VIEWS.get(name)
        if find is None:
            return () if name in _ONE_NODE or _internals.is_one_node(name) else None
        if any(value is not None and value.layout is not torch.strided for value in values):
            return None
        behind = find(values, self._call.attributes)
        return behind and [index for index in behind if values[index].requires_grad]

    def _is_nested(self, values: Sequence[Any]) -> bool:
        """True if the values or the caller's tensors are nested tensors, which no
        ``autograd.Function`` takes."""
        tensors = (*values, *self._call.inputs)
        return self._refuses_identity and any(map(_internals.is_strided_nested, tensors))

    def _writes_by_copies(self, values: list[Any]) -> bool:
        """True if the operator writes into a view or a list (and not into an ``out=`` tensor), so
        that it runs on copies if there are routines on the gradients of its inputs.

        Sets `_overlaps` for a list of overlapping tensors, which cannot run on copies.
        """
        if (
            not self.in_place
            or base_name(self._call.op.__name__) in _RESHAPING
            or self._call.kwargs.get("out") is not None
            or not (values and isinstance(values[0], torch.Tensor))
        ):
            return False
        targets = [self._call.inputs[index] for index in self._first_argument()]
        if len(targets) == 1:
            return _internals.is_view(values[0])
        # The write into each tensor would change the next one.
        self._overlaps = overlap(targets)
        return not self._overlaps

    def _run_on(self, values: list[Any]) -> Any:
        """Run with aliases or identities of the values; one that the operator returns as it is
        (``x.to(x.dtype)``) is replaced by the value."""
        result = self._vanilla(values)
        outputs = tensors_of(result)
        origin = {id(new): old for new, old in zip(values, self.values, strict=True)}
        return with_tensors(result, outputs, [origin.get(id(o), o) for o in outputs])

    def hook_outputs(self, outputs: list[Any]) -> list[Any]:
        """Register the routines on the output gradients; return the outputs to use from now on."""
        if self.plan.acts_on_gradients and not self.records_gradients:
            self._count_transformed()
        if self._function is not None:
            self._function.hook_outputs(self.plan, outputs, self.start)
            return outputs
        if not (self.records_gradients and self.plan.before_backward):
            return outputs
        if self._alias is not None:
            views = ViewGradients(self._whole, len(outputs))
            views.register(outputs, self._alias, self.start)
            return outputs
        return hook_outputs(self._whole, outputs, self.start, self._identity)

    def hook_inputs(self, result: Any) -> None:
        """Register the actions on the input gradients that were not registered before the run.

        Raises:
            CapabilityError: no single hook sees all input gradients.
        """
        plan = self.plan
        if self._function is not None:
            self._function.hook_inputs(plan)
            return
        if not (plan.acts_on_gradients and self.records_gradients):
            return
        if self._delayed is not None:
            self._delayed.hook(self.values, tensors_of(result), self.start)
        kinds = self._not_gathered()
        if not kinds:
            return
        edges = self._edges or [edge_of(value) for value in self.values]
        outputs = tensors_of(result)
        whole, values = self._whole, self.values
        if self._refuses_identity and any(map(_internals.refuses_reads, self._call.inputs)):
            # The gradients of samples bypass autograd: routines get None.
            self._dispatcher.not_seen("gradients of the samples of an ExpandedWeight")
        if self._overlaps:
            self._dispatcher.not_seen("gradients of lists of tensors that overlap")
            return
        if not hook_input_edges(whole, kinds, edges, outputs, self.start, values):
            if self._refuses_identity:
                of = "nested tensors" if self._is_nested(values) else _OVERRIDING
                self._dispatcher.not_seen(f"gradients of {of}")
                return
            raise CapabilityError(
                f"the input gradients of op {plan.op_id} leave it through several autograd nodes: "
                f"{kinds[0].value}() must be recorded before it runs; register the analysis with "
                "require_outputs=False"
            )

    def _not_gathered(self) -> list[ActionKind]:
        """The kinds of actions on input gradients that were not registered before the run."""
        plan, before = self.plan, self._before
        kinds = (
            (ActionKind.AFTER_BACKWARD_OP, before.after_backward, plan.after_backward),
            (ActionKind.REPLACE_BACKWARD_OP, before.replace_backward, plan.replace_backward),
        )
        return [kind for kind, then, now in kinds if now and not (then and self._gathered)]

    def _vanilla(self, values: list[Any]) -> Any:
        """Run the operator or its replacement with these values."""
        call = self._call
        if self.plan.replace is not None:
            return self._replaced(self.plan.replace, values)
        if all(map(operator.is_, values, call.inputs)):
            return self._call_func(call.args, call.kwargs)
        if self.in_place and call.kwargs.get("out") is None:
            return self._in_place_on_substitute(values)
        if _internals.is_collective(call.func):
            self._refuse_written(values)
        args, kwargs = call.rebuilt(values)
        result = self._call_func(args, kwargs)
        if call.attributes.get("training") or call.attributes.get("use_input_stats"):
            for name, old, new in zip(call.names, call.inputs, values, strict=True):
                if name in _STATE and new is not old:
                    # The operator has updated the substitute; the model holds the original.
                    old.copy_(new)
        return result

    def _refuse_written(self, values: Sequence[Any]) -> None:
        """Refuse to have a collective write into a substitute: it may go on after it has returned.

        Raises:
            CapabilityError: a routine has returned another tensor for one that it writes into.
        """
        call = self._call
        for index in call.written:
            if values[index] is not call.inputs[index]:
                raise CapabilityError(
                    f"op {self.plan.op_id} writes into its input {call.names[index]!r} of the "
                    "program, for which a routine has returned another tensor; change that in place"
                )

    def _call_func(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator; function modes of the program see it as without Amanda."""
        if not (self._outer or _internals.READING.is_on):
            return _internals.call_in_place(self._call.func, args, kwargs)
        _internals.show_modes(self._outer)
        try:
            with _internals.running():
                return _internals.call_in_place(self._call.func, args, kwargs)
        finally:
            if self._outer:
                _internals.hide_modes()

    def _replaced(self, action: Action, values: list[Any]) -> Any:
        """Run a replacement; if the operator writes into tensors, write the result into them."""
        result = self._dispatcher.replace(action, values, self._call)
        outputs = tensors_of(result)
        out = self._call.kwargs.get("out")
        wanted = _declared_outputs(self._call)
        if not outputs and self._has_written(values, result, wanted):
            return result
        first = self._first_argument() if self.in_place else []
        # _foreach_mul_() has no output by its schema; in Python it returns the list that it writes
        # into.
        declared = wanted or (len(first) if wanted == 0 else None)
        _check_count(action, declared, outputs, result)
        if out is not None:
            self._check_writable(action, outputs, tensors_of(out), is_resized=True)
            return _written_out(out, result, outputs)
        if first:
            return self._written_first(action, outputs, wanted)
        return outputs[0] if wanted == 1 else result

    def _has_written(self, values: Sequence[Any], result: Any, wanted: int | None) -> bool:
        """Copy the values that a replacement without outputs has written into to the caller's
        tensors.

        For operators such as ``x[i] = v`` and fused optimizers.

        Args:
            wanted: the number of outputs of the operator; None if any number.

        Returns:
            False if the operator has outputs.
        """
        targets = self._targets() if self._call.kwargs.get("out") is None else []
        if wanted != 0 and not (wanted is None and targets and result is None):
            return False
        for index in targets:
            _write(values[index], self._call.inputs[index])
        return True

    def _written_first(self, action: Action, outputs: Sequence[Any], wanted: int | None) -> Any:
        """Write the outputs of a replacement into the tensors of the first argument.

        Returns:
            The result of the operator: the tensor, or the list of tensors.
        """
        targets = [self._call.inputs[index] for index in self._first_argument()]
        self._check_writable(action, outputs, targets)
        for output, target in zip(outputs, targets, strict=False):
            _write(output, target)
        if wanted != 0:
            return targets[0]
        args, kwargs = self._call.args, self._call.kwargs
        return args[0] if args else kwargs["self"]

    def _check_writable(
        self,
        action: Action,
        outputs: Sequence[Any],
        targets: Sequence[Any],
        is_resized: bool = False,
    ) -> None:
        """Check that PyTorch allows an operator to write outputs of these types and shapes into
        tensors.

        Args:
            is_resized: True if the tensors get the shapes of the outputs, as with ``out=``.

        Raises:
            RoutineResultError: the type cannot be cast to that of the tensor, or the shape differs.
        """
        for output, target in zip(outputs, targets, strict=False):
            if output is target:
                continue
            if torch.can_cast(output.dtype, target.dtype) and (
                is_resized or output.shape == target.shape
            ):
                continue
            raise RoutineResultError(
                f"{action.routine} replaces op {self.plan.op_id}, which writes into a tensor: of "
                f"{target.dtype} and shape {tuple(target.shape)}; got one of {output.dtype} and "
                f"shape {tuple(output.shape)}"
            )

    def _first_argument(self) -> list[int]:
        """Positions of the tensors of the first argument: a tensor or a list of tensors."""
        places = self._call.places
        return [i for i, place in enumerate(places) if place[0] == places[0][0]]

    def _targets(self) -> list[int]:
        """Positions of the inputs that the operator writes into.

        An in-place operator writes into its first argument, a tensor or a list of tensors
        (``_foreach_add_``), and any operator into the inputs that its schema marks.
        """
        first = self._first_argument() if self.in_place else []
        return sorted({*first, *self._call.written})

    def _in_place_on_substitute(self, values: list[Any]) -> Any:
        """Compute with substitutes, and write the results into the caller's tensors."""
        call = self._call
        if base_name(call.op.__name__) in _RESHAPING:
            # The caller's tensor gets the new shape, which a copy into it would not set.
            _write(values[0], call.inputs[0])
            return self._call_func(call.args, call.kwargs)
        if self._is_refused():
            return self._call_func(call.args, call.kwargs)
        targets = self._targets()
        values = list(values)
        for index in targets:
            if values[index] is not call.inputs[index]:
                values[index] = copied_for(values[index], call.inputs[index])
        args, kwargs = call.rebuilt(values)
        result = self._call_func(args, kwargs)
        origin = {}
        for index in targets:
            if values[index] is not call.inputs[index]:
                target = call.inputs[index]
                distinct_part(target, target).copy_(distinct_part(values[index], target))
                origin[id(values[index])] = target
        outputs = tensors_of(result)
        return with_tensors(result, outputs, [origin.get(id(o), o) for o in outputs])

    def _is_refused(self) -> bool:
        """True if PyTorch refuses to write into a tensor that shares memory with another input.

        A substitute shares no memory. Which overlaps an operator allows is found by running it on a
        copy of that memory.
        """
        call, target = self._call, self._call.inputs[0]
        # That run would draw numbers from the program's generator.
        is_plain = has_memory(target) and not call.kwargs.get("generator")
        # Operators on lists write into several tensors.
        if not is_plain or self._targets() != [0] or _internals.in_functorch():
            return False
        values = list(call.inputs)
        sharing = [
            index
            for index, value in enumerate(values)
            if has_memory(value) and _internals.shares_storage(value, target)
        ]
        if all(values[index] is target for index in sharing):
            return False
        device = target.device
        devices = [] if device.type == "cpu" else [device]
        with (
            torch.no_grad(),
            _internals.no_dispatch_modes(),
            torch.random.fork_rng(devices, device_type=device.type),
        ):
            memory = target.untyped_storage().clone()
            for index in sharing:
                value = values[index].detach()
                place = memory, value.storage_offset(), value.shape, value.stride()
                values[index] = value.new_empty(0).set_(*place)
            args, kwargs = call.rebuilt(values)
            try:
                call.func(*args, **kwargs)
            except RuntimeError:
                return True
        return False

    def _with_gradient(self, values: list[Any]) -> Any:
        """Run the operator with a tool's vector-Jacobian product beside its own gradient."""
        result = self._vanilla(values)
        outputs = tensors_of(result)
        positions = [i for i, value in enumerate(values) if value is not None]
        skip_functions(self._whole, outputs, self.start)
        vjp = ReplacedGradients(self._whole, positions, values)
        new = _internals.apply_function(
            AmandaOperator, vjp, len(outputs), *outputs, *[values[i] for i in positions]
        )
        return with_tensors(result, outputs, [*map(alias_for, outputs, new)])


def _write(value: Any, target: Any) -> None:
    """Copy a value into a tensor, unless it is that tensor."""
    if value is not target:
        target.copy_(value)


def _written_out(out: Any, result: Any, outputs: Sequence[Any]) -> Any:
    """Write the outputs of a replacement into the tensors of ``out=``, which are resized as by
    PyTorch.

    Returns:
        `result` with these tensors, which an operator with ``out=`` returns.
    """
    targets = tensors_of(out)
    for output, target in zip(outputs, targets, strict=True):
        if target.shape != output.shape:
            # By an operator with ``out=``, which gives the same warning as the replaced one.
            value = output.detach().to(target.dtype)
            _internals.call_in_place(torch.detach_copy, (value,), {"out": target})
            strides = torch.empty_like(output, device="meta").stride()
            target.as_strided_(output.shape, strides)
        _write(output, target)
    return out if isinstance(out, torch.Tensor) else with_tensors(result, outputs, targets)


def made_leaf(output: Any, inputs: Sequence[Any]) -> bool:
    """True if `output` is a new leaf that needs a gradient, as a factory function makes it."""
    return (
        output.requires_grad
        and output.grad_fn is None
        and all(output is not value for value in inputs)
    )


def _declared_outputs(call: TorchCall) -> int | None:
    """The number of tensors that an operator returns; None for any number."""
    # nonzero() has one output by its schema, and a tuple of tensors with as_tuple=True.
    is_tuple = call.attributes.get("as_tuple")
    return None if is_tuple else output_count(call.func, call.op.__name__)


def _check_count(action: Action, declared: int | None, outputs: Sequence[Any], result: Any) -> None:
    """Check the number of tensors that a replacement has returned.

    Args:
        declared: the number that the operator returns; None for any number.
        outputs: the tensors in `result`.

    Raises:
        RoutineResultError: the number or the types differ.
    """
    # An operator may omit outputs, as the tangent of a tensor without one.
    absent = sum(item is None for item in result) if isinstance(result, tuple) else 0
    if not outputs or declared not in (None, len(outputs), len(outputs) + absent):
        tensors = {None: "tensors", 0: "without a tensor", 1: "tensor"}
        wording = tensors.get(declared, f"{declared} tensors")
        raise RoutineResultError(
            f"{action.routine} replaces op {action.op_id} and must return its output "
            f"{wording}, got {described(result)}"
        )
