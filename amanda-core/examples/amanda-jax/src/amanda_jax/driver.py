"""The driver: what of JAX is replaced, and how values are differentiated."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from amanda.driver import Namespace, PatchSet
from amanda.errors import CoverageWarning

from amanda_jax import _internals as internals
from amanda_jax._internals import current_trace, evaluates, is_batched, is_differentiated, lowered
from amanda_jax.inside import INSIDE, holds_operators, runs_inside
from amanda_jax.marks import Marks
from amanda_jax.modules import Modules
from amanda_jax.operators import JaxOp, described
from amanda_jax.plugin import ATTACHED, JaxDriver

NO_OPERATORS = (
    "copy", "copy_p", "device_put", "pvary", "random_seed", "random_unwrap", "random_wrap", "stage",
)  # fmt: skip
"""Primitives that compute nothing."""

OPTIMIZERS = ("optax.", "flax.nnx.training.optimizer", "flax.training.train_state")
"""Beginnings of the names of modules."""

CASTS = ("convert_element_type", "device_put")

LINEAR = (*NO_OPERATORS, "custom_lin", "add_any", "convert_element_type")
"""What a backward pass runs for an operator that has been seen, for what is none, or to add up
gradients."""


class Differentiated(list[Any]):
    """The outputs of an operator.

    Attributes:
        places: of those that depend on a tensor that is differentiated; not of ``argmax``.
    """

    places: Sequence[int]


class JaxEagerDriver(JaxDriver):
    """Instruments JAX while it is attached."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self.parameters, self.gradients = Marks(), Marks()
        self._modules = Modules(self, self.parameters)
        self._has_warned = False

    @property
    def namespace(self) -> Namespace:
        """The name of the framework for mapping rules and results."""
        return Namespace(f"jax/{'.'.join(jax.__version__.split('.')[:2])}/eager")

    # -- what is patched --------------------------------------------------

    def attach(self) -> None:
        """Send the calls of jitted functions to Python, and replace what runs them."""
        if problems := internals.problems():
            raise ImportError(f"this JAX does not fit amanda-jax: {', '.join(problems)}")
        internals.IS_OPEN.set_global(True)
        super().attach()
        ATTACHED.add(self)

    def detach(self) -> None:
        """Put everything back."""
        ATTACHED.discard(self)
        super().detach()
        internals.IS_OPEN.set_global(False)

    def patch(self, patches: PatchSet) -> None:
        """Replace what binds primitives, what calls jitted functions, and the backward pass."""
        infer = patches.wrap(*internals.INFER, self._inferring)
        patches.wrap(*internals.RUN, functools.partial(self._calling_jitted, infer))
        for kind in internals.PRIMITIVES:
            patches.wrap(kind, internals.BIND, self._binding)
        patches.wrap(internals.ShardMap, internals.BIND, self._binding_shard_map)
        patches.wrap(jax.stages.Compiled, "__call__", self._calling_compiled)
        patches.wrap(*internals.BACKWARD, self._passing_backward)
        self.patch_modules()

    def patch_modules(self) -> None:
        """See the modules of the libraries that are imported."""
        self._modules.patch(self.patches)

    # -- tensors and differentiation --------------------------------------

    def is_tensor(self, value: Any) -> bool:
        """True for an array of numbers; keys of random numbers are none."""
        if isinstance(value, jax.Array):
            return not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
        return isinstance(value, np.ndarray)

    def unbox(self, value: Any) -> Any:
        """The array in a tracer."""
        return lowered(value)

    def shape_of(self, tensor: Any) -> Any:
        """The shape of the array in a tracer."""
        return np.shape(lowered(tensor))

    @contextmanager
    def vanilla(self) -> Iterator[None]:
        """Within it, this thread's operators are not instrumented, and compiled ones are found in
        C++."""
        outer = internals.IS_OPEN.get_local()
        with super().vanilla():
            try:
                internals.IS_OPEN.set_local(False)
                yield
            finally:
                internals.IS_OPEN.set_local(outer)

    @contextmanager
    def ad_isolated(self) -> Iterator[None]:
        """Within it, operators compute values."""
        with internals.evaluating():
            yield

    def wants_gradient(self, tensor: Any) -> bool:
        """True if operators on it are recorded for a backward pass."""
        return is_differentiated(tensor)

    def trains(self, module: Any) -> bool:
        """True within a function that is differentiated."""
        return any(isinstance(t, internals.DIFFERENTIATING) for t in _traces())

    def straight_through(self, value: Any, old: Any) -> Any:
        """`value` with the gradient of `old`, in every kind of differentiation."""
        dtype = old.dtype
        if value.dtype == dtype:
            return internals.boxed_as(old, value)

        def cast(gradients: Sequence[Any]) -> list[Any]:
            return [None if g is None else g.astype(dtype) for g in gradients]

        return self.with_vjp([value], [old], cast)[0] if is_differentiated(old) else value

    def with_vjp(self, outputs: Any, inputs: Any, vjp: Callable[..., Any]) -> list[Any]:
        """Tensors like `outputs` whose gradients go through `vjp` to `inputs`."""
        trace, count = internals.innermost(inputs), len(outputs)
        places = outputs.places if isinstance(outputs, Differentiated) else range(count)
        values = [internals.without(outputs[place], trace) for place in places]

        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def passing(*inputs: Any) -> Any:
            return values

        def backward(_: Any, gradients: Any) -> Any:
            spread: list[Any] = [None] * count
            for place, gradient in zip(places, gradients, strict=True):
                spread[place] = None if isinstance(gradient, internals.UNUSED) else gradient
            return tuple(vjp(spread))

        passing.defvjp(lambda *inputs: (values, None), backward, symbolic_zeros=True)
        made = list(outputs)
        with self.vanilla(), internals.under(trace):
            for place, value in zip(places, passing(*inputs), strict=True):
                made[place] = value
        # JAX 0.11 keeps the functions as long as the vector-Jacobian product.
        values.clear()
        return made

    def differentiate(self, function: Any, inputs: Any) -> Any:
        """The outputs of a function without the innermost box, and its vector-Jacobian product."""
        trace, count = internals.innermost(filter(is_differentiated, inputs)), len(inputs)
        places = [i for i, x in enumerate(inputs) if internals.belongs(x, trace)]

        def called(*values: Any) -> list[Any]:
            given = list(inputs)
            for place, value in zip(places, values, strict=True):
                given[place] = value
            found = list(function(given))
            inner = current_trace()
            moved.extend(i for i, y in enumerate(found) if internals.belongs(y, inner))
            return found

        moved: list[int] = []
        primals = [internals.without(inputs[place], trace) for place in places]
        with internals.below(trace):
            found, pull = jax.vjp(called, *primals)
        outputs = Differentiated(found)
        outputs.places = moved
        zeros = [internals.zero_of(output) for output in outputs]

        def vjp(gradients: Any) -> Any:
            given = [z if g is None else g for z, g in zip(zeros, gradients, strict=True)]
            found = [None] * count
            for place, gradient in zip(places, pull(given), strict=True):
                found[place] = gradient
            return found

        return outputs, vjp

    # -- parameters and phases --------------------------------------------

    def current_value(self, tensor: Any) -> Any:
        """The value of a parameter of a module, and of what the program differentiates by."""
        return None if self.parameters.name(tensor) is None else lowered(tensor)

    def parameter_name(self, tensor: Any) -> str | None:
        """The path of a parameter of a module."""
        return self.parameters.name(tensor) or None

    def phase_outside(self, inputs: Any) -> Any:
        """What computes with gradients, outside of a differentiated function, optimizes."""
        if self.trains(None):
            return "forward"
        is_step = any(self.gradients.name(tensor) is not None for tensor in inputs)
        return "optimizer" if is_step or _in_optimizer() else "forward"

    def _run(self, op: JaxOp, signature: Any, args: Any, kwargs: Any, function: Any) -> Any:
        """Run an operator, and note what comes of parameters and gradients."""
        tensors = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        for tensor in tensors:
            if internals.is_leaf(tensor):
                self.parameters.mark(tensor)
        if any(map(internals.has_tangent, tensors)):
            self.dispatcher.not_seen("tangents of forward-mode differentiation")
        result = self.run_operator(op, op.__name__, signature, args, kwargs, function)
        self._note_cast(op.__name__, tensors, result)
        is_step = any(self.gradients.name(tensor) is not None for tensor in tensors)
        if is_step or not self.thread.modules:
            names = {self.shape_of(x): n for x in tensors if (n := self.parameters.name(x))}
            for value in filter(self.is_tensor, jax.tree.leaves(result)):
                if name := names.get(self.shape_of(value)):
                    self.parameters.mark(value, name)
                elif is_step:
                    self.gradients.mark(value)
        return result

    def _note_cast(self, name: str, tensors: Sequence[Any], result: Any) -> None:
        """A parameter in another type, or on another device, is that parameter."""
        if name in CASTS and len(tensors) == 1:
            for value in jax.tree.leaves(result):
                if known := self.parameters.name(tensors[0]):
                    self.parameters.mark(value, known)

    # -- primitives -------------------------------------------------------

    def _binding(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def bind_with_trace(
            primitive: Any, trace: Any, args: Any, avals: Any, params: dict[str, Any], /
        ) -> Any:
            name = primitive.name
            if not self.is_active or not evaluates(trace) or any(map(is_batched, args)):
                return vanilla(primitive, trace, args, avals, params)
            if name in NO_OPERATORS or _keeps_type(name, avals, params):
                result = vanilla(primitive, trace, args, avals, params)
                self._note_cast(name, args, result)
                return result
            trace = internals.own_trace(trace, args)
            with internals.under(trace):
                if name != "jit" or not internals.is_of_jax(params["jaxpr"].jaxpr):
                    if runs_inside(name, params):
                        self._warn_once()
                        return INSIDE[name](args, params)
                    if holds_operators(params):
                        self.dispatcher.not_seen(f"operators inside of {name}")
                return self._operator(vanilla, primitive, args, avals, params)

        return bind_with_trace

    def _binding_shard_map(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def bind_with_trace(primitive: Any, trace: Any, *rest: Any) -> Any:
            if not self.is_active or not evaluates(trace):
                return vanilla(primitive, trace, *rest)
            self.dispatcher.not_seen("operators inside of shard_map")
            with self.vanilla():
                return vanilla(primitive, trace, *rest)

        return bind_with_trace

    def _operator(
        self, vanilla: Callable[..., Any], primitive: Any, args: Any, avals: Any, params: Any
    ) -> Any:
        op, declared, shown = described(primitive.name, args, params)
        dtypes = [aval.dtype for aval in avals]
        calls = itertools.count()

        def function(*args: Any, **attributes: Any) -> Any:
            next(calls)
            given = [_cast(x, dtype) for x, dtype in zip(args, dtypes, strict=True)]
            trace = current_trace()
            with internals.evaluating():
                found = [jax.typeof(x) for x in given]
                result = vanilla(primitive, trace, given, found, params)
            return result[0] if primitive.multiple_results and len(result) == 1 else result

        tensors = [p.name for p in declared.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        signature = self.signature((op.__name__, declared), tensors, declared)
        result = self._run(op, signature, args, shown, function)
        if "subfuns" in params and not next(calls):
            # JAX learns of the outputs from the function, which a tool has replaced.
            with self.vanilla():
                function(*args)
        is_list = isinstance(result, (list, tuple))
        return [result] if primitive.multiple_results and not is_list else result

    # -- functions --------------------------------------------------------

    def _takes(self, leaves: Sequence[Any]) -> bool:
        """True if a function of these arguments is an operator."""
        return self.is_active and evaluates(current_trace()) and not any(map(is_batched, leaves))

    def _inferring(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def infer(function: Any, info: Any, args: Any, kwargs: Any) -> Any:
            inferred, flat = vanilla(function, info, args, kwargs)
            inferred = internals.Inferred(*inferred)
            inferred.info = info
            return inferred, flat

        return infer

    def _calling_jitted(
        self, infer: Callable[..., Any], vanilla: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(inferred: Any, flat: Any, function: Any, args: Any, kwargs: Any) -> Any:
            if internals.is_primitive(function):
                return vanilla(inferred, flat, function, args, kwargs)
            info, jaxpr = getattr(inferred, "info", None), inferred.params["jaxpr"]
            is_own = internals.is_of_jax(jaxpr.jaxpr)
            if info is None or not self._takes(flat if is_own else ()):
                # No executable: the cache in C++ would keep it.
                found = vanilla(inferred, flat, function, args, kwargs)
                return (*found[:5], None, *found[6:])
            if is_own:

                def called(*args: Any, **kwargs: Any) -> Any:
                    found, given = infer(function, info, args, kwargs)
                    return internals.compiled(found, given)

                op = JaxOp(function.__name__.strip("_"), jaxpr.jaxpr)
                result = self._run(op, self.signature(function), args, kwargs, called)
            else:
                self._warn_once()
                result = self._unjitted(info, function, args, kwargs)
            return result, None, inferred.out_tree, flat, jaxpr, None, None, ()

        return run

    def _unjitted(self, info: Any, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a jitted function of the program with arrays, as ``jax.jit`` does."""
        count = len(args)
        static = {number % count for number in info.static_argnums if -count <= number < count}
        with self.vanilla():
            args = [x if i in static else jax.tree.map(_array, x) for i, x in enumerate(args)]
            kwargs = {
                name: x if name in info.static_argnames else jax.tree.map(_array, x)
                for name, x in kwargs.items()
            }
        result = function(*args, **kwargs)
        with self.vanilla():
            return jax.tree.map(_array, result)

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "jitted functions and control flow of the program run operator by operator under "
                "a tool: slower, and with results equal within rounding",
                CoverageWarning,
                stacklevel=5,
            )

    def _calling_compiled(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(vanilla)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_active:
                self.dispatcher.not_seen("calls of functions that were compiled ahead of time")
            return vanilla(*args, **kwargs)

        return call

    def _passing_backward(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def backward_pass(jaxpr: Any, stack: Any, consts: Any, inputs: Any, given: Any) -> Any:
            if not self._takes(()):
                return vanilla(jaxpr, stack, consts, inputs, given)
            for equation in jaxpr.eqns:
                if equation.primitive.name not in LINEAR:
                    self.count_unclaimed()
            # Within the function of an outer differentiation the program goes on.
            with self.backward_pass(continues=self.trains(None)):
                vanilla(jaxpr, stack, consts, inputs, given)
            for accumulated in inputs:
                self.gradients.mark(getattr(accumulated, "val", None))

        return backward_pass


def _keeps_type(name: str, avals: Any, params: Any) -> bool:
    """True for a cast to the type that a tensor has."""
    return name == "convert_element_type" and params["new_dtype"] == avals[0].dtype


def _in_optimizer() -> bool:
    """True if a function of an optimizer runs, and no loss."""
    frame: Any = sys._getframe(2) if "optax" in sys.modules else None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(OPTIMIZERS):
            return "loss" not in name
        frame = frame.f_back
    return False


def _traces() -> Iterator[Any]:
    return internals.stack(current_trace())


def _cast(tensor: Any, dtype: Any) -> Any:
    """A tensor in the type that an operator was called with."""
    is_other = getattr(tensor, "dtype", dtype) != dtype
    return jax.lax.convert_element_type(tensor, dtype) if is_other else tensor


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)
