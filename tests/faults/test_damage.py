"""Damaged run directories: a training goes on from the newest good checkpoint, says what was wrong, and never starts anew in silence."""

import itertools
import os
import random
import shutil

import injected
import pytest
import test_checkpoint_faults as damages

STEPS = 3
POINTERS = {'empty': '', 'garbage': '\0\1 not a state', 'other folder': 'model_checkpoint_path: "/nowhere/ckpt-9"\n', 'gone': None}
EACH = [(damage, ending) for damage in (damages.delete, damages.cut, damages.empty, damages.flip) for ending in damages.ENDINGS]
SHORT = {(damages.flip, 'data-00000-of-00001')}
PAIRS = random.Random(1).sample(list(itertools.product(EACH, EACH)), 12)


@pytest.fixture(scope='module')
def good(commands, tmp_path_factory):
    """A folder with a run of three steps, stopped before its end, and three checkpoints."""
    training = injected.Training(commands, tmp_path_factory.mktemp('good'))
    training.trained(STEPS, '--sync_checkpoint')
    assert training.published() == [1, 2, 3] and training.strays() == []
    return training


@pytest.fixture
def damaged(training, good):
    """A training in a copy of it."""
    shutil.copytree(good.run, training.run)
    return training


def name_of(pair):
    return '-'.join(part if isinstance(part, str) else part.__name__ for part in pair)


@pytest.mark.parametrize('each', [pytest.param(each, marks=() if each in SHORT else pytest.mark.soak) for each in EACH], ids=name_of)
def test_one_damage(damaged, good, each):
    damage, ending = each
    damage(damaged.run / f'ckpt-3.{ending}')
    said = check_passed_over(damaged, [3], f'{damage.__name__} {ending}', good)
    if damage is not damages.delete:
        assert ending in said


@pytest.mark.soak
@pytest.mark.parametrize('pair', PAIRS, ids=lambda pair: '+'.join(map(name_of, pair)))
def test_two_damages_of_two_checkpoints(damaged, good, pair):
    for step, (damage, ending) in zip((3, 2), pair, strict=True):
        damage(damaged.run / f'ckpt-{step}.{ending}')
    check_passed_over(damaged, [3, 2], ' and '.join(map(name_of, pair)), good)


def check_passed_over(training, steps, fault, good):
    newest = max({1, 2, 3} - set(steps))
    # Files whose manifest is damaged may be all that somebody has of them: they stay, unless the step is saved anew.
    may_stay = [name for name in os.listdir(training.run) if name.startswith(tuple(f'ckpt-{step}.' for step in steps))]
    said = training.goes_on(fault, good.last, strays=may_stay)
    for step in steps:
        assert f'ckpt-{step} is not whole and is passed over: ' in said
    assert f'ckpt-{newest} at step' in said
    return said


@pytest.mark.parametrize('pointer', [pytest.param(name, marks=() if name == 'garbage' else pytest.mark.soak) for name in POINTERS])
def test_tensorflows_own_pointer_is_not_needed(damaged, good, pointer):
    path = damaged.run / 'checkpoint'
    if POINTERS[pointer] is None:
        path.unlink()
    else:
        path.write_text(POINTERS[pointer])
    damaged.goes_on(f'checkpoint file {pointer}', good.last)
    assert f'ckpt-{damaged.published()[-1]}"' in path.read_text().splitlines()[0]


@pytest.mark.soak
def test_a_run_directory_that_was_moved(damaged, good):
    os.rename(damaged.run, damaged.folder / 'elsewhere')
    damaged.goes_on('run directory moved', good.last, run='elsewhere')


def test_all_are_bad(damaged):
    for step, ending in zip((1, 2, 3), damages.ENDINGS, strict=True):
        damages.cut(damaged.run / f'ckpt-{step}.{ending}')
    before = {name: (damaged.run / name).stat().st_size for name in os.listdir(damaged.run) if name.startswith('ckpt')}
    command = damaged.start()
    assert command.wait() == injected.FAILED
    said = command.text()
    assert 'None of 3 checkpoints' in said and 'nothing was deleted' in said and '--from_scratch' in said and 'Traceback' not in said
    assert {name: (damaged.run / name).stat().st_size for name in os.listdir(damaged.run) if name.startswith('ckpt')} == before
    injected.show('all checkpoints cut', command.code(), 3, 0, 0.0, [])
