"""A callback of Keras: ``model.fit(x, y, callbacks=[Callback("flops,nan,stats")])``."""

from __future__ import annotations

import keras

from amanda_tools._training import ToolsOfTraining


class KerasCallback(ToolsOfTraining, keras.callbacks.Callback):  # type: ignore[misc]
    """Applies tools while ``fit`` runs, on any backend that has a driver.

    Example: ``model.fit(x, y, callbacks=[Callback("flops,nan", output="out", html=True)])``
    """

    trains = keras.Model, "fit"


Callback = KerasCallback
