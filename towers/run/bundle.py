"""Bundles: a folder in the run directory with all that one bad step was made of. Part of the stage `flight`.

bundles/step-6/bundle.json              step, tower, what was found, config, types and shapes of the inputs
               batch.{index,data-*}     every tower's inputs, in TensorFlow's checkpoint format
               variables.{index,data-*} the model's variables before the step, by name
               config.json, flags.txt   copies of the run's
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.run import flight

FOLDER = 'bundles'
_MOST = 3  # in one run directory, since each is as large as the model
_FILE = 'bundle.json'
_FORMAT = 1
_OF_THE_RUN = ('config.json', 'flags.txt')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """What is known of one bad step.

    Attributes:
      folder: where it is.
      step: the global step that it would have been.
      tower: the first tower that was bad by itself; None where none was.
      facts: what was found when it happened, in words.
      config: the run's configuration.
      towers: for each tower its inputs' {'dtype', 'shape'}, flattened.
    """

    folder: str
    step: int
    tower: int | None
    facts: Sequence[str]
    config: Mapping[str, Any]
    towers: Sequence[Sequence[Mapping[str, Any]]]

    def values(self, name: str) -> Mapping[str, Any]:
        """The arrays of `flight.BATCH` or `flight.VARIABLES` by name.

        Raises:
          ValueError: they can't be read.
        """
        path = os.path.join(self.folder, name)
        try:
            reader = tf.train.load_checkpoint(path)
            return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
        except (tf.errors.OpError, RuntimeError, LookupError, ValueError) as error:  # TensorFlow's reader raises any of these
            reason = ' '.join(str(error).split())
            raise ValueError(f'{path} is damaged or not whole ({reason:.200}); expected it as the training wrote it.') from None


def read(folder: str) -> Bundle:
    """The bundle in a folder.

    Raises:
      ValueError: it is none, or of another version.
    """
    path = os.path.join(os.path.abspath(folder), _FILE)
    try:
        with open(path, encoding='utf-8') as file:
            found = json.load(file)
        if found.pop('format') != _FORMAT:
            raise ValueError('it is of another version')
        return Bundle(folder=os.path.dirname(path), **found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{folder} is no bundle of a bad step ({error}); expected a folder such as runs/mine/{FOLDER}/step-6.') from None


def explainer(recorder: flight.Recorder, config: config_lib.RunConfig) -> Callable[[tf.Session, int], str]:
    """A function (session, step) that looks into the step that was just held back, writes its bundle, and says all in words."""

    def explain(session: tf.Session, step: int) -> str:
        try:
            finding = recorder.find(session)
        except tf.errors.OpError as error:
            logging.warning('The step could not be made again: %s.', error.message.splitlines()[0])
            finding = flight.Finding(None, ('it could not be made again',))
        return f'Step {step} is not finite {finding}. {_kept(recorder, session, config, step, finding)}'

    return explain


def _kept(recorder: flight.Recorder, session: tf.Session, config: config_lib.RunConfig, step: int, finding: flight.Finding) -> str:
    folder = os.path.join(str(config.model_dir), FOLDER)
    try:
        path = _write(recorder, session, config, step, finding)
    except (OSError, tf.errors.OpError) as error:
        return f'Its bundle could not be written ({" ".join(str(error).split()):.200}).'
    if path is None:
        return f'No bundle was written: {folder} holds {_MOST} already; remove those you have seen.'
    return f'Its inputs and variables are in {path}: python scripts/replay.py {path} names the operation.'


def _write(recorder: flight.Recorder, session: tf.Session, config: config_lib.RunConfig, step: int, finding: flight.Finding) -> str | None:
    """Writes a bundle, whole or not at all; returns its path, None where there are enough."""
    run = str(config.model_dir)
    folder = os.path.join(run, FOLDER)
    os.makedirs(folder, exist_ok=True)
    there = [name for name in os.listdir(folder) if not name.endswith('.tmp')]
    if len(there) >= _MOST:
        return None
    name = next(name for name in (f'step-{step}', *[f'step-{step}-{again}' for again in range(2, _MOST + 2)]) if name not in there)
    path = os.path.join(folder, name)
    shutil.rmtree(path + '.tmp', ignore_errors=True)
    os.makedirs(path + '.tmp')
    recorder.write(session, path + '.tmp')
    facts = {'format': _FORMAT, 'step': step, 'tower': finding.tower, 'facts': finding.facts, 'config': dataclasses.asdict(config)}
    with open(os.path.join(path + '.tmp', _FILE), 'w', encoding='utf-8') as file:
        json.dump({**facts, **recorder.describe()}, file, indent=1)
    for source in _OF_THE_RUN:
        if os.path.exists(os.path.join(run, source)):
            shutil.copy(os.path.join(run, source), path + '.tmp')
    os.replace(path + '.tmp', path)
    return path
