"""See tensorpack/__init__.py."""

import tensorflow.compat.v1 as tf


class NewSessionCreator:
    def __init__(self, config):
        self.config = config

    def create_session(self):
        session = tf.Session(config=self.config)
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        session.run(tf.local_variables_initializer())
        return session
