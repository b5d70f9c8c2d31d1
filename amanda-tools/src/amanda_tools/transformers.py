"""A callback of transformers: ``Trainer(..., callbacks=[Callback("flops,nan,stats")])``."""

from __future__ import annotations

from transformers import Trainer, TrainerCallback

from amanda_tools._training import ToolsOfTraining, leaving


class TransformersCallback(ToolsOfTraining, TrainerCallback):
    """Applies tools while ``train`` runs.

    Example: ``Trainer(model, args, train_dataset=data, callbacks=[Callback("flops,nan")])``
    """


Callback = TransformersCallback
Trainer.train = leaving(Trainer.train)  # type: ignore[method-assign]
