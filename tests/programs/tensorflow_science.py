"""Programs of TensorFlow: probability, physics, graphs of TensorFlow 1, loops of our own."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from tests.programs.registry import program
from tests.programs.tensorflow_parts import descended, digits, normal

tf1 = tf.compat.v1


@program("dm-sonnet")
def sonnet_networks() -> Any:
    """Sonnet: convolutions with batch normalization by its Adam, an LSTM unrolled dynamically."""
    import sonnet as snt

    images, labels = digits(16)
    norm, flatten, drop = snt.BatchNorm(True, True), snt.Flatten(), 0.1
    convolution, head = snt.Conv2D(4, 3), snt.nets.MLP([16, 10], dropout_rate=drop)
    optimizer = snt.optimizers.Adam(1e-3)

    def logits() -> Any:
        x = tf.nn.relu(norm(convolution(images), is_training=True))
        return head(flatten(x), is_training=True)

    logits()
    modules = norm, convolution, head
    weights = [variable for module in modules for variable in module.trainable_variables]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits())
        found = tape.gradient(loss, weights)
        optimizer.apply(found, weights)
        return loss, found

    results = [step() for _ in range(2)]
    core, sequence = snt.LSTM(6), tf.constant(normal(5, 3, 4))

    def unrolled() -> Any:
        outputs, _ = snt.dynamic_unroll(core, sequence, core.initial_state(3))
        return tf.reduce_sum(outputs**2)

    after = [variable.numpy() for module in modules for variable in module.variables]
    return results, after, descended(unrolled, lambda: core.trainable_variables)


@program("tensorflow-probability", "tf-keras")
def probability_inference() -> Any:
    """TensorFlow Probability: Hamiltonian Monte Carlo in a graph, variational inference, a flow."""
    import tensorflow_probability as tfp

    tfd, tfb = tfp.distributions, tfp.bijectors
    target = tfd.MultivariateNormalTriL([1.0, -1.0], tf.constant([[1.0, 0.0], [0.5, 0.7]]))

    @tf.function
    def chain() -> Any:
        kernel = tfp.mcmc.HamiltonianMonteCarlo(target.log_prob, 0.2, 3)
        kernel = tfp.mcmc.SimpleStepSizeAdaptation(kernel, 4)
        return tfp.mcmc.sample_chain(6, tf.zeros([2, 2]), kernel=kernel, trace_fn=None, seed=[1, 2])

    surrogate = tfp.experimental.vi.build_affine_surrogate_posterior(
        [2], operators="diag", seed=[3, 4]
    )
    flow = tfb.Chain([tfb.Scale(tf.Variable(2.0)), tfb.Softplus(), tfb.Shift(tf.Variable(0.5))])
    made = tfd.TransformedDistribution(tfd.Normal(0.0, 1.0), flow)
    x = tf.constant(np.abs(normal(16)) + 0.1)

    def bound() -> Any:
        drawn, density = surrogate.experimental_sample_and_log_prob(4, seed=[5, 6])
        return tf.reduce_mean(density - target.log_prob(drawn))

    return [
        chain(),
        descended(bound, lambda: surrogate.trainable_variables),
        descended(lambda: -tf.reduce_mean(made.log_prob(x)), lambda: flow.trainable_variables),
        made.sample(3, seed=[7, 8]),
    ]


@program("gpflow")
def gpflow_regression() -> Any:
    """Gaussian processes: exact by SciPy's L-BFGS, sparse variational by natural gradients."""
    import gpflow

    x = np.linspace(0, 1, 12)[:, None]
    y = np.sin(6 * x) + 0.1 * np.random.normal(size=x.shape)
    exact = gpflow.models.GPR((x, y), gpflow.kernels.Matern52())
    options = {"maxiter": 5}
    gpflow.optimizers.Scipy().minimize(
        exact.training_loss, exact.trainable_variables, options=options
    )
    sparse = gpflow.models.SVGP(
        gpflow.kernels.SquaredExponential(), gpflow.likelihoods.StudentT(), x[::3].copy()
    )
    gpflow.set_trainable(sparse.q_mu, False)
    gpflow.set_trainable(sparse.q_sqrt, False)
    natural = gpflow.optimizers.NaturalGradient(0.1)
    loss = sparse.training_loss_closure((x, y))
    for _ in range(2):
        natural.minimize(loss, [(sparse.q_mu, sparse.q_sqrt)])
    steps = descended(loss, lambda: sparse.trainable_variables, steps=2, rate=0.01)
    parameters = [p.numpy() for p in (*exact.parameters, *sparse.parameters)]
    return steps, parameters, exact.predict_y(x + 0.01), sparse.predict_f(x + 0.01)


@program("deepxde", environment={"DDE_BACKEND": "tensorflow"})
def deepxde_poisson() -> Any:
    """A physics-informed network: second derivatives in the loss of a Poisson equation."""
    import deepxde as dde

    dde.config.set_random_seed(0)
    pi = np.pi

    def equation(x: Any, y: Any) -> Any:
        return -dde.grad.hessian(y, x) - pi**2 * tf.sin(pi * x)

    line = dde.geometry.Interval(-1, 1)
    border = dde.icbc.DirichletBC(line, lambda x: 0, lambda _, on: on)
    data = dde.data.PDE(line, equation, border, 12, 2, num_test=8)
    model = dde.Model(data, dde.nn.FNN([1, 8, 8, 1], "tanh", "Glorot uniform"))
    model.compile("adam", lr=1e-3, verbose=0)
    losses, _ = model.train(iterations=3, verbose=0)
    x = np.linspace(-1, 1, 5, dtype=np.float32)[:, None]
    return losses.loss_train, model.predict(x), [v.numpy() for v in model.net.trainable_variables]


@program("tensorflow")
def session_of_tensorflow1() -> Any:
    """A graph of TensorFlow 1: a session, placeholders, Adam, a loop, a saver, summaries."""
    images, labels = digits(24)
    with tf.Graph().as_default():
        tf1.set_random_seed(0)
        x = tf1.placeholder(tf.float32, (None, 8, 8, 1))
        y = tf1.placeholder(tf.int64, (None,))
        kernel = tf1.get_variable("kernel", (3, 3, 1, 4), use_resource=True)
        h = tf.reshape(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), (-1, 256))
        h = tf.nn.dropout(h, rate=0.2, seed=1)
        weight = tf1.get_variable("weight", (256, 10), use_resource=True)
        logits = tf.while_loop(
            lambda i, z: i < 3, lambda i, z: (i + 1, tf.tanh(z)), (0, h @ weight)
        )
        loss = tf1.losses.sparse_softmax_cross_entropy(y, logits[1])
        train = tf1.train.AdamOptimizer(0.01).minimize(loss)
        saver = tf1.train.Saver()
        with tf1.Session(config=_config()) as session, tempfile.TemporaryDirectory() as folder:
            session.run(tf1.global_variables_initializer())
            feed = {x: images, y: labels}
            losses = [session.run([loss, train], feed)[0] for _ in range(3)]
            path = saver.save(session, f"{folder}/model")
            session.run([loss, train], feed)
            changed = session.run([kernel, weight])
            saver.restore(session, path)
            return losses, changed, session.run([kernel, weight])


def _config() -> Any:
    """The configuration of a session whose graph is optimized if functions are."""
    config, options = tf1.ConfigProto(), tf.config.optimizer.get_experimental_options()
    rewriting = config.graph_options.rewrite_options
    rewriting.disable_meta_optimizer = options.get("disable_meta_optimizer", False)
    config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = 1
    return config


@program("tensorflow")
def data_and_loop() -> Any:
    """A data set with map and shuffle, a training loop in a tf.function, mixed precision."""
    images, labels = digits()

    def augmented(image: Any, label: Any) -> Any:
        return tf.image.stateless_random_flip_left_right(image, (1, label)), label

    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(48, seed=1).map(augmented)
    weights = [tf.Variable(0.1 * normal(64, 16)), tf.Variable(0.1 * normal(16, 10))]
    slots = [tf.Variable(tf.zeros_like(w)) for w in weights]

    @tf.function
    def epoch(batches: Any) -> Any:
        total = tf.constant(0.0)
        for x, y in batches:
            with tf.GradientTape() as tape:
                halves = tf.cast(tf.reshape(x, (-1, 64)), tf.bfloat16)
                hidden = tf.nn.relu(halves @ tf.cast(weights[0], tf.bfloat16))
                logits = tf.cast(hidden, tf.float32) @ weights[1]
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                loss = tf.reduce_mean(losses)
            for w, slot, g in zip(weights, slots, tape.gradient(loss, weights), strict=True):
                w.assign_sub(0.1 * slot.assign(0.9 * slot + tf.clip_by_norm(g, 1.0)))
            total += loss
        return total

    totals = [epoch(data.batch(16, drop_remainder=True)) for _ in range(3)]
    return totals, weights, slots


@program("tensorflow")
def distributed_and_saved() -> Any:
    """A mirrored strategy in a tf.function, then a SavedModel, loaded and called."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    images, labels = digits(32)
    with strategy.scope():
        weight = tf.Variable(normal(64, 10))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = tf.reshape(x, (-1, 64)) @ weight
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        return strategy.reduce("sum", strategy.run(replica, (x, y)), axis=None)

    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16)
    totals = [step(x, y) for x, y in strategy.experimental_distribute_dataset(data)]
    module = tf.Module()
    module.weight = tf.Variable(weight.numpy())
    signature = [tf.TensorSpec((None, 64))]
    module.infer = tf.function(lambda x: tf.nn.softmax(x @ module.weight), signature)
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
        return totals, weight.numpy(), loaded.infer(images.reshape(-1, 64))


@program("tensorflow")
def eager_loops() -> Any:
    """Eager execution: nested tapes, a Jacobian, a custom gradient, ragged and sparse tensors."""

    @tf.custom_gradient
    def clipped(x: Any) -> Any:
        return tf.tanh(x), lambda g: tf.clip_by_value(g, -0.5, 0.5)

    weight, x = tf.Variable(normal(4, 3)), tf.constant(normal(5, 4))
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as tape:
            y = clipped(x @ weight)
            loss = tf.reduce_sum(y**3)
        gradient = tape.gradient(loss, weight)
        penalty = tf.reduce_sum(gradient**2)
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(x, (-1,)), (3, 7, 10))
    sparse = tf.sparse.from_dense(tf.nn.relu(x))
    function = tf.function(lambda z: tf.map_fn(lambda row: tf.cumsum(tf.sort(row)), z))
    return [
        loss,
        gradient,
        outer.gradient(penalty, weight),
        outer.jacobian(y, weight),
        descended(lambda: tf.reduce_sum(clipped(x @ weight)), lambda: [weight], compiled=False),
        tf.reduce_mean(ragged, 1),
        tf.sparse.sparse_dense_matmul(sparse, weight),
        function(x),
    ]
