"""A run directory is taken, gone on from, set aside and agreed on."""

import dataclasses
import json
import os
import threading

import harness
import pytest
import runs
import small_run
import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint import manifest
from towers.directory import lock, run_directory

STOP = threading.Event()
EXAMPLES = [1.0, 2.0, 3.0, 4.0]


def model(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 0.0)))


def config(model_dir, **changes):
    settings = {'train_steps': 3, 'global_batch_size': 4, 'save_steps': 1, 'log_steps': 1, 'model_dir': str(model_dir), **changes}
    return harness.config(**settings)


def train(model_dir, **changes):
    return towers.train(model, numbers, config(model_dir, **changes))


def numbers():
    return harness.numbers(*EXAMPLES)()


def names(folder):
    return sorted(os.listdir(folder))


def fill(model_dir, *steps):
    """A run's files, each with its name as content, and what somebody else put there."""
    for step in steps:
        runs.publish(model_dir, step, w=float(step))
    for name in ('checkpoint', 'config.json', 'flags.txt', 'metrics.jsonl', 'events.out.tfevents.1.vm', 'notes.txt', 'ckpt-notes'):
        (model_dir / name).write_text(name)
    for folder in ('eval', 'export', 'sessions'):
        (model_dir / folder).mkdir()
        (model_dir / folder / 'file').write_text(folder)


OTHERS = ['ckpt-notes', 'export', 'notes.txt', 'sessions']


def test_what_a_run_wrote_is_set_aside_whole_and_what_others_wrote_stays(tmp_path, caplog):
    fill(tmp_path, 1, 2)
    before = names(tmp_path)
    assert run_directory.set_aside(str(tmp_path)) == str(tmp_path / 'old-1')
    assert names(tmp_path) == sorted([*OTHERS, 'old-1'])
    assert names(tmp_path / 'old-1') == [name for name in before if name not in OTHERS]
    assert manifest.newest(str(tmp_path / 'old-1')).step == 2
    assert (tmp_path / 'old-1' / 'eval' / 'file').read_text() == 'eval'
    assert 'To go on with the new run, leave --from_scratch out.' in caplog.text


def test_each_run_set_aside_has_a_folder_of_its_own(tmp_path):
    assert run_directory.set_aside(str(tmp_path)) is None
    for number in (1, 2, 3):
        runs.publish(tmp_path, 1, w=float(number))
        assert run_directory.set_aside(str(tmp_path)) == str(tmp_path / f'old-{number}')
    assert run_directory.set_aside(str(tmp_path)) is None
    assert names(tmp_path) == ['old-1', 'old-2', 'old-3']


class Killed(BaseException):
    """Stands for the end of the process between two system calls."""


def killed_at(monkeypatch, call, count):
    """Ends the program at the `count`-th use of an os function; False where it is not used as often."""
    original, left = getattr(os, call), [count]

    def counted(*args, **settings):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return original(*args, **settings)

    monkeypatch.setattr(os, call, counted)
    return left


def claim(model_dir, **settings):
    with run_directory.claimed(config(model_dir, **settings), STOP) as claimed:
        return claimed.found and claimed.found.step


@pytest.mark.parametrize('moves', range(9))
def test_a_move_that_was_killed_is_undone_or_gone_on_with(tmp_path, moves, caplog):
    for folder in ('undone', 'done'):
        (tmp_path / folder).mkdir()
        fill(tmp_path / folder, 1, 2)
        before = names(tmp_path / folder)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            killed_at(patch, 'rename', moves)
            run_directory.set_aside(str(tmp_path / folder))
    assert claim(tmp_path / 'undone') == 2
    assert [name for name in names(tmp_path / 'undone') if name != 'sessions'] == [name for name in before if name != 'sessions']
    assert 'Setting aside was not finished' in caplog.text
    assert claim(tmp_path / 'done', from_scratch=True) is None
    assert names(tmp_path / 'done') == sorted([*OTHERS, 'old-1'])
    assert manifest.newest(str(tmp_path / 'done' / 'old-1')).step == 2


def test_from_scratch_starts_anew_beside_what_was_there(tmp_path):
    train(tmp_path)
    result = train(tmp_path, from_scratch=True, train_steps=2)
    assert (result.step, result.steps_run) == (2, 2)
    assert manifest.newest(str(tmp_path / 'old-1')).step == 3
    assert [json.loads(line)['step'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()] == [1, 2]
    assert train(tmp_path).steps_run == 1  # the new run is the one to go on with


def test_from_scratch_is_a_way_out_where_no_checkpoint_is_whole(tmp_path):
    train(tmp_path)
    for name in names(tmp_path):
        if name.endswith('.index'):
            os.truncate(tmp_path / name, 0)
    with pytest.raises(manifest.CheckpointError, match='with --from_scratch, which moves them to old-'):
        train(tmp_path)
    assert train(tmp_path, from_scratch=True).steps_run == 3


def test_a_run_directory_is_one_trainers(tmp_path):
    with lock.WriterLock(str(tmp_path)), pytest.raises(ValueError, match='is being trained by process'):
        train(tmp_path)
    assert names(tmp_path) == ['sessions']
    assert train(tmp_path).steps_run == 3


def test_a_resume_under_other_terms_changes_nothing(tmp_path):
    train(tmp_path, train_steps=2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for change in ({'learning_rate': 0.5}, {'global_batch_size': 2}, {'allow_changed': ('rate',)}):
        with pytest.raises(ValueError, match='--allow_changed='):
            train(tmp_path, **change)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_change_is_accepted_once_and_is_the_rule_from_then_on(tmp_path):
    train(tmp_path, train_steps=2)
    assert train(tmp_path, learning_rate=0.5, allow_changed=('learning_rate',)).steps_run == 1
    assert train(tmp_path, learning_rate=0.5, train_steps=4).steps_run == 1
    with pytest.raises(ValueError, match='learning_rate was 0.5, is 1.0'):
        train(tmp_path, train_steps=5)
    terms = json.loads((tmp_path / 'config.json').read_text())['semantics']
    assert terms == manifest.newest(str(tmp_path)).manifest.semantics
    assert terms['model'] == 'test_run_directory:model' and terms['learning_rate'] == 0.5


def test_another_number_of_towers_and_another_strategy_go_on(tmp_path):
    train(tmp_path, train_steps=1)
    assert train(tmp_path, n=2, strategy='mirrored', train_steps=2).steps_run == 1
    assert train(tmp_path, n=4, input_pipeline='sharded').steps_run == 1


class TakeOver(tf.train.SessionRunHook):
    """Another trainer takes the run directory over after a step, as one on another machine may."""

    def __init__(self, model_dir, step):
        self._model_dir, self._step, self._made = str(model_dir), step, 0

    def after_run(self, run_context, run_values):
        self._made += 1
        if self._made == self._step:
            os.rename(
                os.path.join(self._model_dir, 'sessions', 'writer-1.json'), os.path.join(self._model_dir, 'sessions', 'writer-2.json')
            )


@pytest.mark.parametrize('settings', [{}, {'sync_checkpoint': True}, {'save_steps': 0}])
def test_a_trainer_that_lost_its_lock_writes_nothing_more(tmp_path, settings, monkeypatch):
    monkeypatch.setattr('towers.hooks.guard._EVERY_SECS', 0.0)
    changed = config(tmp_path, train_steps=20, keep_checkpoints=1, **settings)
    with pytest.raises(lock.LockError, match='was taken over by process .* stops and writes nothing more'):
        towers.train(model, numbers, changed, hooks=[TakeOver(tmp_path, 5)])
    steps = [json.loads(line)['step'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]  # the step in which it happened was reported before the next look
    assert max((found.step for found in manifest.all(str(tmp_path))), default=0) <= 5
    assert names(tmp_path / 'sessions') == ['writer-2.json']
    assert not any(found.manifest.final for found in manifest.all(str(tmp_path)))


def test_the_last_save_is_not_made_without_the_lock(tmp_path):
    with pytest.raises(lock.LockError, match='was taken over'):
        towers.train(model, numbers, config(tmp_path, save_steps=0), hooks=[TakeOver(tmp_path, 3)])
    assert manifest.all(str(tmp_path)) == []


def test_the_best_checkpoint_stays_through_restarts(tmp_path):
    def publish(step, accuracy):
        settings = {'keep_checkpoints': 1, 'keep_best': 'accuracy', 'train_steps': step}
        train(tmp_path, **settings)
        found = manifest.newest(str(tmp_path))
        (tmp_path / 'eval' / 'test').mkdir(parents=True, exist_ok=True)
        with open(tmp_path / 'eval' / 'test' / 'results.jsonl', 'a') as file:
            file.write(json.dumps({'step': found.step, 'accuracy': accuracy, 'saved': found.manifest.time}) + '\n')

    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8)):
        publish(step, accuracy)
    assert [found.step for found in manifest.all(str(tmp_path))] == [2, 4]
    assert tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths == [str(tmp_path / f'ckpt-{step}') for step in (2, 4)]


@pytest.mark.parametrize('sync', [True, False])
@pytest.mark.parametrize(('moment', 'left'), [('ckpt-2.tmp.index', [1]), ('ckpt-2.json', [1, 2]), ('taken', [2])])
def test_a_saver_asks_before_each_change(tmp_path, sync, moment, left):
    """The directory is another trainer's from the moment that a file is there: nothing in it changes from then on."""
    folder, seen = tmp_path / 'run', []

    def state():
        return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    def guard():
        if (folder / moment).exists():
            seen.append(state())
            raise lock.LockError('taken over')

    with small_run.started(folder, keep_checkpoints=1, sync_checkpoint=sync) as run:
        run.saver._facts = dataclasses.replace(run.saver._facts, guard=guard)
        with pytest.raises(lock.LockError):
            for step in (1, 2, 3):
                if step == 3:
                    (folder / 'taken').touch()  # between two saves
                    seen.append(state())
                run.steps()
                run.save()
    assert [found.step for found in manifest.all(str(folder))] == left
    assert seen[0] == state()


@pytest.mark.parametrize(('damage', 'told'), [(b'', True), (b'\0\1 not a state', True), (None, True), ('as it was', False)], ids=str)
def test_a_bad_pointer_file_is_told_and_made_anew(damage, told, tmp_path, caplog):
    train(tmp_path)
    path = tmp_path / 'checkpoint'
    whole = path.read_bytes()
    if damage is None:
        path.unlink()
    elif damage != 'as it was':
        path.write_bytes(damage)
    with caplog.at_level('WARNING'):
        assert train(tmp_path, train_steps=4).steps_run == 1
    assert ('is gone or damaged; the manifests tell the checkpoints' in caplog.text) == told
    assert path.read_bytes() != whole and b'"ckpt-4"' in path.read_bytes()
