"""Saving what the tasks of a cluster still hold, where a run is to end and not all of its machines are there.

The variables are in the memory of few tasks, mostly of the master's own. A graph of nothing but these variables and their notes, in a
session with those tasks alone, can save them: no tower, no input and no machine that holds nothing takes part. Nobody asks the input
for its position: the newest checkpoint's goes on being its position, with the place that the notes say to read on to.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.checkpoint import saver
from towers.directory import run_directory
from towers.graph import standing
from towers.hooks import scalars
from towers.jobs import connecting, keeping, program, recovering, starting
from towers.run import writers

_COUNTERS = ('global_step', 'examples_seen', starting.COUNTER)  # in the order of `standing.Point`


def save(made: program.Program, config: config_lib.Config, claim: run_directory.Claim, link: connecting.Link) -> recovering.Reached:
    """Saves the variables that a lost session has left, where they are whole and further than the newest checkpoint.

    The log says what was found; a problem of the session is no error here, one of the storage is.

    Args:
      made: the program that they are of.
      config: `model_dir` and checkpoints.
      claim: the run, as agreed for this program.
      link: to the tasks that hold them.

    Returns:
      Where the newest checkpoint stands.

    Raises:
      CheckpointError: it could not be written.
    """
    claim, loss = dataclasses.replace(claim, found=claim.newest()), float('nan')
    try:
        found = _saved(made, config, claim, link)
    except tf.errors.OpError as error:
        found = f'the tasks that hold the variables do not answer ({recovering.line(error)})'
    if isinstance(found, standing.Point):
        loss = found.report.get('loss', loss)
    else:
        instead = 'the start' if claim.found is None else f'checkpoint {claim.found.step}'
        logging.warning('Nothing is saved that is newer than %s: %s.', instead, found)
    return dataclasses.replace(recovering.start(claim.newest()), loss=loss, stopped_by='signal')


def _saved(made: program.Program, config: config_lib.Config, claim: run_directory.Claim, link: connecting.Link) -> standing.Point | str:
    """Where the variables stood that are saved now, or why they are not."""
    assert made.noted is not None
    with tf.Graph().as_default() as graph, tf.device(made.placement.parameter_device):
        alike, taken = _alike(made, graph)
        keeper = saver.Saver(
            alike.step.saved, alike.step.input, config=config, model_dir=str(config.model_dir), facts=saver.Facts(claim.facts, claim.check)
        )
        place = tf.placeholder(tf.int64, [None], 'place')
        take = tf.no_op() if taken is None else taken.assign(place, read_value=False)
        with link.session(graph, made.proto, made.noted.devices) as raw:
            point = keeping.found(raw, alike, config, claim)
            if not isinstance(point, standing.Point):
                return point or 'nothing is in the memory of the tasks that held the variables'
            if point.step == 0:
                return 'no step was made'
            if claim.found is not None and point.step == claim.found.step:
                return point
            logging.warning('The variables in memory are whole at step %d: saving them.', point.step)
            assert alike.noted is not None
            alike.noted.count(raw, point)
            raw.run(take, {place: point.taken})
            keeper.prepare(raw)
            keeper.rescue(lambda: True)  # no step is under way, and the input is never asked
    _report(point, str(config.model_dir), made.counts)
    return point


def _alike(made: program.Program, graph: tf.Graph) -> tuple[program.Program, tf.Variable | None]:
    """The program with its variables and notes alone, in the current graph, and the variable of the input's place."""
    assert made.noted is not None
    variables = {name: _again(variable) for name, variable in made.step.saved.items()}
    source, taken = made.step.input, None
    if source.taken is not None:
        shape = source.taken.shape.as_list()
        taken = tf.Variable(
            tf.zeros(shape, tf.int64), trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], name='leaving/taken', use_resource=True
        )
    position = None if source.position is None else tf.constant('', tf.string)
    source = dataclasses.replace(source, batches=(), taken=taken, position=position, mark=None, go_to=None, restore_position=None)
    report = {name: tf.zeros([]) for name in made.noted.names}
    noted = standing.of(list(variables.values()), [variables[name] for name in _COUNTERS], source, report)
    return dataclasses.replace(made, graph=graph, step=dataclasses.replace(made.step, saved=variables, input=source), noted=noted), taken


def _again(variable: tf.Variable) -> tf.Variable:
    """The same variable of the same server, in the current graph."""
    shape = variable.shape
    some = [size or 0 for size in shape.as_list()] if shape.rank is not None else []
    with tf.device(variable.device):
        made = tf.Variable(
            lambda: tf.zeros(some, variable.dtype.base_dtype), trainable=False, name=variable.op.name, use_resource=True, shape=shape
        )
    if made.op.name != variable.op.name:
        raise AssertionError(f'{variable.op.name} is {made.op.name} in a graph of its own')
    return made


def _report(point: standing.Point, model_dir: str, counts: Mapping[str, Any]) -> None:
    """Writes the row of the step where its own session did not live to do so."""
    reports = writers.Reports(model_dir)
    reports.counts.update(counts)
    if point.report and reports.rows.last_step() != point.step:
        values = {'step': point.step, 'examples_seen': point.examples, 'skipped': point.skipped, **point.report}
        scalars.put(values, reports.row, reports.scalars)
    reports.close()
