"""Whether a new session goes on with the variables that the tasks of a cluster still hold, or with the newest checkpoint."""

import json
import time

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers.directory import meaning, run_directory
from towers.graph import standing
from towers.jobs import program

_SETTLE_SECS = 3.0  # for an update that was under way in the tasks when its session was lost
_LOOK_SECS = 0.2


def kept(session: tf.Session, made: program.Program, config: config_lib.Config, claim: run_directory.Claim) -> standing.Point | None:
    """Takes the variables over from whatever session had them, and says where they stand if they can be gone on with.

    They can where all are there and written whole, are of this run under the same facts, and the newest checkpoint is not
    further. The log says what was found; nothing is said of tasks that hold nothing yet.

    Args:
      session: a new one.
      made: its program, which has notes.
      config: `allow_changed`.
      claim: the run, its facts and the newest checkpoint.

    Returns:
      Where the run goes on; None = all variables are to be set anew.
    """
    noted, stands = made.noted, found(session, made, config, claim)
    assert noted is not None
    if stands is None:
        return None
    checkpoint = 'without any checkpoint' if claim.found is None else f'with the newest checkpoint at step {claim.found.step}'
    if isinstance(stands, standing.Point):
        logging.warning(
            'The variables in the memory of %s are whole: going on with them at step %d, %s.', _names(noted), stands.step, checkpoint
        )
        return stands
    instead = 'the start' if claim.found is None else f'checkpoint {claim.found.step}'
    logging.warning('The variables in the memory of %s are not gone on with: %s. Going on from %s.', _names(noted), stands, instead)
    return None


def found(session: tf.Session, made: program.Program, config: config_lib.Config, claim: run_directory.Claim) -> standing.Point | str | None:
    """As `kept`, but saying nothing: where the variables stand, or why they are not to be gone on with; None where nobody holds any."""
    assert made.noted is not None
    session.run(made.noted.claim)
    notes = _settled(session, made.noted)
    return _judged(notes, made, config, claim) if any(notes) else None


def run_of(made: program.Program, claim: run_directory.Claim) -> str:
    """What the notes say that the variables are of."""
    places = {name: [variable.dtype.base_dtype.name, str(variable.shape), variable.device] for name, variable in made.step.saved.items()}
    return json.dumps({'run': claim.run, 'facts': dict(claim.facts), 'variables': places}, sort_keys=True)


def _settled(session: tf.Session, noted: standing.Standing) -> list[standing.Note | None]:
    """The notes, once no update is under way, or when it has been waited for."""
    end = time.monotonic() + _SETTLE_SECS
    while True:
        notes = noted.read(session)
        there = [note for note in notes if note is not None]
        if len(there) < len(notes) or min(note.begun for note in there) < 0 or standing.whole(there) or time.monotonic() > end:
            return notes
        time.sleep(_LOOK_SECS)


def _judged(
    notes: list[standing.Note | None], made: program.Program, config: config_lib.Config, claim: run_directory.Claim
) -> standing.Point | str:
    """Where the variables stand, or why they are not gone on with."""
    assert made.noted is not None
    there = [note for note in notes if note is not None]
    if len(there) < len(notes):
        lost = ', '.join(device for device, note in zip(made.noted.devices, notes, strict=True) if note is None)
        return f'{lost} has none'
    problem = next(filter(None, (_other(note.run, run_of(made, claim), config) for note in there)), None) or _elsewhere(made)
    if problem:
        return problem
    point = standing.whole(there)
    if point is None:
        begun = max(note.begun for note in there)
        return f'the update to step {begun} was not written whole' if begun >= 0 else 'they were being set'
    if claim.found is not None and point.step < claim.found.step:
        return f'they are of step {point.step}'
    return point


def _other(noted: str, own: str, config: config_lib.Config) -> str | None:
    """Why variables can't be this program's; None = they are."""
    if noted == own:
        return None
    before, now = json.loads(noted), json.loads(own)
    if before['run'] != now['run']:
        return 'they are of another run'
    changed = [name for name in meaning.differing(now['facts'], before['facts']) if name not in config.allow_changed]
    if changed:
        return f'they were trained under another {", ".join(changed)}'
    return None if before['variables'] == now['variables'] else 'they are other ones, or in other places'


def _elsewhere(made: program.Program) -> str | None:
    """Which variables no notes are about; None = all but the counters, which the notes hold, are in tasks that have some."""
    assert made.noted is not None
    places = {name: standing.host(variable) for name, variable in made.step.saved.items() if variable.ref() not in made.noted.counted}
    missed = [f'{name} is on {place}' for name, place in places.items() if place not in made.noted.devices]
    return f'{missed[0]}, of which nothing is noted' if missed else None


def _names(noted: standing.Standing) -> str:
    return ', '.join(device.removesuffix('/cpu:0') for device in noted.devices)
