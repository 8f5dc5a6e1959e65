"""Files of TensorFlow's own checkpoint format from numpy arrays, without the training's session."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf import text_format

from towers.checkpoint import manifest


class Writer:
    """Writes named arrays as `<prefix>.index` and `<prefix>.data-00000-of-00001`, in a graph and a one-thread session of its own.

    The session is made at the first write, after the training's own: the first session of a process decides its thread pools.

    Args:
      dtypes: name in the checkpoint -> its type.
    """

    def __init__(self, dtypes: Mapping[str, tf.DType]):
        self._names = sorted(dtypes)
        self._session: tf.Session | None = None
        self._call: Any = None
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device('/cpu:0'):
            self._prefix = tf.placeholder(tf.string, [])
            self._values = [tf.placeholder(dtypes[name]) for name in self._names]
            self._save = tf.raw_ops.SaveV2(
                prefix=self._prefix, tensor_names=self._names, shape_and_slices=[''] * len(self._names), tensors=self._values
            )

    def write(self, prefix: str, values: Mapping[str, np.ndarray | bytes]) -> None:
        """Writes one checkpoint; raises tf.errors.OpError where the storage fails."""
        if self._session is None:
            config = tf.ConfigProto(
                device_count={'CPU': 1, 'GPU': 0},
                use_per_session_threads=True,
                inter_op_parallelism_threads=1,
                intra_op_parallelism_threads=1,
            )
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            self._session = tf.Session(graph=self._graph, config=config)
            self._call = self._session.make_callable(self._save, [self._prefix, *self._values], accept_options=True)
        # A pool number below 0 runs the operation in the calling thread.
        options = tf.RunOptions(inter_op_thread_pool=-1)
        self._call(prefix, *[values[name] for name in self._names], options=options)

    def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            self._session.close()


def first_not_finite(values: Mapping[str, Any]) -> str | None:
    """The name of the first array, by name, that holds a NaN or an infinity; None if all are finite."""
    for name in sorted(values):
        value = np.asarray(values[name])
        if not _is_finite(value):
            return name
    return None


def _is_finite(value: np.ndarray) -> bool:
    if value.dtype.kind in 'biuSOU' or tf.as_dtype(value.dtype).is_integer:
        return True
    # A NaN or an infinity makes the sum so, and a sum is several times faster; finite values may overflow it, so then look again.
    with np.errstate(all='ignore'):
        if value.dtype.kind in 'fc' and np.isfinite(np.add.reduce(value, axis=None)):
            return True
    return bool(np.isfinite(value).all())


def write_state_file(model_dir: str, steps: list[int]) -> None:
    """Writes TensorFlow's own `checkpoint` file, which names the checkpoints of `steps` (rising) by relative paths."""
    names = [f'ckpt-{step}' for step in steps]
    state = tf.train.generate_checkpoint_state_proto(model_dir, names[-1], all_model_checkpoint_paths=names)
    path = os.path.join(model_dir, 'checkpoint')
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
        file.write(text_format.MessageToString(state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)
    manifest.sync_folder(model_dir)
