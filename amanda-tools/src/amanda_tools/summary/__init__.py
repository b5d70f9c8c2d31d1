"""``summary``: the model tree with output shapes, parameters, operations and activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from amanda import OpContext
from amanda.driver import Driver
from amanda.interface.points import PointContext
from amanda.results import Table, plural
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.one_run import ModelFigures, run_once
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._frameworks import is_keras
from amanda_tools.summary.graph_ops import GraphOps
from amanda_tools.summary.keras_layers import KerasModules
from amanda_tools.summary.op_figures import OpFigures
from amanda_tools.summary.options import SummaryOptions
from amanda_tools.summary.recorder import ModuleSource, Recorder
from amanda_tools.summary.rows import amount, folded_names, model_rows, tree_rows
from amanda_tools.summary.scopes import Scopes

__all__ = ["ModelSummary", "SummaryOptions", "SummaryTool"]

_CALLED = ("pytorch/", "tensorflow/")
"""Frameworks whose modules are entered and left; others have scopes by the names of operators."""


class SummaryTool(PrintingTool[SummaryOptions]):
    """Shows the tree of each model: parameters, operations, activations.

    Figures are those of one forward pass, the last complete call of the outermost module, however
    many the program makes; those of a module contain its parts. Parameters that are shared count
    once.

    Example: ``amanda run -t summary:depth=2 -o out -- train.py``
    """

    name = "summary"
    Options = SummaryOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recorder = Recorder()
        self._graph_ops = GraphOps(self.recorder)
        self._follows_graphs = False
        self._namespaces: set[str] = set()
        self._torch_calls: Any = None
        self._scopes = Scopes()
        self._weights: dict[str, dict[str, Any]] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_pass(self._scopes.begin_run)
        self.add_inst_for_iteration(self._scopes.end_step, end=True)
        self.add_inst_for_iteration(self._note_step, end=True)

    def _note_step(self, _: PointContext) -> None:
        # Where a program evaluates after training, the figures are those of training.
        for model in self.recorder.models:
            model.last_in_step = model.last

    @classmethod
    def of(cls, model: Any, input: Any, **options: Any) -> ModelSummary:
        """Summarize a model, which runs once with an input: the function ``amanda.summary``."""
        tool = cls(**options)
        if not run_once(tool, model, input):
            source: ModuleSource = KerasModules()
            if not is_keras(model):
                from amanda_tools.summary.pytorch import TorchModules

                source = TorchModules()
            tool.recorder.describe(source, model)
            tool._weights = {path: source.weights(part) for path, part in source.modules(model)}
        return ModelSummary(tool.result(), list(tool.tables()))

    # -- where modules are called -------------------------------------------

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Begin to follow the calls of modules."""
        super().enter_scope(drivers)
        if self._torch_calls is None and any(driver.framework == "torch" for driver in drivers):
            from amanda_tools.summary.pytorch import TorchCalls

            calls = self._torch_calls = TorchCalls(self.recorder)
            for is_exit in (False, True):
                self.add_inst_for_module(calls.passed, exit=is_exit)
        if not self._follows_graphs and any(driver.framework == "tensorflow" for driver in drivers):
            self._follows_graphs = True
            for is_exit in (False, True):
                self.add_inst_for_module(self._graph_ops.passed, exit=is_exit)

    # -- analysis -------------------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        self._namespaces.add(str(context.namespace))
        figures = OpFigures.of(context)
        if not (context.runs_at_once and context.namespace.startswith(_CALLED)):
            scoped = self._scopes.note(context)
            add = self._graph_ops.adder(context.get_module(), scoped)
            if figures is not None:
                figures.insert(context, add, None if scoped is None else scoped.see)
        elif figures is not None and context.get_phase() != "setup":
            # Not the parameters that a lazy module makes.
            figures.insert(context, self.recorder.add)

    # -- result ---------------------------------------------------------------

    def modules(self) -> list[dict[str, Any]]:
        """One row per module, in the order of each model's tree.

        ``model``; ``path``, ``type``, ``depth``; ``output``, the shape of the first tensor that its
        first call returned, and ``outputs`` and ``inputs``, all of its tensors; ``kernel``, the
        ``kernel_size`` of a layer; ``parameters``, ``trainable`` ones
        and their ``parameter_bytes``; ``macs``, ``flops``, ``activation_bytes``, null where they
        are not known, and ``bound``: ``lower`` where parts of it run unseen, or have operators
        without a formula; ``calls``; of a model that has not run, ``weights``, the shapes
        of its own parameters by name.
        """
        found = [
            row
            for model in self.recorder.models
            if (shown := model.last_in_step or model.last) is not None
            for row in model_rows(model, shown)
        ]
        for row in found:
            row |= {"weights": self._weights[row["path"]]} if self._weights else {}
        return found or self._scopes.rows()

    def csv_rows(self) -> list[dict[str, Any]]:
        rows = self.modules()
        return [{k: row[k] for k in row if k not in ("inputs", "outputs")} for row in rows]

    def op_rows(self) -> list[dict[str, Any]]:
        """None: the result has ``modules``."""
        return []

    def result(self) -> dict[str, Any]:
        """The result as plain data, with ``modules``."""
        modules = self.modules()
        found = super().result()
        found["namespaces"] = sorted(self._namespaces)
        return {**found, "modules": modules}

    def summary(self) -> dict[str, Any]:
        """``models``: name of each model to the figures of its first row, and ``passes``, the
        number of complete passes."""
        tops = {row["model"]: row for row in self.modules() if row["depth"] == 0}
        figures = (
            "type output parameters trainable parameter_bytes flops activation_bytes bound".split()
        )
        counted = {model.name: model.passes for model in self.recorder.models}
        if not tops.keys() & counted.keys():
            counted = self._scopes.passes()
        return {
            "models": {
                name: {**{figure: tops[name][figure] for figure in figures}, "passes": passes}
                for name, passes in counted.items()
                if name in tops
            }
        }

    def tables(self) -> Iterable[Table]:
        """The tree of each model, down to the option ``depth``."""
        rows = self.modules()
        if not rows:
            others = [n for n in self._namespaces if not n.startswith(_CALLED)]
            which = f" of PyTorch, TensorFlow or Keras, only of {', '.join(sorted(others))}"
            yield Table(f"summary: no module was called{which if others else ''}", (), ())
        for name, of in self.summary()["models"].items():
            own = [row for row in rows if row["model"] == name]
            frozen = of["parameters"] - of["trainable"]
            which = f" ({frozen:,} not trainable)" if frozen else ""
            title = f"summary of {name}: {plural(of['parameters'], 'parameter')}{which}"
            flops, size = amount(of, "flops", "FLOP"), amount(of, "activation_bytes", "B")
            run = f", {flops} and {size} of activations in a forward pass"
            title += "; a run needs an input" if self._weights else run
            columns, cells, levels = tree_rows(own, self.options)
            yield Table(title, columns, cells, levels=levels)
            if self._weights:
                continue
            if idle := [row["path"] for row in own if row["flops"] is None and not row["bound"]]:
                title = (
                    f"summary: not called in {name} (unused, or run by a method such as forward(), "
                    "whose operators count for the module around)"
                )
                names = folded_names(own, self.options)
                paths = dict.fromkeys(map(names.__getitem__, idle))
                yield Table(title, ("module",), [(path,) for path in paths], detail=True)


class ModelSummary(ModelFigures):
    """The summary of one model: prints as a table, in notebooks too.

    Attributes:
        result: plain data, as ``summary.json`` of ``amanda run`` has it.
        modules: the rows of the modules.
    """

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The rows of :meth:`SummaryTool.modules`."""
        return list(self.result["modules"])
