"""A training that writes down which examples each step takes: `logged_training.py TOWERS STEPS [SETTINGS]`, in the current folder.

Everything that could go wrong in a resume is in it: shuffling anew in each pass, in the data and before a map, passes that
end with a smaller batch, elements made ahead, dropout, momentum, checkpoints by the number of steps.
"""

import json
import os
import pathlib
import sys
import time

import tensorflow.compat.v1 as tf

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2])]

import towers  # noqa: E402

EXAMPLES, BATCH = 50, 8  # 6 batches of 8 and one of 2
STEP_SECS = 0.004  # so that there is time to be killed in


def dataset():
    numbers = tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES)  # seeded by the run
    examples = numbers.map(lambda i: {'id': i, 'x': tf.random.stateless_normal([4], tf.stack([i, 7]))}, num_parallel_calls=2)
    return examples.shuffle(10, seed=4).prefetch(3)


def model(batch, *, training):
    tf.add_to_collection('ids', batch['id'])
    hidden = tf.tanh(tf.matmul(batch['x'], tf.get_variable('w', [4, 8])))
    out = tf.matmul(towers.dropout(hidden, 0.25, training=training), tf.get_variable('out', [8, 1]))
    return towers.ModelOutput(tf.reduce_mean((out[:, 0] - tf.sin(tf.cast(batch['id'], tf.float32))) ** 2))


class IdLog(tf.train.SessionRunHook):
    """Appends the step and its examples to `ids.jsonl`, whole lines at once."""

    def begin(self):
        with tf.device('/cpu:0'):
            self._ids = tf.concat(tf.get_collection('ids'), 0)
        self._global_step = tf.train.get_global_step()
        self._file = os.open('ids.jsonl', os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def after_create_session(self, session, coord):
        self._step = int(session.run(self._global_step))

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._ids)

    def after_run(self, run_context, run_values):
        self._step += 1
        ids = list(dict.fromkeys(run_values.results.tolist()))  # a tower without examples has a stand-in
        os.write(self._file, (json.dumps({'step': self._step, 'ids': ids}) + '\n').encode())
        time.sleep(STEP_SECS)


def main(n, steps, settings='{}', data=dataset, *, usual=None, model=model, optimizer=None, hooks=()):
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(settings).items()}
    own = {
        'num_gpus': int(n),
        'device': 'cpu',
        'global_batch_size': BATCH,
        'learning_rate': 0.01,  # at 0.05 the rounding of other sums grows to 5e-5 in 300 steps
        'train_steps': int(steps),
        'save_steps': 3,
        'log_steps': 1,
        'deterministic': True,
        'model_dir': 'run',
        'intra_op_threads': 1,
        'inter_op_threads': 2,
    }
    config = towers.Config(**{**own, **(usual or {}), **given})
    return towers.train(model, data, config, hooks=[IdLog(), *hooks], optimizer=optimizer)


if __name__ == '__main__':
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a server of TensorFlow, where there was one, may hold up the end of the interpreter
