"""A training with all that may hang on a variable (slots, averages, rows): `kept_training.py TOWERS STEPS [SETTINGS]`.

Where the current folder has a file `hang` with a step's number, the update to that step writes all variables but one and
then waits for ever. Where it has a file `lose` with a step's number and a process's, that process, which may be this one
(0), is killed between that step and the hooks that report it, once.
"""

import os
import pathlib
import signal
import sys

import tensorflow.compat.v1 as tf

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / 'faults')]

import logged_training  # noqa: E402

import towers  # noqa: E402

LATE = 'late'  # the variable that is never written in the step that hangs
dataset = logged_training.dataset


def model(batch, *, training):
    """Dense weights, rows of a table, a moving mean, a draw by example."""
    tf.add_to_collection('ids', batch['id'])
    hidden = tf.matmul(batch['x'], tf.get_variable('w', [4, 8])) + tf.get_variable(LATE, [8], initializer=tf.zeros_initializer())
    mean = tf.get_variable('mean', [8], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, mean.assign(mean * 0.9 + 0.1 * tf.reduce_mean(hidden, 0)))
    hidden += tf.nn.embedding_lookup(tf.get_variable('table', [logged_training.EXAMPLES, 8]), batch['id'])
    out = tf.matmul(towers.dropout(tf.tanh(hidden), 0.25, training=training), tf.get_variable('out', [8, 1]))
    return towers.ModelOutput(tf.reduce_mean((out[:, 0] - tf.sin(tf.cast(batch['id'], tf.float32))) ** 2))


class Adam(tf.train.AdamOptimizer):
    """Adam, one of whose updates hangs where the file says so."""

    def _resource_apply_dense(self, grad, var):
        if var.op.name != LATE or not os.path.exists('hang'):
            return super()._resource_apply_dense(grad, var)
        with open('hang') as file:
            hangs = tf.equal(tf.train.get_global_step() + 1, int(file.read()))
        with tf.device(var.device):
            never = tf.FIFOQueue(1, tf.bool, shapes=[[]])
            with tf.control_dependencies([tf.cond(hangs, never.dequeue, lambda: False)]):
                return super()._resource_apply_dense(grad, var)


class Lose(tf.train.SessionRunHook):
    """Kills what the file says, and asks the last worker for something behind it, which fails where it is that one."""

    def begin(self):
        self._step = tf.train.get_global_step()
        if os.path.exists('lose'):
            with tf.device('/job:worker/task:1/cpu:0'):
                self._asked = tf.timestamp()

    def after_run(self, run_context, run_values):
        if not os.path.exists('lose'):
            return
        with open('lose') as file:
            step, pid = map(int, file.read().split())
        if run_context.session.run(self._step) == step:
            os.unlink('lose')
            os.kill(pid or os.getpid(), signal.SIGKILL)
            while True:
                run_context.session.run(self._asked)


def main(n, steps, settings='{}'):
    usual = {'learning_rate': 1e-3, 'ema_decay': 0.9}
    logged_training.main(n, steps, settings, usual=usual, model=model, optimizer=Adam, hooks=[Lose()])


if __name__ == '__main__':
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a server of TensorFlow, where there was one, may hold up the end of the interpreter
