"""Adapters, which make tensors and programs of a framework for the contract tests.

An adapter makes tensors and programs with calls of the framework only; it
knows nothing of Amanda. Its base class says how the framework differentiates:

- :class:`EagerFramework`: it records operators, and the user runs backward from outputs to leaves;
- :class:`FunctionalFramework`: it differentiates functions;
- :class:`Framework`: it builds graphs, and the adapter supplies its own programs.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import attrs

from amanda.interface.action import InstPoint
from amanda.interface.context import OpContext
from amanda.interface.driver import Capability
from amanda.interface.tool import Tool

_F = TypeVar("_F", bound=Callable[..., Any])
Build = Callable[..., Any]
Values = Any


def requires(*capabilities: Capability) -> Callable[[_F], _F]:
    """Mark a contract test, or all those of a class: skipped for drivers that lack a capability."""

    def mark(marked: _F) -> _F:
        tests: list[Any] = [marked]
        if isinstance(marked, type):
            tests = [test for name, test in vars(marked).items() if name.startswith("test_")]
        for test in tests:
            test.requires = (*capabilities, *getattr(test, "requires", ()))
        return marked

    return mark


@attrs.frozen
class Trained:
    """The outputs of one training run, and the gradient of each input (None: no gradient)."""

    outputs: list[Any]
    gradients: list[Any]


class Program(abc.ABC):
    """A small computation that can be run again and again; all results are nested lists."""

    @abc.abstractmethod
    def run(self) -> list[Any]:
        """The outputs."""

    @abc.abstractmethod
    def train(self) -> Trained:
        """The outputs, and the gradients of their sum with respect to the inputs."""

    @abc.abstractmethod
    def second_gradients(self) -> list[Any]:
        """The gradients of the sum of the first gradients."""

    def forward(self) -> Callable[[], list[Any]]:
        """Run forward only; the result runs backward and gives the gradients.

        Only called for drivers without ``Capability.STATIC_GRAPH``.
        """
        raise NotImplementedError


class Framework(abc.ABC):
    """An adapter of one framework (and execution mode).

    Attributes:
        types: op type of each operator below, as ``get_op()`` tells it.
        names: declared names of the tensor parameters of each operator. ``linear`` has
            two where its bias is added by an operator of its own.
        attributes: the other arguments of ``split`` and their values when it
            cuts a tensor in two halves.
        backward_types: types of the backward operators of ``mul``, ``relu`` and of
            ``linear`` with bias, gradient accumulation left out, in any order.
        accumulation: type of the backward operator that accumulates a leaf's
            gradient; "" if there is none.
        relu_consumes: how many tensors the backward operator of ``relu`` consumes; the
            first is the gradient.
        forgetful: ``add`` or ``relu``, whose gradient needs no input.
        forks: True if the framework works in a forked child of a process that has used it.
        keeps: bytes of the process that the framework itself keeps, without Amanda, of what it
            makes for one scope of the contract's soak.
        kept_objects: likewise, objects that the garbage collector knows; none of Amanda's.
        has_parameters: True if the framework tells a parameter or variable from other tensors.
        separator: between the names of modules in ids.
        numbers_calls: True if the ids of a further call of a module have its number (``first#1``);
            otherwise the count of the operators in it goes on.
        watched: modules and classes that a driver may patch.
        namespace: the first part of the driver's namespace; "" for the last part of the driver's
            ``framework``.
    """

    types: ClassVar[Mapping[str, str]]
    names: ClassVar[Mapping[str, Sequence[str]]]
    attributes: ClassVar[Mapping[str, Any]] = {}
    backward_types: ClassVar[Mapping[str, Sequence[str]]] = {}
    accumulation: ClassVar[str] = ""
    relu_consumes: ClassVar[int] = 1
    forgetful: ClassVar[str] = "add"
    forks: ClassVar[bool] = True
    keeps: ClassVar[int] = 0
    kept_objects: ClassVar[float] = 0
    has_parameters: ClassVar[bool] = True
    separator: ClassVar[str] = "."
    numbers_calls: ClassVar[bool] = True
    watched: ClassVar[Sequence[object]] = ()
    namespace: ClassVar[str] = ""

    # -- tensors ----------------------------------------------------------

    @abc.abstractmethod
    def tensor(self, values: Values) -> Any:
        """A constant tensor."""

    @abc.abstractmethod
    def parameter(self, values: Values) -> Any:
        """A trainable parameter or variable."""

    @abc.abstractmethod
    def to_list(self, tensor: Any) -> Any:
        """A run-time tensor's numbers as nested lists; None for a symbolic one's."""

    def unreferenceable(self, value: float) -> Any:
        """A constant without dimensions that takes no weak reference, as NumPy's scalars are;
        None if all tensors of the framework take weak references."""
        return None

    def reference(self, tensor: Any) -> Callable[[], Any]:
        """A function that gives `tensor`, or None once it has died.

        Overridden where the tensors that routines get take no weak reference: it then
        refers to something that lives as long as the tensor, such as its buffer.
        """
        return weakref.ref(tensor)

    def type_of(self, op: Any) -> str:
        """The type of an operator or backward operator."""
        kind = getattr(op, "type", None)
        return kind if isinstance(kind, str) else str(op.__name__)

    def inputs(self, op: str, *tensors: Any) -> list[Any]:
        """The flat inputs of ``cat`` or ``split`` called with these tensors.

        They differ from the tensors where the framework passes more, such as an axis.
        """
        return list(tensors)

    # -- operators --------------------------------------------------------

    @abc.abstractmethod
    def add(self, *args: Any, **kwargs: Any) -> Any:
        """The framework's elementwise sum of two tensors."""

    @abc.abstractmethod
    def mul(self, *args: Any, **kwargs: Any) -> Any:
        """The framework's elementwise product of two tensors."""

    @abc.abstractmethod
    def relu(self, *args: Any, **kwargs: Any) -> Any:
        """The framework's positive part of a tensor."""

    @abc.abstractmethod
    def linear(self, *args: Any, **kwargs: Any) -> Any:
        """The framework's linear operator: input, weight (a row per output), optional bias.

        Where the framework's operator takes no bias (see `names`), a given bias is added
        by another operator.
        """

    @abc.abstractmethod
    def cat(self, tensors: Sequence[Any]) -> Any:
        """The framework's concatenation of a list of tensors along the first dimension."""

    @abc.abstractmethod
    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        """Equal parts of a tensor along its first dimension, by one operator."""

    def add_inplace(self, tensor: Any, other: Any) -> Any:
        """Add to a tensor in place; only needed with ``Capability.IN_PLACE``."""
        raise NotImplementedError

    def dropout(self, tensor: Any) -> Any:
        """An operator that draws random numbers."""
        raise NotImplementedError

    def cast(self, tensor: Any) -> Any:
        """Cast a tensor to another floating-point dtype; None if the framework has only one."""
        return None

    def scale(self, tensor: Any, factor: float) -> Any:
        """A tensor times a number; called in routines."""
        return self.mul(tensor, self.tensor(_like(self.to_list(tensor), factor)))

    # -- programs ---------------------------------------------------------

    def training_step(self) -> Callable[[], Any] | None:
        """A function that trains one step each time that it is called.

        The loss and the step of the framework's own optimizer run ``mul``, outside of modules. None
        where the framework has no optimizer, or one that runs no operators.
        """
        return None

    @abc.abstractmethod
    def program(self, build: Build, *values: Values) -> Program:
        """The program that calls `build` with one trainable tensor per item of `values`.

        `build` uses the operators above and returns a tensor or a sequence of them.
        """

    def model(self, weight: Values, calls: int = 1) -> Build:
        """A model of class ``Model`` with children ``first`` and ``second``; each runs one
        ``linear`` with `weight` and no bias, ``first`` before ``second``, `calls` times over.

        Only needed with ``Capability.MODULES``. A program may be built from it.
        """
        raise NotImplementedError

    def module_path(self, name: str) -> str:
        """The result of ``get_module()`` for operators of the child of this name of ``model``."""
        return name

    def user_op(self) -> tuple[str, Build]:
        """An operator that the user has defined (type and function): twice its input.

        Only needed with ``Capability.USER_OPS``.
        """
        raise NotImplementedError

    def counted_op(self) -> tuple[Build, Callable[[], int]] | None:
        """An operator of one tensor, and a function that gives how often the framework has executed
        it; None if it does not count."""
        return None

    def further_ops(self) -> Mapping[str, Build]:
        """Functions of one tensor that run operators of other types, compiled ones among them: by
        the type that has to be seen, or else counted as not seen."""
        return {}

    def seed(self) -> None:
        """Make the random numbers that follow reproducible."""

    def rng_state(self) -> Any:
        """The state of the random number generator, comparable with ``==``."""
        return None

    def global_state(self) -> Any:
        """Modes of the framework that a driver changes, such as whether gradients are recorded
        in this thread; comparable with ``==``."""
        return None


class EagerFramework(Framework):
    """An adapter of a framework that runs operators at once and records a backward pass."""

    @abc.abstractmethod
    def leaf(self, values: Values) -> Any:
        """A tensor that gradients are wanted for."""

    @abc.abstractmethod
    def backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Run backward from the sum of `outputs`; the leaves' gradients as nested lists.

        Clears the accumulated gradients again. None for a leaf without a gradient.
        """

    def second_backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Differentiate the sum of the gradients of the sum of `outputs` once more.

        Only needed with ``Capability.SECOND_ORDER``.
        """
        raise NotImplementedError

    def program(self, build: Build, *values: Values) -> Program:
        return EagerProgram(self, build, values)


class _Calls(Program):
    """Calls a function with the same tensors at every run."""

    def __init__(self, framework: Framework, build: Build, tensors: Sequence[Any]) -> None:
        self._to_list = framework.to_list
        self._build = build
        self._tensors = tensors

    def run(self) -> list[Any]:
        return self._listed(self._function(*self._tensors))

    def _function(self, *tensors: Any) -> list[Any]:
        result = self._build(*tensors)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def _listed(self, tensors: Sequence[Any]) -> list[Any]:
        return [None if tensor is None else self._to_list(tensor) for tensor in tensors]


class EagerProgram(_Calls):
    """A program whose tensors are leaves."""

    def __init__(self, framework: EagerFramework, build: Build, values: Sequence[Values]) -> None:
        super().__init__(framework, build, [framework.leaf(value) for value in values])
        self._framework = framework

    def train(self) -> Trained:
        outputs = self._function(*self._tensors)
        gradients = self._framework.backward(outputs, self._tensors)
        return Trained(self._listed(outputs), gradients)

    def second_gradients(self) -> list[Any]:
        outputs = self._function(*self._tensors)
        return self._framework.second_backward(outputs, self._tensors)

    def forward(self) -> Callable[[], list[Any]]:
        outputs = self._function(*self._tensors)
        return lambda: self._framework.backward(outputs, self._tensors)


class FunctionalFramework(Framework):
    """An adapter of a framework that runs operators at once and differentiates functions.

    In autograd or JAX there are neither leaves nor a backward pass that the user starts:
    ``grad(f)(x)`` calls ``f`` with a tracer in place of ``x``.
    """

    @abc.abstractmethod
    def vjp(
        self, function: Callable[..., list[Any]], tensors: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], list[Any]]]:
        """Call a function and prepare its gradients.

        Args:
            function: takes as many tensors as there are `tensors`, and returns a list of tensors.
            tensors: with ``Capability.SECOND_ORDER`` they may be tracers of a call around this one.

        Returns:
            The outputs, and a function that runs the backward pass: it gives the gradients of
            the sum of all outputs, one for each of `tensors` (None for none).
        """

    def program(self, build: Build, *values: Values) -> Program:
        return FunctionalProgram(self, build, values)


class FunctionalProgram(_Calls):
    """A program whose function is called or differentiated."""

    def __init__(
        self, framework: FunctionalFramework, build: Build, values: Sequence[Values]
    ) -> None:
        super().__init__(framework, build, [framework.tensor(value) for value in values])
        self._framework = framework

    def train(self) -> Trained:
        outputs, backward = self._framework.vjp(self._function, self._tensors)
        return Trained(self._listed(outputs), self._listed(backward()))

    def second_gradients(self) -> list[Any]:
        _, backward = self._framework.vjp(self._gradients, self._tensors)
        return self._listed(backward())

    def forward(self) -> Callable[[], list[Any]]:
        _, backward = self._framework.vjp(self._function, self._tensors)
        return lambda: self._listed(backward())

    def _gradients(self, *tensors: Any) -> list[Any]:
        """The gradients that there are of the function."""
        _, backward = self._framework.vjp(self._function, tensors)
        return [gradient for gradient in backward() if gradient is not None]


class Probe(Tool):
    """The tool of the contract tests: functions of a context, for operators of one type.

    Args:
        framework: tells the type of an operator.
        only: the type of the (forward) operators to analyse; "" for all.
        before, after: analysis routines of forward operators.
        before_backward, after_backward: analysis routines of backward operators.

    Attributes:
        seen: what the analyses returned, in the order of their calls.
    """

    def __init__(
        self,
        framework: Framework,
        only: str = "",
        *,
        before: Callable[[OpContext], Any] | None = None,
        after: Callable[[OpContext], Any] | None = None,
        before_backward: Callable[[OpContext], Any] | None = None,
        after_backward: Callable[[OpContext], Any] | None = None,
    ) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._framework = framework
        self._only = only
        given = (before, after, before_backward, after_backward)
        for point, analysis in zip(InstPoint, given, strict=True):
            if analysis is not None:
                self.add_inst_for_op(
                    partial(self._ask, analysis),
                    backward=point.is_backward,
                    require_outputs=point
                    in (InstPoint.AFTER_FORWARD_OP, InstPoint.AFTER_BACKWARD_OP),
                )

    def _ask(self, analysis: Callable[[OpContext], Any], context: OpContext) -> None:
        if self._only in ("", self._framework.type_of(context.get_op())):
            self.seen.append(analysis(context))


def _like(values: Values, number: float) -> Values:
    return [_like(v, number) for v in values] if isinstance(values, list) else number
