"""Programs of TensorFlow: Keras, and the packages that are built on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.programs.registry import program
from tests.programs.tensorflow_parts import descended, digits, fitted, normal

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
"""For packages that were written for Keras 2, which lives on as tf-keras."""


@program("keras")
def keras_mobilenet() -> Any:
    """MobileNetV2 of keras.applications: fit with augmentation, evaluate, predict."""
    import keras

    base = keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    inputs = keras.Input((32, 32, 3))
    augmented = keras.layers.RandomFlip()(keras.layers.RandomRotation(0.1)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4, "softmax")(base(augmented)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, np.random.random((8, 32, 32, 3)), np.arange(8) % 4, batch_size=4)


@program("keras")
def keras_functional() -> Any:
    """Two inputs, shared layers, batch normalization, dropout, callbacks, a schedule, clipping."""
    import keras
    from keras import layers

    image, number = keras.Input((8, 8, 1)), keras.Input((3,))
    x = layers.BatchNormalization()(layers.Conv2D(6, 3, activation="relu")(image))
    x = layers.Dropout(0.2)(layers.Flatten()(layers.SeparableConv2D(4, 3)(x)))
    shared = layers.Dense(8, "gelu")
    y = layers.concatenate([shared(x[:, :3]), shared(number), x])
    model = keras.Model([image, number], [layers.Dense(10)(y), layers.Dense(1)(y)])
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    rate = keras.optimizers.schedules.CosineDecay(1e-2, 10)
    model.compile(keras.optimizers.AdamW(rate, clipnorm=1.0), losses, loss_weights=[1, 0.1])
    images, labels = digits()
    stop = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    return fitted(model, [images, normal(48, 3)], [labels, normal(48, 1)], callbacks=[stop])


@program("keras")
def keras_transformer() -> Any:
    """A transformer of layers of ours with a custom train_step, saved, loaded and run again."""
    import tempfile

    import keras
    from keras import layers, ops

    class Classifier(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = layers.Embedding(50, 16, mask_zero=True)
            self.attend, self.norm = layers.MultiHeadAttention(2, 8), layers.LayerNormalization()
            self.drop, self.head = layers.Dropout(0.1), layers.Dense(3)

        def call(self, ids: Any, training: bool = False) -> Any:
            x = self.embed(ids)
            x = self.norm(x + self.attend(x, x, use_causal_mask=True))
            return self.head(self.drop(ops.mean(x, 1), training=training))

        def train_step(self, data: Any) -> Any:
            ids, labels = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=labels, y_pred=self(ids, training=True))
            found = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(found, self.trainable_weights)
            return {"loss": loss, "norm": tf.linalg.global_norm(found)}

    model = Classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Lion(1e-3), loss)
    ids, labels = np.random.randint(1, 50, (16, 7)), np.random.randint(0, 3, 16)
    results = fitted(model, ids, labels, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model.weights.h5")
        other = Classifier()
        other(ids)
        other.load_weights(f"{folder}/model.weights.h5")
    return results, other.predict(ids, verbose=0)


@program("keras")
def keras_recurrent() -> Any:
    """LSTM, bidirectional, GRU with dropout of the state, masks, layers for each time."""
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((6, 5)),
            layers.Masking(),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, dropout=0.1)),
            layers.GRU(6, return_sequences=True, recurrent_dropout=0.1),
            layers.TimeDistributed(layers.Dense(4)),
        ]
    )
    model.compile("rmsprop", "mae")
    x = normal(8, 6, 5)
    x[:, 4:] = 0
    return fitted(model, x, normal(8, 6, 4), batch_size=4)


@program("keras-hub", "keras")
def keras_hub_gpt2() -> Any:
    """GPT-2 of KerasHub: fit on tokens, then generation, compiled and sampled."""
    import keras
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(60, 1, 2, 16, 32, max_sequence_length=16)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss=loss)
    ids = np.random.randint(1, 60, (4, 9))
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((4, 8), "int32")}
    history = model.fit(x, ids[:, 1:], epochs=2, batch_size=2, verbose=0).history
    prompt = {"token_ids": ids[:2, :8], "padding_mask": np.arange(8) < np.array([[3], [4]])}
    model.compile(optimizer="sgd", loss=loss, sampler=keras_hub.samplers.TopKSampler(5, seed=1))
    return history, model.generate(dict(prompt), stop_token_ids=None), model.get_weights()


@program("keras-hub", "keras")
def keras_hub_bert() -> Any:
    """BERT of KerasHub learns to fill in masked tokens."""
    import keras_hub

    bert = keras_hub.models.BertBackbone(60, 2, 2, 16, 32, max_sequence_length=12)
    masked = keras_hub.models.BertMaskedLM(bert, preprocessor=None)
    masked.compile("adam", "sparse_categorical_crossentropy")
    ids = np.random.randint(1, 60, (4, 8))
    inputs = {"token_ids": ids, "mask_positions": np.array([[1, 4]] * 4)}
    inputs |= {"segment_ids": np.zeros((4, 8), "int32"), "padding_mask": np.ones((4, 8), "int32")}
    return fitted(masked, inputs, ids[:, [1, 4]], batch_size=2, epochs=1)


@program("keras-tuner", "keras")
def keras_tuner_search() -> Any:
    """A random search over hyperparameters by a hypermodel that trains by itself."""
    import tempfile

    import keras
    import keras_tuner

    images, labels = digits()
    x, found = images.reshape(-1, 64), []

    class Search(keras_tuner.RandomSearch):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            width = trial.hyperparameters.Int("width", 4, 16, step=4)
            rate = trial.hyperparameters.Choice("rate", [1e-2, 1e-3])
            hidden = keras.layers.Dense(width, "relu")
            model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(rate), loss)
            found.append(fitted(model, x, labels))
            return found[-1][1]

    with tempfile.TemporaryDirectory() as folder:
        options = {"max_trials": 2, "seed": 0, "directory": folder, "project_name": "search"}
        tuner = Search(objective=keras_tuner.Objective("default", "min"), **options)
        tuner.search(verbose=0)
        return found, tuner.get_best_hyperparameters()[0].values


@program("scikeras", "keras", "scikit-learn")
def scikeras_pipeline() -> Any:
    """A Keras model as an estimator: cross-validation and a pipeline of scikit-learn."""
    import keras
    from scikeras.wrappers import KerasClassifier
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def build() -> Any:
        hidden, output = keras.layers.Dense(8, "relu"), keras.layers.Dense(10, "softmax")
        return keras.Sequential([keras.Input((64,)), hidden, output])

    images, labels = digits(64)
    options = {"loss": "sparse_categorical_crossentropy", "optimizer": "adam"}
    net = KerasClassifier(build, epochs=1, verbose=0, random_state=0, **options)
    pipeline = make_pipeline(StandardScaler(), net)
    x = images.reshape(-1, 64)
    found = cross_val_predict(pipeline, x, labels, cv=2)
    return found, pipeline.fit(x, labels).predict_proba(x)


@program("spektral", "tf-keras", environment=LEGACY)
def spektral_graphs() -> Any:
    """Graph convolutions and attention on an adjacency matrix, on tf-keras, in a training loop."""
    from spektral.layers import GATConv, GCNConv, GlobalSumPool
    from spektral.utils import gcn_filter

    edges = (np.random.random((7, 7)) < 0.4).astype(np.float32)
    x, a = tf.constant(normal(7, 5)), tf.constant(gcn_filter(edges + edges.T))
    layers = GCNConv(6, activation="relu"), GATConv(4, attn_heads=2), GlobalSumPool()

    def loss() -> Any:
        y = x
        for layer in layers[:2]:
            y = layer([y, a])
        return tf.reduce_sum(layers[2](y) ** 2)

    return descended(loss, lambda: [v for layer in layers for v in layer.trainable_variables])


@program("keras-tcn", "keras")
def keras_tcn_forecast() -> Any:
    """Temporal convolutions, dilated and residual, forecast a series."""
    import keras
    from tcn import TCN

    convolutions = TCN(4, dilations=(1, 2), dropout_rate=0.1)
    model = keras.Sequential([keras.Input((16, 1)), convolutions, keras.layers.Dense(1)])
    model.compile("adam", "mae")
    series = np.sin(np.arange(40) / 3).astype(np.float32)
    x = np.stack([series[i : i + 16] for i in range(24)])[..., None]
    return fitted(model, x, series[16:40], batch_size=8)


@program("bayesflow", "keras", environment={"KERAS_BACKEND": "tensorflow"})
def bayesflow_posterior() -> Any:
    """Amortized inference: a coupling flow learns a posterior from simulations, and is sampled."""
    import bayesflow
    import keras

    flow = bayesflow.networks.CouplingFlow(depth=2, subnet_kwargs={"widths": (16,)})
    approximator = bayesflow.approximators.ContinuousApproximator(inference_network=flow)
    parameters = normal(32, 2)
    data = {"inference_variables": parameters, "inference_conditions": parameters + normal(32, 2)}
    approximator.compile(optimizer=keras.optimizers.Adam(1e-3))
    dataset = bayesflow.OfflineDataset(data, batch_size=8, adapter=bayesflow.Adapter())
    history = approximator.fit(dataset=dataset, epochs=2, verbose=0).history
    density = flow.log_prob(parameters[:4], conditions=data["inference_conditions"][:4])
    return history, density, approximator.get_weights()


@program("tensorflow-recommenders", "tf-keras", environment=LEGACY)
def recommenders_two_towers() -> Any:
    """Two towers for retrieval with factorized scores, on tf-keras; the nearest items."""
    import tensorflow_recommenders as tfrs

    class Towers(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = (tf.keras.layers.Embedding(12, 4) for _ in range(2))
            self.task = tfrs.tasks.Retrieval()

        def compute_loss(self, features: Any, training: bool = False) -> Any:
            users, items = self.user(features["user"]), self.item(features["item"])
            return self.task(users, items, compute_metrics=False)

    tf.keras.utils.set_random_seed(0)
    model = Towers()
    model.compile(tf.keras.optimizers.legacy.Adagrad(0.1))
    features = {"user": np.arange(24) % 12, "item": np.arange(24) * 5 % 12}
    data = tf.data.Dataset.from_tensor_slices(features).shuffle(24, seed=1).batch(8)
    history = model.fit(data, epochs=2, verbose=0).history
    index = tfrs.layers.factorized_top_k.BruteForce(model.user, k=3)
    index.index(model.item(tf.range(12)))
    return history, model.get_weights(), index(tf.constant([1, 5]))


@program("tensorflow-lattice", "tf-keras", environment=LEGACY)
def lattice_monotonic() -> Any:
    """Calibrated lattices with monotonicity, projected after each step, on tf-keras."""
    import tensorflow_lattice as tfl

    tf.keras.utils.set_random_seed(0)
    inputs = [tf.keras.Input((1,)) for _ in range(2)]
    points = np.linspace(0, 1, 5)
    calibrated = [
        tfl.layers.PWLCalibration(points, output_max=1.0, output_min=0.0, monotonicity=m)(x)
        for m, x in zip(("increasing", "none"), inputs, strict=True)
    ]
    output = tfl.layers.Lattice([2, 2], monotonicities=["increasing", "none"])(calibrated)
    model = tf.keras.Model(inputs, output)
    model.compile(tf.keras.optimizers.legacy.SGD(0.1), "mse")
    x = np.random.random((32, 2)).astype(np.float32)
    return fitted(model, [x[:, :1], x[:, 1:]], x.sum(1), batch_size=8)


@program("tensorflow-model-optimization", "tf-keras", environment=LEGACY)
def model_optimization() -> Any:
    """Magnitude pruning by wrappers with callbacks, then quantization-aware training."""
    import tensorflow_model_optimization as tfmot

    tf.keras.utils.set_random_seed(0)
    images, labels = digits()
    keras = tf.keras
    layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten()]
    network = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    results = []
    for wrap, callbacks in (
        (tfmot.sparsity.keras.prune_low_magnitude, [tfmot.sparsity.keras.UpdatePruningStep()]),
        (tfmot.quantization.keras.quantize_model, []),
    ):
        model = wrap(keras.models.clone_model(network))
        model.compile(keras.optimizers.legacy.SGD(0.1), loss)
        results.append(fitted(model, images, labels, callbacks=callbacks, epochs=1))
    return results
