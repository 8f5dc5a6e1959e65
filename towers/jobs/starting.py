"""What a session's variables and input start from, and go back to after a step that was not finite."""

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.checkpoint import manifest, restore, warm
from towers.graph import devices
from towers.input import positions
from towers.jobs import program

COUNTER = 'skipped_steps'  # the one variable that never goes back


class Starter:
    """Sets the variables of a program; makes its operations at once, before the graph is finalised.

    Args:
      made: the program.
      found: the checkpoint to go on from; None = initial values, or those that `init_checkpoint` asks for.
      config: `init_checkpoint`, `nan_policy` and `model_dir`.
    """

    def __init__(self, made: program.Program, found: manifest.Checkpoint | None, config: config_lib.Config) -> None:
        step = made.step
        self._made, self._found, self._model_dir = made, found, str(config.model_dir)
        self._warm = warm.WarmStart(step.saved, config=config) if config.init_checkpoint and found is None else None
        self._restorer = restore.Restorer(step.saved, step.input) if found is not None else None
        if config.nan_policy == 'rollback':
            self._back = restore.Restorer({name: variable for name, variable in step.saved.items() if name != COUNTER})
            # Copies follow by `sync`; other local variables count what the process did, which does not go back.
            with tf.name_scope('restore/'):
                self._anew = tf.group(*[variable.initializer for name, variable in step.saved.items() if name != COUNTER], name='anew')

    def start(self, raw: tf.Session) -> None:
        """Sets a new session's variables and input."""
        devices.check_devices(raw, self._made.placement)
        raw.run(self._made.init)
        raw.run(self._made.step.input.initializer)
        positions.require(raw, self._made.step.input)
        if self._warm is not None:
            self._warm.load(raw)
        if self._restorer is not None and self._found is not None:
            self._restorer.restore(raw, self._found)
            logging.info('Going on from %s at step %d.', self._found.prefix, self._found.step)
        raw.run(self._made.step.sync)

    def go_back(self, raw: tf.Session) -> int:
        """Sets the variables to those of the newest checkpoint, or as at the start where there is none; the input stays.

        Returns:
          The step gone back to.

        Raises:
          CheckpointError: there are checkpoints and none is whole.
        """
        found = manifest.newest(self._model_dir)
        if found is not None:
            self._back.restore(raw, found)
        else:
            raw.run(self._anew)
            if self._warm is not None:
                self._warm.load(raw)
        raw.run(self._made.step.sync)
        return 0 if found is None else found.step
