"""TensorFlow, eager: a tape and a loop."""

import tensorflow as tf

tf.random.set_seed(0)
x = tf.random.uniform((32, 4))
w = tf.Variable(tf.ones((4, 3)))
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.relu(tf.matmul(x, w)) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    print(loss.numpy())
print(w.numpy().tolist())
