"""TensorFlow 1: queue runners feed a session that trains a weight."""

import tensorflow as tf
from bits import digest

v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    words = v1.train.string_input_producer(["a", "bb", "ccc"], shuffle=False, num_epochs=4)
    lengths = v1.train.batch([tf.strings.length(words.dequeue())], 2, capacity=8)
    weight = v1.get_variable("weight", initializer=tf.ones((1, 3)), use_resource=True)
    loss = tf.reduce_mean((tf.matmul(tf.cast(lengths, tf.float32)[:, None], weight) - 1) ** 2)
    train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    coordinator = v1.train.Coordinator()
    threads = v1.train.start_queue_runners(session, coordinator)
    with coordinator.stop_on_exception():
        while not coordinator.should_stop():
            print(session.run([loss, train])[0])
    coordinator.join(threads)
    print(digest(session.run(weight)))
