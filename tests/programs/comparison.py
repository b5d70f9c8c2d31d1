"""One program, run without Amanda and under tools that change nothing, compared bit for bit.

A program is a function without arguments that returns what is to be compared: nested lists and
mappings of tensors, variables, arrays and numbers. It is run several times in one process: for what
happens once in a process, such as imports, which is not compared; vanilla; under ``count,flops``;
under routines at all points that return what they get; and vanilla after the scopes, since a
program that differs from itself shows nothing. Routines between operators that TensorFlow's graph
optimizer would fuse cost the fusion, and so rounding: all these runs are without the optimizer, and
two more, vanilla and under ``count,flops``, with it::

    @program("timm")
    def convnext():
        ...
        return {"losses": losses, "weights": model.state_dict()}

    result = compare(convnext)
    assert not result.differing

Before each run all global generators get the same seed; after it they are compared, too.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import amanda
from tests.identity import Identity

Bits = dict[str, tuple[Any, ...]]
"""Place in a program's result to type, shape and bytes."""


@attrs.frozen(kw_only=True)
class Program:
    """A program.

    Attributes:
        name: the function's name.
        packages: distributions whose versions stand in the table, the one that it is about first.
        framework: ``torch`` or ``tensorflow``.
        ranks: how many processes run it together.
        environment: variables that its process needs before anything is imported.
    """

    name: str
    packages: Sequence[str]
    framework: str
    ranks: int
    environment: Mapping[str, str]
    function: Callable[[], Any]

    def __call__(self) -> Any:
        """Run it once."""
        return self.function()


@attrs.define
class Result:
    """What a comparison found.

    Attributes:
        values: how many tensors, arrays and numbers were compared.
        forward: operators executed, as ``count`` counted them.
        backward: backward operators executed.
        not_seen: executions that the driver knows it did not see, with the reasons.
        differing: name of a run to the places whose bits differ from the first run.
        warned: the CoverageWarnings of the run under ``count,flops``.
        fused: values that differ under ``count,flops`` with TensorFlow's graph optimizer.
        fused_error: by how much at most, in units of the largest number of an array.
    """

    values: int = 0
    forward: int = 0
    backward: int = 0
    not_seen: dict[str, int] = attrs.field(factory=dict)
    differing: dict[str, list[str]] = attrs.field(factory=dict)
    warned: list[str] = attrs.field(factory=list)
    fused: int = 0
    fused_error: float = 0.0


def compare(program: Callable[[], Any], fused: bool = True) -> Result:
    """Run a program vanilla and under tools, and compare.

    Args:
        program: the program.
        fused: whether to compare with TensorFlow's graph optimizer, too.
    """
    with _unfused():
        run(program)
        expected = run(program)
        result = Result(values=len(expected))
        note = functools.partial(_note, result, expected)
        note("count,flops", _counted(program, result))
        identity = Identity()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", amanda.errors.CoverageWarning)
            with amanda.apply(identity):
                note("identity", run(program))
        if not identity.calls:
            result.differing["identity"] = ["no routine was called"]
        note("vanilla after", run(program))
        if "vanilla after" in result.differing:
            expected.update(run(program))
            note("vanilla again", run(program))
    if fused and "tensorflow" in sys.modules:
        _compare_fused(program, result)
    return result


def _note(result: Result, expected: Bits, name: str, bits: Bits) -> None:
    """Note where the bits of a run differ."""
    places = [place for place in {**expected, **bits} if expected.get(place) != bits.get(place)]
    if places:
        result.differing[name] = places


def _counted(program: Callable[[], Any], result: Result) -> Bits:
    """Run a program under ``count,flops``, and note what was counted."""
    counter = amanda.tools.load("count")()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", amanda.errors.CoverageWarning)
        with amanda.apply(counter, amanda.tools.load("flops")()) as scope:
            bits = run(program)
    result.warned = [str(w.message) for w in caught if _concerns_coverage(w)]
    result.not_seen = dict(scope.statistics.not_seen)
    counted = counter.summary()
    result.forward, result.backward = counted["forward"], counted["backward"]
    return bits


def _compare_fused(program: Callable[[], Any], result: Result) -> None:
    """Compare the run under ``count,flops`` also with TensorFlow's graph optimizer."""
    expected = run(program)
    bits = _counted(program, Result())
    result.fused = sum(expected.get(place) != bits.get(place) for place in {**expected, **bits})
    result.fused_error = max(
        (_error(expected[p], bits[p]) for p in expected if p in bits), default=0
    )


def _error(one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """How much arrays of floating point differ, in units of the largest number; else 0 or 1."""
    if one == other:
        return 0.0
    if len(one) != 3 or one[0] not in ("float", "float32", "float64") or one[:2] != other[:2]:
        return 1.0
    first, second = (np.frombuffer(content, one[0]) for content in (one[2], other[2]))
    return float(np.abs(first - second).max() / max(np.abs(first).max(), 1e-30))


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """TensorFlow without its graph optimizer; other frameworks as they are."""
    if "tensorflow" not in sys.modules:
        yield
        return
    options = sys.modules["tensorflow"].config.optimizer
    options.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        options.set_experimental_options({"disable_meta_optimizer": False})


def _concerns_coverage(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, amanda.errors.CoverageWarning)


def run(program: Callable[[], Any]) -> Bits:
    """Run a program once from seeded generators; return the bits of its results and of those."""
    seed()
    result = program()
    return dict(_bits(result, "result")) | dict(_bits(generators(), "generators"))


# -- global generators of random numbers -----------------------------------------------


def seed() -> None:
    """Give every global generator of random numbers the same seed."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "tensorflow" in sys.modules:
        tf = sys.modules["tensorflow"]
        tf.compat.v1.reset_default_graph()
        tf.random.set_seed(0)
        tf.random.set_global_generator(tf.random.Generator.from_seed(0))
    if "keras" in sys.modules and "tensorflow" in sys.modules:
        sys.modules["keras"].utils.clear_session()
        sys.modules["keras"].utils.set_random_seed(0)


def generators() -> dict[str, Any]:
    """The state of every global generator; of one whose state is private, what it draws next."""
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {"python": repr(random.getstate()), "numpy": [kind, keys, rest]}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    if "tensorflow" in sys.modules:
        tf = sys.modules["tensorflow"]
        states["tensorflow"] = tf.random.get_global_generator().state
        states["operators"] = tf.random.uniform([4])
    if "keras" in sys.modules and "tensorflow" in sys.modules:
        states["keras"] = sys.modules["keras"].random.uniform([4])
    return states


# -- bits ----------------------------------------------------------------------------------


def _bits(value: Any, place: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """All leaves of a nested value: where they are, and everything that tells them apart."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _bits(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _bits(item, f"{place}[{index}]")
    elif value is None or isinstance(value, (bool, int, str)):
        yield place, (value,)
    else:
        dtype = getattr(value, "dtype", type(value).__name__)
        kind = getattr(dtype, "name", str(dtype))
        array = np.ascontiguousarray(_array(value))
        # An array of strings holds addresses.
        is_text = array.dtype == object
        content = repr(array.tolist()).encode() if is_text else array.tobytes()
        yield place, (kind, np.shape(array), content)


def _array(value: Any) -> Any:
    """A tensor, variable, array or number as an array of NumPy."""
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        torch = sys.modules["torch"]
        plain = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        if plain.dtype is torch.bfloat16:
            plain = plain.view(torch.int16)
        return plain.resolve_conj().resolve_neg().cpu().numpy()
    if hasattr(value, "numpy"):
        return value.numpy()
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"a program returned a {type(value).__name__}, which has no bits")
    return array
