"""A trainer that is killed, stopped for a while or doubled loses no more than the steps since the last checkpoint."""

import random
import signal
import time

import injected
import pytest
import small_run
import starter

from towers.checkpoint import manifest, restore

SAVING_MB = 60


@pytest.mark.parametrize(
    ('kills', 'how'),
    [
        (1, '--nosync_checkpoint'),
        pytest.param(20, '--nosync_checkpoint', marks=pytest.mark.soak),
        pytest.param(5, '--sync_checkpoint', marks=pytest.mark.soak),
    ],
)
def test_killed_at_random_while_it_saves(training, kills, how):
    chance = random.Random(kills)
    training.megabytes = SAVING_MB
    for number in range(kills):
        command = training.start(how)
        command.wait_for('Saved checkpoint')
        time.sleep(chance.uniform(0.0, 1.0))
        command.send(signal.SIGKILL)
        assert command.wait() == injected.KILLED
        said = training.goes_on(f'kill {number + 1} while saving {SAVING_MB} MB {how}', command, how)
        assert 'is gone without having given it back: taken over' in said


def test_stopped_for_a_while_and_continued(training):
    command = training.start('--step_timeout_secs=2')
    command.wait_for('\nstep 3/')
    command.send(signal.SIGSTOP)
    time.sleep(4.0)  # longer than a step may take
    made = training.last_made()
    command.send(signal.SIGCONT)
    start = time.monotonic()
    starter.wait_for(lambda: training.last_made() > made + 3 or command.code() is not None)
    secs = time.monotonic() - start
    said = injected.check_stopped(command)
    assert len(set(training.published())) and training.published()[-1] == training.last_made()
    assert training.strays() == [] and 'Traceback' not in said
    injected.show('SIGSTOP for 4 s, SIGCONT', command.code(), made, 0, secs, [])


def test_a_second_trainer_is_refused_and_the_first_goes_on(training):
    first = training.start()
    first.wait_for('\nstep 3/')
    start = time.monotonic()
    second = training.start(place='second')
    assert second.wait() == injected.MISUSED
    secs = time.monotonic() - start
    said = second.text()
    assert f'process {first.pid}' in said and 'is being trained by' in said and 'Traceback' not in said
    made = training.last_made()
    starter.wait_for(lambda: training.last_made() > made)
    injected.check_stopped(first)
    assert training.strays() == [] and training.published()[-1] == training.last_made()
    injected.show('second trainer (refused)', second.code(), made, 0, secs, [])


@pytest.mark.parametrize('secs', [2, pytest.param(8, marks=pytest.mark.soak)])
def test_restoring_without_pause_from_the_only_checkpoint_that_is_kept(training, tmp_path, secs):
    command = training.command('trainer', small_run.__file__, training.run, 4, 1)
    reads = set()
    with small_run.started(tmp_path / 'unused', size=4 * 2**17) as run:
        starter.wait_for(lambda: manifest.all(str(training.run)))
        reader, end = manifest.Reader(str(training.run)), time.monotonic() + secs
        while time.monotonic() < end:
            found, _ = restore.retrying(str(training.run), lambda found: run.restorer.restore(run.session, found), reader=reader)
            values = run.values()
            assert {values['a'].min(), values['a'].max(), values['b'].min(), values['b'].max(), values['step']} == {found.step}
            reads.add(found.step)
    assert command.code() is None, command.text()
    command.send(signal.SIGKILL)
    command.wait()
    assert len(reads) > 3
    injected.show(f'{len(reads)} checkpoints restored in {secs} s, keep=1', '-', max(reads), 0, 0.0, [])


@pytest.mark.parametrize('secs', [pytest.param(8, marks=pytest.mark.soak)])
def test_an_evaluator_of_the_only_checkpoint_that_is_kept(training, secs):
    training.megabytes = 10
    trainer = training.start('--keep_checkpoints=1', f'--train_secs={secs}')
    trainer.wait_for('Saved checkpoint')
    evaluator = training.follow()
    assert trainer.wait() == injected.DONE, trainer.text()
    start = time.monotonic()
    assert evaluator.wait() == injected.DONE, evaluator.text()
    said, last = evaluator.text(), training.last_made()
    published = training.published()  # one that was being read at the end stays
    assert published[-1] == last and len(published) <= 2 and f'Evaluated ckpt-{last}' in said and 'Traceback' not in said
    count = said.count('Evaluated ckpt-')
    injected.show(
        f'evaluator of {count} checkpoints in {secs} s, keep=1', evaluator.code(), last, 0, time.monotonic() - start, training.strays()
    )
