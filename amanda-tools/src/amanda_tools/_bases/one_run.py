"""One run of a model under a tool, as ``amanda.summary(model, (4, 64))`` makes it.

::

    tool = FlopsTool()
    if run_once(tool, model, (4, 64)):
        print(ModelFigures(tool.result(), list(tool.tables())))
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from amanda import apply
from amanda.errors import NoDriverError
from amanda.results import Table
from amanda.state import LIVE_SCOPES
from amanda.tools.reporting import ReportingTool, plain_text
from amanda_tools._frameworks import is_keras
from amanda_tools._output.notebook import table_of


class ModelFigures:
    """The figures of one model: prints as tables, in notebooks too.

    Attributes:
        result: plain data, as the file of ``amanda run -o`` has it.
    """

    def __init__(self, result: dict[str, Any], tables: Sequence[Table]) -> None:
        self.result = result
        self._tables = tables

    def __repr__(self) -> str:
        return "\n".join(plain_text(table, full=True) for table in self._tables)

    def _repr_html_(self) -> str:
        """Tables for notebooks."""
        texts = {"module", "what", "type", "weights", "output"}
        return "".join(table_of(t, len(texts.intersection(t.columns))) for t in self._tables)


def run_once(tool: ReportingTool[Any], model: Any, given: Any) -> bool:
    """Run a model once under a tool, in evaluation mode and without gradients.

    Args:
        tool: the tool; messages have its name.
        model: a module of PyTorch or a layer of Keras; its modes are restored.
        given: a tensor; a tuple or list of the positional arguments; a dictionary, of keyword
            arguments in PyTorch; a shape, or a list of shapes, for zeros of the model's dtype, on
            its device; None for zeros as inputs of a built model of Keras, each unknown size 1.

    Returns:
        False if `given` is None and the model declares no inputs: it has not run.

    Raises:
        TypeError: `model` is not a model.
        NoDriverError: no driver sees its framework.
        ValueError: the model fails with zeros of these shapes.
    """
    function = f"amanda.{tool.name}()"
    framework = _framework_of(model, function)
    shapes = _shapes(given)
    made = _zeros(model, shapes) if shapes or given is None else given
    if made is None:
        return False
    with apply(tool):
        if framework not in {driver.framework for driver in LIVE_SCOPES[-1].drivers}:
            raise NoDriverError(f"{function}: no driver sees {framework}; see: amanda drivers")
        try:
            _run(model, made)
        except Exception as error:
            if made is given:
                raise
            of = " and ".join(map(str, shapes or ())) or "its input shape, unknown sizes 1"
            text = " ".join(f"{type(model).__name__} fails with zeros of {of}: {error}".split())
            raise ValueError(f"{function}: {text}") from error
    return True


def _framework_of(model: Any, function: str) -> str:
    """Return the module of the framework that a model computes with.

    Raises:
        TypeError: it is not a model.
    """
    if is_keras(model):
        return str(sys.modules["keras"].config.backend())
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        return "torch"
    got = type(model).__name__
    if isinstance(model, type):
        got = f"the class {model.__name__}: make one, {model.__name__}(...)"
    raise TypeError(f"{function} takes a module of PyTorch or a layer of Keras, got {got}")


def _shapes(given: Any) -> list[tuple[int, ...]] | None:
    """Return a shape, or a list of shapes, as a list; None for tensors."""
    if not isinstance(given, (tuple, list)) or not given:
        return None
    if all(type(size) is int for size in given):
        return [tuple(given)]
    found = [_shapes(item) for item in given]
    return None if None in found else [shape for one in found for shape in one or ()]


def _zeros(model: Any, shapes: Sequence[Sequence[int]] | None) -> Any:
    """Return zeros for the positional arguments of a model; None if their shapes are not known."""
    if is_keras(model):
        return _zeros_of_keras(model, shapes)
    if shapes is None:
        return None
    import torch

    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return [torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes]


def _zeros_of_keras(model: Any, shapes: Sequence[Sequence[int]] | None) -> Any:
    import keras
    import numpy as np

    # A sequential model has no `input` before it is called.
    declared = getattr(model, "input", getattr(model, "inputs", None))
    if declared is None:
        return None if shapes is None else [np.zeros(shape, "float32") for shape in shapes]
    sizes = iter(shapes or ())

    def zeros(tensor: Any) -> Any:
        known = [size or 1 for size in tensor.shape]
        return np.zeros(next(sizes, known), tensor.dtype)

    made = keras.tree.map_structure(zeros, declared)
    return [made[0] if isinstance(made, list) and len(made) == 1 else made]


def _run(model: Any, given: Any) -> None:
    args = given if isinstance(given, (tuple, list)) else (given,)
    if is_keras(model):
        model(*args, training=False)
        return
    import torch

    args, kwargs = ((), given) if isinstance(given, Mapping) else (args, {})
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for module, training in modes.items():
            module.training = training
