"""Where the input stands, as a checkpoint holds it: its serialised position, and the place (pass, batch in it) that it belongs to.

An input that waits for data can't give its position, since whoever serialises it waits too. Its place is known without
asking it. So a checkpoint of such a moment holds the last position that could be had, with the place of that one and
the place of now: a resume sets the one and reads on to the other, which is exact, since a pass depends on its number alone.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import structs
from towers.checkpoint import manifest

POSITION, PLACE = 'input_position', 'input_place'
_WAIT_SECS = 5.0  # for a position; a slow map takes as long as its elements in flight


class Asker:
    """Asks the input of a training for its position between two steps; makes its operations at once.

    Args:
      source: the input; one without a position (None as well) is not asked.
      model_dir: the run directory, whose checkpoints hold the earlier positions.
      wait_secs: how long a position is waited for.
    """

    def __init__(self, source: structs.Input | None, model_dir: str, *, wait_secs: float = _WAIT_SECS) -> None:
        self._source, self._model_dir, self._wait_secs = source, model_dir, wait_secs
        self._read: Any = None
        has_position = source is not None and source.position is not None
        with tf.name_scope('checkpoint/'):
            # Name in the checkpoint -> what is fed when it is written.
            self.given: dict[str, tf.Tensor] = {POSITION: tf.placeholder(tf.string, [])} if has_position else {}
            # What has to be fetched with the other values of a moment.
            self.now: dict[str, tf.Tensor] = {}
            if source is not None and source.taken is not None:
                # [of the training, of the position; pass, batch, shards if any]
                self.given[PLACE] = tf.placeholder(tf.int64, [2, *source.taken.shape.as_list()])
                self.now = {PLACE: source.taken.read_value()}

    @property
    def fingerprint(self) -> str:
        """Of the pipeline whose position is saved; empty where none is."""
        return self._source.fingerprint if self._source is not None and self.given else ''

    def prepare(self, session: tf.Session) -> None:
        """Called once for a session."""
        if self._source is not None and self._source.position is not None and not self._source.place_only:
            self._read = session.make_callable(self._source.position, accept_options=True)

    def values(self, now: Mapping[str, Any], step: int, *, blocked: bool, but: Sequence[int] = ()) -> dict[str, Any]:
        """What to write for `given`.

        Args:
          now: the values of `now` at this moment.
          step: of this moment.
          blocked: whether the input is known to wait, so that it need not be asked.
          but: steps whose checkpoints are not of this run's past.
        """
        if not self.given:
            return {}
        if self._source is not None and self._source.place_only:
            return {POSITION: b'', PLACE: [now[PLACE]] * 2}
        position = None if blocked else self._ask(forever=PLACE not in now)
        if position is not None:
            return {POSITION: position, **({PLACE: [now[PLACE]] * 2} if PLACE in now else {})}
        earlier, place = self._earlier(now[PLACE], but)
        logging.warning(
            'The input gives no position now; checkpoint %d holds %s, from where a resume reads on to batch %d of pass %d.',
            step,
            f'that of batch {place[1]}' if earlier else 'the start of the pass',
            *now[PLACE][::-1],
        )
        return {POSITION: earlier, PLACE: [now[PLACE], place]}

    def _ask(self, *, forever: bool) -> bytes | None:
        """The position; None where it does not come in time.

        Raises:
          tf.errors.OpError: there is none.
        """
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(self._read(options=tf.RunOptions(inter_op_thread_pool=-1)))
            except Exception as error:  # raised by the caller
                found.append(error)

        thread = threading.Thread(target=ask, name='input-position', daemon=True)
        thread.start()
        thread.join(None if forever else self._wait_secs)
        if found and isinstance(found[0], Exception):
            raise found[0]
        return found[0] if found else None

    def _earlier(self, now: Sequence[int], but: Sequence[int]) -> tuple[bytes, Sequence[int]]:
        """The newest checkpoint's position and its place; an empty one where none fits."""
        for found in reversed(manifest.all(self._model_dir)):
            if found.step in but or found.manifest.input_fingerprint != self.fingerprint or manifest.check(found.prefix) is not None:
                continue
            reader = tf.train.load_checkpoint(found.prefix)
            place = reader.get_tensor(PLACE)[1] if reader.has_tensor(PLACE) else (-1, 0)
            if place[0] == now[0]:  # from an earlier pass it may be further than from the start of this one
                return reader.get_tensor(POSITION), place
        return b'', [now[0], 0]
