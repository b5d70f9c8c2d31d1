"""A callback of Lightning: ``Trainer(callbacks=[Callback("flops,nan,stats")])``."""

from __future__ import annotations

from typing import Any

from amanda.cli.rank import Rank
from amanda_tools._training import ToolsOfTraining

try:
    from lightning import pytorch as trainers
except ModuleNotFoundError:
    import pytorch_lightning as trainers


class LightningCallback(ToolsOfTraining, trainers.Callback):  # type: ignore[misc]
    """Applies tools while ``fit`` trains.

    Example: ``lightning.Trainer(callbacks=[Callback("flops,nan", output="out", html=True)])``
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(Rank(trainer.global_rank, trainer.world_size, trainer.local_rank))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end(exception)


Callback = LightningCallback
