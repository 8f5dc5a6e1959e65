"""What a session's variables and input start from, and go back to after a step that was not finite."""

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.checkpoint import manifest, restore, warm
from towers.directory import run_directory
from towers.graph import devices, standing
from towers.input import positions
from towers.jobs import keeping, program

COUNTER = 'skipped_steps'  # the one variable that never goes back


class Starter:
    """Sets the variables of a program; makes its operations at once, before the graph is finalised.

    Args:
      made: the program.
      claim: the run, with the checkpoint to go on from; None = initial values, or those that `init_checkpoint` asks for.
      config: `init_checkpoint`, `nan_policy`, `allow_changed` and `model_dir`.
    """

    def __init__(self, made: program.Program, claim: run_directory.Claim, config: config_lib.Config) -> None:
        step, found = made.step, claim.found
        self._made, self._claim, self._config, self._model_dir = made, claim, config, str(config.model_dir)
        self._warm = warm.WarmStart(step.saved, config=config) if config.init_checkpoint and found is None else None
        self._restorer = restore.Restorer(step.saved, step.input) if found is not None else None
        if config.nan_policy == 'rollback':
            self._back = restore.Restorer({name: variable for name, variable in step.saved.items() if name != COUNTER})
            # Copies follow by `sync`; other local variables count what the process did, which does not go back.
            with tf.name_scope('restore/'):
                self._anew = tf.group(*[variable.initializer for name, variable in step.saved.items() if name != COUNTER], name='anew')

    def start(self, raw: tf.Session) -> None:
        """Sets a new session's variables and input; variables that the tasks of a cluster hold stay where they can."""
        devices.check_devices(raw, self._made.placement)
        kept = None if self._made.noted is None else keeping.kept(raw, self._made, self._config, self._claim)
        if kept is None:
            self._void(raw)
        raw.run(self._made.init if kept is None else self._made.beside)
        raw.run(self._made.step.input.initializer)
        positions.require(raw, self._made.step.input)
        if kept is not None:
            self._go_on(raw, kept)
        else:
            self._set(raw)
        raw.run(self._made.step.sync)
        self._settle(raw, kept)

    def _set(self, raw: tf.Session) -> None:
        """Sets the variables, which have their initial values, and the input to where the run begins or was left."""
        if self._warm is not None:
            self._warm.load(raw)
        if self._restorer is not None and self._claim.found is not None:
            self._restorer.restore(raw, self._claim.found)
            logging.info('Going on from %s at step %d.', self._claim.found.prefix, self._claim.found.step)

    def _go_on(self, raw: tf.Session, point: standing.Point) -> None:
        """Brings counters and input to where the variables stand."""
        assert self._made.noted is not None
        self._made.noted.count(raw, point)
        source, problem = self._made.step.input, None
        if self._restorer is not None and self._claim.found is not None:
            problem = self._restorer.move_input(raw, self._claim.found, point.taken)
        elif source.go_to is not None:
            source.go_to(raw, point.taken, None)
        else:
            problem = 'exact resume is off'
        if problem is not None:
            raw.run(source.initializer)
            logging.warning('The input starts at the beginning of an epoch, not where step %d left it: %s.', point.step, problem)

    def _void(self, raw: tf.Session) -> None:
        if self._made.noted is not None:
            raw.run(self._made.noted.void)

    def _settle(self, raw: tf.Session, point: standing.Point | None = None) -> None:
        if self._made.noted is not None:
            self._made.noted.settle(raw, keeping.run_of(self._made, self._claim), None if point is None else point.report)

    def go_back(self, raw: tf.Session) -> int:
        """Sets the variables to those of the newest checkpoint, or as at the start where there is none; the input stays.

        Returns:
          The step gone back to.

        Raises:
          CheckpointError: there are checkpoints and none is whole.
        """
        found = manifest.newest(self._model_dir)
        self._void(raw)
        if found is not None:
            self._back.restore(raw, found)
        else:
            raw.run(self._anew)
            if self._warm is not None:
                self._warm.load(raw)
        raw.run(self._made.step.sync)
        self._settle(raw)
        return 0 if found is None else found.step
