"""TensorFlow 1's way: a graph, a Session, a feed."""

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, (None, 4))
w = tf.get_variable("w", initializer=tf.ones((4, 3)))
loss = tf.reduce_mean(tf.nn.relu(tf.matmul(x, w)) ** 2)
step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
data = np.random.default_rng(0).random((32, 4))
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        print(session.run([loss, step], {x: data})[0])
    print(session.run(w).tolist())
