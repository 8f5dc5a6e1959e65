"""The training that scripts/fuzz_crashes.py kills: small, of all that could go wrong in a resume, and it writes down what it does."""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import traceback
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

import towers

EXAMPLES, BATCH, STEPS, KEEP = 50, 8, 40, 3
_CALLS = ('open', 'os.rename', 'os.remove', 'os.truncate', 'os.link', 'os.mkdir', 'os.utime', 'os.listdir', 'os.rmdir')


def dataset() -> tf.data.Dataset:
    """Numbers, shuffled before and after a map, whose passes end with a smaller batch."""
    numbers = tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=3)
    examples = numbers.map(lambda i: {'id': i, 'x': tf.random.stateless_normal([4], tf.stack([i, 7]))}, num_parallel_calls=2)
    return examples.shuffle(10, seed=4).prefetch(3)


def model(batch: Any, *, training: bool) -> towers.ModelOutput:
    """Two layers and a dropout."""
    tf.add_to_collection('ids', batch['id'])
    hidden = tf.tanh(tf.matmul(batch['x'], tf.get_variable('w', [4, 8])))
    wide = tf.get_variable('wide', [1 << 18], initializer=tf.zeros_initializer())  # so that a write takes its time
    out = tf.matmul(towers.dropout(hidden, 0.25, training=training), tf.get_variable('out', [8, 1])) + wide[0]
    return towers.ModelOutput(tf.reduce_mean((out[:, 0] - tf.sin(tf.cast(batch['id'], tf.float32))) ** 2))


class Log(tf.train.SessionRunHook):
    """Writes down what a trainer starts with (`starts.jsonl`) and which examples each step takes (`ids.jsonl`)."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._start: dict[str, Any] | None = None
        self._step = 0

    def begin(self) -> None:
        """Makes the tensors."""
        with tf.device('/cpu:0'):
            self._ids = tf.concat(tf.get_collection('ids'), 0)
            floats = [variable for variable in tf.global_variables() if variable.dtype.base_dtype.is_floating]
            self._finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(variable)) for variable in floats])
        self._global_step = tf.train.get_global_step()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Looks at what was restored."""
        del coord
        self._step = int(session.run(self._global_step))
        self._start = {'step': self._step, 'finite': bool(session.run(self._finite))}

    def before_run(self, run_context: tf.train.SessionRunContext) -> tf.train.SessionRunArgs:
        """Writes the start before the first step, when no checkpoint is in writing; asks for the examples."""
        if self._start is not None:
            _append(self._folder / 'starts.jsonl', {**self._start, 'names': os.listdir(self._folder / 'run')})
            self._start = None
        return tf.train.SessionRunArgs(self._ids)

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Writes the examples; a tower without any has a stand-in."""
        self._step += 1
        _append(self._folder / 'ids.jsonl', {'step': self._step, 'ids': list(dict.fromkeys(run_values.results.tolist()))})


@dataclasses.dataclass
class Calls:
    """Counts a process's calls to the file system below a folder, and kills it before one of them; an audit hook.

    Attributes:
      folder: where calls count.
      last: the call before which it dies; 0 = none.
      count: calls so far.
    """

    folder: str
    last: int = 0
    count: int = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Takes one event."""
        if event in _CALLS and args and str(args[0]).startswith(self.folder):
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def train(folder: pathlib.Path, last_call: int) -> NoReturn:
    """Trains in `folder`/run, or goes on there, and ends the process: with 0 where all steps are done.

    Args:
      folder: gets what the trainer prints and writes down.
      last_call: the call to the file system before which it is killed; 0 = none.
    """
    code = 1
    try:
        output = os.open(folder / 'output', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        calls = Calls(str(folder / 'run'), last_call)
        sys.addaudithook(calls)
        config = towers.Config(
            num_gpus=2, device='cpu', global_batch_size=BATCH, train_steps=STEPS, save_steps=3, keep_checkpoints=KEEP, log_steps=1,
            deterministic=True, model_dir=str(folder / 'run'), intra_op_threads=1, inter_op_threads=2, summary_steps=10,
        )  # fmt: skip
        code = int(towers.train(model, dataset, config, hooks=[Log(folder)]).step != STEPS)
        (folder / 'calls').write_text(str(calls.count))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _append(path: pathlib.Path, row: dict[str, Any]) -> None:
    with open(path, 'ab', buffering=0) as file:
        file.write(json.dumps(row).encode() + b'\n')
