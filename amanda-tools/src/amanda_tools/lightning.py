"""A callback of Lightning: ``Trainer(callbacks=[Callback("flops,nan,stats")])``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch

from amanda.cli.results import Rank
from amanda_tools._training import ToolsOfTraining


class LightningCallback(ToolsOfTraining, lightning.pytorch.Callback):  # type: ignore[misc]
    """Applies tools while ``fit`` trains.

    Example: ``lightning.Trainer(callbacks=[Callback("flops,nan", output="out", html=True)])``
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(Rank(trainer.global_rank, trainer.world_size))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end(exception)


Callback = LightningCallback
