"""A callback of transformers: ``Trainer(..., callbacks=[Callback("flops,nan,stats")])``."""

from __future__ import annotations

from transformers import Trainer, TrainerCallback

from amanda_tools._training import ToolsOfTraining


class TransformersCallback(ToolsOfTraining, TrainerCallback):
    """Applies tools while ``train`` runs.

    Example: ``Trainer(model, args, train_dataset=data, callbacks=[Callback("flops,nan")])``
    """

    trains = Trainer, "train"


Callback = TransformersCallback
