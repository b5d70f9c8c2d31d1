"""Names of modules in ids: of outermost modules, and of modules in them by their places."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from torch import nn

from amanda.state import Lock
from amanda_torch.eager.module_frames import Model
from amanda_torch.operators.names import CONSTANTS, TRANSPARENT, is_transparent


class Labels:
    """Names of outermost modules: the class, and a number from the second instance on.

    Shared by all threads, so that a model has one name wherever it runs.

    Args:
        forget: called with the name of a module when it and all hooks on its graphs are deleted.
    """

    def __init__(self, forget: Callable[[str], None] = lambda label: None) -> None:
        self._forget = forget
        self._lock = Lock()
        self._counts: dict[str, itertools.count[int]] = {}
        self._labels: dict[int, tuple[weakref.ref[nn.Module], str, Model]] = {}
        self._models: dict[str, weakref.ref[Model]] = {}

    def label(self, module: nn.Module) -> tuple[str, Model]:
        """The name of an outermost module, and its model: ``ResNet`` for the first ResNet that
        runs, ``ResNet@1`` for the second."""
        return self._lock.hold(self._label, module)

    def _label(self, module: nn.Module) -> tuple[str, Model]:
        known = self._labels.get(id(module))
        if known is not None and known[0]() is module:
            return known[1:]
        name = class_name(module)
        number = next(self._counts.setdefault(name, itertools.count()))
        label = f"{name}@{number}" if number else name
        model = self._model(label)
        self._labels[id(module)] = self._reference(module), label, model
        CONSTANTS.labels[module] = label
        return label, model

    def _reference(self, module: nn.Module) -> weakref.ref[nn.Module]:
        # The callbacks hold no Labels, which would be a cycle.
        key, labels = id(module), self._labels

        def died(reference: weakref.ref[nn.Module]) -> None:
            known = labels.get(key)
            if known is not None and known[0] is reference:
                del labels[key]

        return weakref.ref(module, died)

    def _model(self, label: str) -> Model:
        forget, models = self._forget, self._models

        def died(reference: weakref.ref[Model]) -> None:
            # After clear() nothing is reported.
            if models.get(label) is reference:
                del models[label]
                forget(label)

        model = Model()
        models[label] = weakref.ref(model, died)
        return model

    def clear(self) -> None:
        """Forget all names, when the driver is detached."""
        self._models.clear()
        self._counts.clear()
        self._labels.clear()
        CONSTANTS.labels.clear()


def class_name(module: nn.Module) -> str:
    """The name of the module's class as the user wrote it."""
    cls = type(module)
    # FSDP2's fully_shard() makes a subclass ``(FSDPModule, <the user's class>)``.
    if cls.__bases__ and cls.__bases__[0].__name__ == "FSDPModule":
        cls = cls.__bases__[-1]
    return cls.__name__


class Places:
    """The places where the modules below a module are registered, the first one of each in the
    order of children.

    One walk collects them; :meth:`path` looks single modules up.
    """

    def __init__(self, top: nn.Module) -> None:
        # By module its name and its parent; not pairs of them, which would be objects.
        self._names: dict[int, str] = {}
        self._above: dict[int, weakref.ref[nn.Module]] = {}
        # Not named_modules(): its generators are nested, so that a step costs the depth.
        walk = [iter([("", top)])]
        owners: list[weakref.ref[nn.Module]] = []
        while walk:
            name, module = next(walk[-1], ("", None))
            if module is None:
                walk.pop()
                if owners:
                    owners.pop()
            elif id(module) not in self._names:
                own = weakref.ref(module)
                self._names[id(module)] = name
                self._above[id(module)] = owners[-1] if owners else own
                owners.append(own)
                walk.append(module.named_children())

    def path(self, owner: nn.Module, module: nn.Module) -> str | None:
        """The path of `module` below `owner`, without transparent wrappers.

        None if `module` is not below `owner`, or has been moved.
        """
        names: list[str] = []
        while module is not owner:
            reference, name = self._above.get(id(module)), self._names.get(id(module), "")
            above = reference() if reference is not None else None
            if above is None or above is module or getattr(above, name, None) is not module:
                return None
            # Called for each new module: most names need no function call.
            if type(above).__name__ not in TRANSPARENT or not is_transparent(above):
                names.append(name)
            module = above
        return ".".join(reversed(names))
