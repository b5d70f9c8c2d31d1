"""Structural pruning in PyTorch: a smaller model, without the weakest channels and heads.

Torch-Pruning (Fang et al., CVPR 2023) finds the layers that share channels, and removes these.
Projections of attention are found by their names, and lose whole heads: with grouped keys and
values, all heads of a group. What is left out has the least L2 norm of weights.

Each result is compared with the masked model, where the layers that read these channels have
weights of zero for them. Channels that reach a normalization over channels, or an output, stay.
"""

from __future__ import annotations

import copy
import fnmatch
import importlib
import importlib.util
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import UnsupportedProgramError
from amanda.state import STATE
from amanda.tools.alignment import run_example
from amanda.tools.description import OpDescription
from amanda_tools._internals import leaves_of
from amanda_tools.export import checks
from amanda_tools.export.model_of_run import copied
from amanda_tools.prune.options import PruneOptions

_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("qkv",)
)  # fmt: skip
_OUTPUTS = ("{0}.o_proj", "{0}.out_proj", "{0}.proj", "{0}.out_lin", "{1}.output.dense")
"""By the path of the attention, and of the module that has it."""

_HEAD_SIZES = ("head_dim", "attention_head_size")
_PROPORTIONAL = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "attn_dim", "all_head_size"
)  # fmt: skip
"""Attributes of attention that a smaller number of heads changes."""

_STAYING = {
    "OUTPUT": "an output of the model", "LN": "a LayerNorm", "GN": "a GroupNorm",
    "EMBED": "an embedding", "PARAMETER": "a parameter of no layer", "LSTM": "an LSTM",
    "MHA": "nn.MultiheadAttention, which has as many channels inside as outside",
}  # fmt: skip
"""By Torch-Pruning's types of operators, what keeps the channels that reach it."""

_SOFTMAX = ("ScaledDotProduct", "Softmax", "Bmm")
_LAYERS = ("CONV", "DEPTHWISE_CONV", "LINEAR")
_TOLERANCE = 1e-5
_RUNS = 5


@attrs.frozen
class Cut:
    """What has been cut, and how large, expensive and fast the model is before and after.

    Attributes:
        layers: rows of what is cut: ``layer``, ``kind`` (channels or heads), ``before``, ``after``.
        left: by layer, why its channels or heads stay.
        difference: largest absolute difference of an output to that of the masked model.
        parameters: number of elements of the parameters, before and after.
        flops: likewise, FLOPs of a forward pass.
        is_bound: True if they are lower bounds: some operators are of unknown FLOPs.
        seconds: likewise, median time of 5 forward passes on the example inputs, which alternate.
    """

    layers: Sequence[Mapping[str, Any]]
    left: Mapping[str, str]
    difference: float
    parameters: Sequence[int]
    flops: Sequence[int]
    is_bound: bool
    seconds: Sequence[float]


@attrs.frozen(eq=False)
class _Channels:
    """Output channels of a layer, and of those that share them."""

    kind = "channels"
    layer: str
    count: int
    removed: Sequence[int]

    def group(self, graph: Any) -> Any:
        layer = graph.model.get_submodule(self.layer)
        pruner = graph.get_pruner_of_module(layer)
        return graph.get_pruning_group(layer, pruner.prune_out_channels, self.removed)

    def mask(self, masked: Any, graph: Any) -> None:
        names = {module: name for name, module in graph.model.named_modules()}
        for dep, channels in self.group(graph):
            is_layer = dep.target.type.name in _LAYERS
            if is_layer and not graph.is_out_channel_pruning_fn(dep.handler):
                reader = masked.get_submodule(names[dep.target.module])
                axis = 0 if getattr(reader, "transposed", False) else 1
                reader.weight.data.transpose(0, axis)[channels] = 0

    def remove(self, graph: Any) -> None:
        self.group(graph).prune()


@attrs.frozen(eq=False)
class _Heads:
    """Heads of an attention, by the number of keys' and values'."""

    kind = "heads"
    layer: str
    projections: Sequence[str]
    output: str
    count: int
    removed: Sequence[int]

    def indices(self, size: int, blocks: int = 1) -> list[int]:
        """Return the channels of the heads among all of a projection."""
        all_of = np.arange(size).reshape(blocks, self.count, -1)
        found: list[int] = all_of[:, list(self.removed)].ravel().tolist()
        return found

    def mask(self, masked: Any, graph: Any) -> None:
        weight = masked.get_submodule(self.output).weight.data
        weight[:, self.indices(weight.shape[1])] = 0

    def remove(self, graph: Any) -> None:
        pruning, model = importlib.import_module("torch_pruning"), graph.model
        for path in self.projections:
            layer = model.get_submodule(path)
            blocks = 3 // len(self.projections)
            channels = self.indices(layer.out_features, blocks)
            pruning.prune_linear_out_channels(layer, channels)
        output = model.get_submodule(self.output)
        pruning.prune_linear_in_channels(output, self.indices(output.in_features))
        owner, kept = model.get_submodule(self.layer), self.count - len(self.removed)
        for name in _PROPORTIONAL:
            if isinstance(value := getattr(owner, name, None), int):
                setattr(owner, name, value * kept // self.count)


class StructuralPruning:
    """Cuts models; while they run, nothing is changed.

    Attributes:
        found: what has been cut last; None if nothing has.
    """

    def __init__(self, options: PruneOptions) -> None:
        if importlib.util.find_spec("torch_pruning") is None:
            raise UnsupportedProgramError(
                "prune: torch_pruning not found: pip install 'amanda-tools[cut]'"
            )
        self._options = options
        self.found: Cut | None = None

    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Do nothing with an operator."""

    def cut(self, model: Any, example_inputs: Any) -> Any:
        """Return a smaller model, a copy in the same mode.

        Raises:
            UnsupportedProgramError: nothing can be cut, or it is no model of PyTorch.
        """
        if not isinstance(model, importlib.import_module("torch").nn.Module):
            raise UnsupportedProgramError("prune: cut=true is for models of PyTorch")
        if example_inputs is None:
            raise UnsupportedProgramError("prune: cut=true needs example inputs of the model")
        if STATE.scopes:
            raise UnsupportedProgramError("prune: a model is cut after the with-block has ended")
        try:
            # The graph is that of gradients, also for a caller that has none.
            with importlib.import_module("torch").inference_mode(False):
                cutting = _Cutting(self._options, copy.deepcopy(model).eval(), example_inputs)
                smaller, self.found = cutting.cut()
        except UnsupportedProgramError:
            raise
        except Exception as error:
            raise UnsupportedProgramError(
                f"prune: the model cannot be cut: {_text_of(error)}"
            ) from error
        given = dict(model.named_parameters())
        for name, parameter in smaller.named_parameters():
            parameter.requires_grad_(given[name].requires_grad)
        for one, other in zip(smaller.modules(), model.modules(), strict=True):
            one.training = other.training
        return smaller


class _Cutting:
    """Cuts one model, which is in evaluation mode.

    Attributes:
        left: by layer, why it stays.
    """

    def __init__(self, options: PruneOptions, model: Any, inputs: Any) -> None:
        self._options, self._model, self._inputs = options, model, inputs
        self._torch, self._pruning = map(importlib.import_module, ("torch", "torch_pruning"))
        parametrize = importlib.import_module("torch.nn.utils.parametrize")
        self._is_parametrized: Any = parametrize.is_parametrized
        self._excluded = self._modules_excluded()
        self.left: dict[str, str] = {}

    def cut(self) -> tuple[Any, Cut]:
        heads, projections = self._heads()
        order = {name: number for number, (name, _) in enumerate(self._model.named_modules())}
        pieces: list[Any] = [
            each for each in [*self._channels(projections), *heads] if each.removed
        ]
        pieces.sort(key=lambda piece: order[piece.layer])
        found = self._tried(pieces)
        if isinstance(found, str):
            tried = {piece: self._tried([piece]) for piece in pieces}
            reasons = {piece.layer: why for piece, why in tried.items() if isinstance(why, str)}
            self.left |= reasons
            pieces = [piece for piece in pieces if piece.layer not in reasons]
            found = self._tried(pieces)
        if isinstance(found, str):
            root, first = type(self._model).__name__, [*self.left.items()][:3]
            left = "; ".join(f"{layer or root}: {why}" for layer, why in first)
            raise UnsupportedProgramError(f"prune: nothing can be cut: {left or found}")
        return found[0], self._measured(pieces, *found)

    def _weakest(self, norms: Any) -> list[int]:
        order: list[int] = norms.argsort(stable=True).tolist()
        return sorted(order[: min(round(self._options.sparsity * len(order)), len(order) - 1)])

    def _modules_excluded(self) -> set[str]:
        """Return the paths of the modules that the options exclude.

        Raises:
            UnsupportedProgramError: a pattern matches none, as a misspelt one.
        """
        found, root = set[str](), type(self._model).__name__
        for pattern in self._options.exclude:
            own = set[str]()
            for path, module in self._model.named_modules():
                full = f"{root}.{path}".rstrip(".")
                op_id = f"{full}/{type(module).__name__.lower()}:0"
                if any(fnmatch.fnmatchcase(name, pattern) for name in (path, full, op_id)):
                    own.add(path)
            if not own:
                raise UnsupportedProgramError(f"prune: exclude={pattern} matches no module")
            found |= own
        return found

    def _is_excluded(self, layer: str) -> bool:
        around = (f"{each}." if each else "" for each in self._excluded)
        if is_excluded := f"{layer}.".startswith(tuple(around)):
            self.left[layer] = "it is excluded"
        return is_excluded

    # -- what can be cut ----------------------------------------------------

    def _heads(self) -> tuple[list[Any], set[str]]:
        """Return the heads that are cut, and the paths of all projections to heads."""
        linear, found, known = self._torch.nn.Linear, list[Any](), set[str]()
        layers = dict(self._model.named_modules())
        for name, module in layers.items():
            for own in _PROJECTIONS:
                paths = [f"{name}.{each}".lstrip(".") for each in own]
                if all(isinstance(layers.get(path), linear) for path in paths):
                    known.update(paths)
                    if any(map(self._is_excluded, (name, *paths))):
                        continue
                    owner = name.rpartition(".")[0]
                    places = [each.format(name, owner).lstrip(".") for each in _OUTPUTS]
                    output = next((p for p in places if isinstance(layers.get(p), linear)), "")
                    size = max(getattr(module, each, 0) for each in _HEAD_SIZES)
                    whole = [layers[path] for path in (*paths, output)]
                    if any(map(self._is_parametrized, whole)):
                        self.left[name] = "its heads reach a parametrized weight"
                        continue
                    try:
                        norms = self._norms(whole[:-1], whole[-1], size)
                    except (AttributeError, RuntimeError, ZeroDivisionError):
                        self.left[name] = "its heads are not known"
                    else:
                        weakest = self._weakest(norms)
                        found.append(_Heads(name, paths, output, len(norms), weakest))
        return found, known

    def _norms(self, projections: Sequence[Any], output: Any, size: int) -> Any:
        """Return the norm of each head of the keys, with the queries that share it.

        Raises:
            AttributeError, RuntimeError, ZeroDivisionError: there are no heads of this size, or
                no layer that reads them.
        """
        blocks = 3 // len(projections)
        count = min(layer.out_features for layer in projections) // blocks // size
        weights = [layer.weight.detach().reshape(blocks, count, -1) for layer in projections]
        weights.append(output.weight.detach().T.reshape(1, count, -1))
        return sum(weight.float().square().sum((0, 2)) for weight in weights)

    def _graph(self, model: Any) -> Any:
        """Return Torch-Pruning's graph of a model."""
        for parameter in model.parameters():
            # The graph is that of gradients.
            parameter.requires_grad_(parameter.is_floating_point())
        with self._torch.enable_grad():
            return self._pruning.DependencyGraph().build_dependency(
                model,
                self._inputs,
                forward_fn=lambda model, _: self._run(model),
                output_transform=lambda out: [
                    leaf for leaf in leaves_of(out) if getattr(leaf, "grad_fn", None)
                ],
                verbose=False,
            )

    def _channels(self, projections: Collection[str]) -> list[_Channels]:
        """Return the channels that are cut; those of projections to heads are not."""
        model, found = copy.deepcopy(self._model), []
        names = {module: name for name, module in model.named_modules()}
        importance = self._pruning.importance.GroupMagnitudeImportance(p=2)
        graph = self._graph(model)
        layers = {m: names[m] for m, n in graph.module2node.items() if n.type.name in _LAYERS}
        whole = [model.get_submodule(path) for path in projections]
        rest = dict.fromkeys(layers.values(), "it shares channels with a layer that stays")
        for layer, name in layers.items():
            if layer not in whole and not self._is_excluded(name):
                if not _reaches_softmax(graph.module2node[layer]):
                    continue
                # Of rotary embeddings before attention, the search would not end (1.6.1).
                self.left[name] = "its channels reach a softmax"
            whole.append(layer)
            del rest[name]
        for group in graph.get_all_groups(ignored_layers=whole):
            nodes = [dep.target for dep, _ in group if graph.is_out_channel_pruning_fn(dep.handler)]
            own = [layers[node.module] for node in nodes if node.module in layers]
            rest = {name: why for name, why in rest.items() if name not in own}
            reason = next(filter(None, map(_reason_to_stay, nodes)), "")
            if any(self._is_parametrized(dep.target.module) for dep, _ in group):
                reason = "a parametrized weight"
            if reason:
                self.left |= dict.fromkeys(own, f"its channels reach {reason}")
            else:
                root, weakest = group[0].dep.target.module, self._weakest(importance(group))
                found.append(_Channels(layers[root], len(group[0].idxs), weakest))
        self.left |= rest
        return found

    # -- the result -----------------------------------------------------------

    def _tried(self, pieces: Sequence[Any]) -> tuple[Any, float] | str:
        """Return a smaller model and its difference to the masked one; a reason why there is
        none."""
        if not pieces:
            return "it has no layers with channels or heads that may go"
        smaller, masked = copy.deepcopy(self._model), copy.deepcopy(self._model)
        try:
            graph = self._graph(smaller)
            for piece in pieces:
                piece.mask(masked, graph)
            for piece in pieces:
                piece.remove(graph)
            found, expected = self._outputs(smaller), self._outputs(masked)
        except Exception as error:
            return _text_of(error)
        gap = checks.difference(found, expected, _TOLERANCE)
        return "the smaller model computes another result" if gap is None else (smaller, gap)

    def _outputs(self, model: Any) -> list[Any]:
        with self._torch.no_grad():
            return checks.flat(self._run(model))

    def _run(self, model: Any) -> Any:
        """Run a model on copies of the inputs, which it may change."""
        return run_example(model, copied(self._inputs))

    def _measured(self, pieces: Sequence[Any], smaller: Any, difference: float) -> Cut:
        models = self._model, smaller
        flops, seconds = list[Any](), (list[float](), list[float]())
        for model in models:
            tool: Any = amanda.tools.load("flops")()
            with amanda.apply(tool):
                self._outputs(model)
            flops.append(tool.summary())
        for _ in range(_RUNS + 1):
            for model, times in zip(models, seconds, strict=True):
                begin = time.perf_counter()
                self._outputs(model)
                times.append(time.perf_counter() - begin)
        rows = [
            {"layer": piece.layer, "kind": piece.kind, "before": piece.count,
             "after": piece.count - len(piece.removed)}
            for piece in pieces
        ]  # fmt: skip
        return Cut(
            rows,
            self.left,
            difference,
            parameters=[sum(each.numel() for each in model.parameters()) for model in models],
            flops=[each["flops"] for each in flops],
            is_bound=any(each["bound"] for each in flops),
            seconds=[float(np.median(times[1:])) for times in seconds],
        )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _reaches_softmax(layer: Any) -> bool:
    """Return True if a softmax, as of attention, reads a layer in Torch-Pruning's graph."""
    ahead, seen = [*layer.outputs], set[Any]()
    while ahead:
        node = ahead.pop()
        if node not in seen and node.type.name not in _LAYERS:
            seen.add(node)
            ahead += node.outputs
    return any(word in str(node.name) for node in seen for word in _SOFTMAX)


def _reason_to_stay(node: Any) -> str:
    """Return why the channels of a node of Torch-Pruning's graph stay; "" if they may go."""
    if 1 < getattr(node.module, "groups", 1) < getattr(node.module, "out_channels", 0):
        return "a convolution in groups"
    return _STAYING.get(node.type.name, "" if node.outputs else _STAYING["OUTPUT"])
