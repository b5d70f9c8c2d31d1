"""A callback of transformers: ``Trainer(..., callbacks=[Callback("flops,nan,stats")])``."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from amanda_tools._training import ToolsOfTraining, leaving


class TransformersCallback(ToolsOfTraining, TrainerCallback):
    """Applies tools while ``train`` runs.

    Example: ``Trainer(model, args, train_dataset=data, callbacks=[Callback("flops,nan")])``
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()


Callback = TransformersCallback
Trainer.train = leaving(Trainer.train)  # type: ignore[method-assign]
