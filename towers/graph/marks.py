"""How far a step has come that does not end: counters inside the graph, one for each part that may be waited for.

The counter of a part goes up when the part is done: the input's when the batch is there, a tower's when its gradients
are. So another thread can tell, beside a blocked step, what it is waited for. Each stands on the device of its part: no
tensor travels for it, and a GPU that hangs does not answer for its own.
"""

import threading
import time
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from towers import reads, structs

_ANSWER_SECS = 5.0


def make(source: structs.Input, parts: Sequence[tuple[structs.Tower, Sequence[structs.Gradient]]]) -> tuple[structs.Mark, ...]:
    """Adds the counters of a step to the current graph.

    Args:
      source: the input whose batches feed the step.
      parts: each tower with the tensors that it makes last; None among them is passed over.

    Returns:
      The input's mark, then the towers'; a step has to run their `advance` too (see `whole`).
    """
    with tf.name_scope('marks/'):
        batch = tf.nest.flatten([tower.features for tower in source.batches], expand_composites=True)
        made = [source.mark or _mark('the input', 'input', parts[0][0].host, batch)]
        for tower, tensors in parts:
            made_last = tf.nest.flatten([tensor for tensor in tensors if tensor is not None], expand_composites=True)
            made.append(_mark(f'tower {tower.index} on {tower.devices[0]}', tower.scope, tower.devices[0], made_last))
    return tuple(made)


def waited(source: structs.Input, towers: Sequence[structs.Tower], operation: tf.Operation) -> tf.Tensor | None:
    """How long a step waited for its batch, and how long it took, measured in the graph where it is fetched with the step.

    Args:
      source: the input whose batches feed the step.
      towers: those that they feed; of several machines the first is measured.
      operation: makes the step.

    Returns:
      fp64 [2], seconds; None where operations shall be deterministic, since none tells the time then.
    """
    if not _tells_time():
        return None
    host = towers[0].host
    own = [batch.features for batch, tower in zip(source.batches, towers, strict=True) if tower.host == host]
    with tf.device(host), tf.name_scope('marks/'):
        begun = tf.timestamp()
        with tf.control_dependencies(tf.nest.flatten(own, expand_composites=True)):
            came = tf.timestamp()
        with tf.control_dependencies([operation, begun, came]):
            done = tf.timestamp()
        # A batch that is there at once may come before the time of the beginning is taken, and a clock may be set back.
        return tf.maximum(tf.stack([came, done]) - begun, 0.0)


def _tells_time() -> bool:
    """Whether TensorFlow's operations tell the time; they don't where all shall be deterministic, which nothing public says."""
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={'GPU': 0})) as session:
        now = tf.timestamp()
        try:
            session.run(now)
        except tf.errors.FailedPreconditionError:
            return False
    return True


def whole(step: structs.TrainStep) -> tuple[tf.Operation, ...]:
    """The operations that make one step, and those that count its parts."""
    return (*step.ops, *(mark.advance for mark in step.marks))


class Reader:
    """Tells what a step is waited for that another thread makes.

    Args:
      session: the one that makes the steps; None where it is closed by now, and does not answer.
      marks: of the step; none = it says 'its session'.
    """

    def __init__(self, session: tf.Session | None, marks: Sequence[structs.Mark]):
        self._session = session
        self._marks = marks

    def late(self, done: int) -> str:
        """In a few words, what has not come in the step after `done` whole ones."""
        if not self._marks:
            return 'its session'
        counts = self._counts()
        missing = [what for what, count in counts.items() if count is None or count <= done]
        if self._marks[0].what in missing:  # before the first step nothing tells it from a graph that is still being prepared
            return self._marks[0].what + ('' if done else ', or for TensorFlow to prepare the first step')
        silent = [what for what in missing if counts[what] is None]
        answers = f' (no answer within {_ANSWER_SECS:g} s from {", ".join(silent)})' if silent else ''
        return (', '.join(missing) or 'the update of the variables') + answers

    def waits_for_input(self, done: int | None) -> bool:
        """Whether it is known that the step after `done` whole ones has no batch, so that it can't have changed anything."""
        if done is None or not self._marks:
            return False
        counts: dict[str, int | None] = {}
        self._read(self._marks[0], counts)
        return any(count is not None and count <= done for count in counts.values())

    def _counts(self) -> dict[str, int | None]:
        """Each mark's count; None where its device does not answer, or the session is closed."""
        counts: dict[str, int | None] = dict.fromkeys(mark.what for mark in self._marks)
        threads = [threading.Thread(target=self._read, args=(mark, counts), daemon=True) for mark in self._marks]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _ANSWER_SECS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return dict(counts)

    def _read(self, mark: structs.Mark, counts: dict[str, int | None]) -> None:
        if self._session is None:
            return
        # In the thread that calls, since those of the session may all be blocked.
        options = tf.RunOptions(inter_op_thread_pool=-1, timeout_in_ms=int(1000 * _ANSWER_SECS))
        try:
            counts[mark.what] = int(self._session.run(mark.count, options=options))
        except (tf.errors.OpError, RuntimeError):
            pass


def _mark(what: str, name: str, device: str, after: Sequence[tf.Tensor]) -> structs.Mark:
    with tf.device(device):
        # Local: set with all other variables, and in no checkpoint.
        variable = tf.Variable(
            tf.zeros([], tf.int64), trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], name=name, use_resource=True
        )
        with tf.control_dependencies(after):
            advance = reads.count(variable)
        return structs.Mark(what, advance, variable.read_value())
