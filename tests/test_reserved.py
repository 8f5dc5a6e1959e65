"""The shares of a training's own evaluators are held while they start, and while one that crashed is started again."""

import contextlib
import functools
import json
import os
import signal

import pytest
import runs
import starter
import test_companion
import test_evaluation

from towers import identity
from towers.evaluators import supervisor
from towers.jobs import joining
from towers.sessions import admission, host, ledger, report

NUMBER = 6


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A ledger of the machine for each test."""
    (tmp_path / 'runtime').mkdir()
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path / 'runtime'))


def settings(folder, share=0.4, **changes):
    given = {'visible_gpus': (NUMBER,), 'eval_gpu_memory_fraction': share, 'evaluate': True, **changes}
    return runs.config(folder, **given)


@contextlib.contextmanager
def master(folder, **changes):
    """A training's place among the sessions, with its evaluator's."""
    config = settings(folder, gpu_memory_fraction=0.5, **changes)
    with joining.joined(config, joining.master(config, [config])) as (_, member):
        yield member


def states(folder):
    return [(row['role'], row['state'], row['share']) for row in report.rows(str(folder))]


def living(folder):
    return [state for state in states(folder) if state[1] != 'gone']


def stranger(share, **fields):
    """Whether a session of another process is admitted beside those that are there."""
    asked = ledger.Entry(role='master', gpus=(NUMBER,), share=share, pid=1, started=identity.start_of(1), **fields)
    others = ledger.pending([seen.entry for seen in ledger.read(host.folder()) if seen.lives])
    try:
        admission.admit(asked, others, admission.Machine(0))
    except admission.Refused as error:
        return str(error)
    return ''


MASTER, COMING, EVALUATOR = ('master', 'live', 0.5), ('evaluator', 'to come', 0.4), ('evaluator', 'live', 0.4)


def test_what_is_to_come_is_held_and_shown_until_it_is_given_up(tmp_path):
    run = tmp_path / 'run'
    with master(run) as member:
        for folder in (host.folder(), run / 'sessions'):
            assert states(folder) == [MASTER, COMING]
        cells = report.cells(report.rows(host.folder()))[2]
        assert (cells[:2], cells[5:8]) == (('evaluator test', 'to come'), ('0.40', '-', '-'))
        assert f'wants 0.30 of fake GPU {NUMBER}, of which 0.90 is held' in stranger(0.3)
        member.release('another')
        assert stranger(0.3)
        member.release('test')
        assert states(host.folder()) == states(run / 'sessions') == [MASTER] and not stranger(0.5)
    assert states(host.folder()) == states(run / 'sessions') == []


def test_one_that_is_there_stands_for_what_was_held_and_its_end_brings_it_back(tmp_path):
    with master(tmp_path) as member:
        fields = {'role': 'evaluator', 'name': 'test', 'model_dir': str(tmp_path), 'gpus': (NUMBER,), 'share': 0.4}
        theirs = ledger.Entry(**fields, pid=1, started=identity.start_of(1), parent=os.getpid())
        for other in (theirs, ledger.Entry(**{**fields, 'model_dir': '/other'}, pid=1, started=identity.start_of(1), parent=os.getpid())):
            ledger.write(host.folder(), other)
            shown = [MASTER, EVALUATOR] if other is theirs else [MASTER, COMING, EVALUATOR]
            assert sorted(states(host.folder())) == sorted(shown)
            ledger.remove(host.folder(), other)
        assert states(host.folder()) == [MASTER, COMING]
        assert member.entry.parent == os.getppid()


def test_a_killed_training_holds_nothing_for_its_evaluators(tmp_path):
    gone = ledger.Entry(role='evaluator', gpus=(NUMBER,), share=0.9, started=identity.start_of(os.getpid()) - 1, is_coming=True)
    ledger.write(host.folder(), gone)
    assert states(host.folder()) == [('evaluator', 'gone', 0.9)] and not stranger(1.0)
    assert ledger.sweep(host.folder()) == []


def test_a_process_of_an_evaluator_takes_what_is_held_for_it(tmp_path):
    test_evaluation.publish(tmp_path, 3)
    place = tmp_path / 'reached'
    config = settings(tmp_path)
    with master(tmp_path) as member:
        beside = supervisor.Evaluator(config, functools.partial(test_companion.waiting, str(place)))
        with supervisor.Supervisor(test_evaluation.scaled, [beside], member.release):
            while not place.exists():  # never a moment in which its share is another's
                assert stranger(0.2)
            assert living(host.folder()) == [MASTER, EVALUATOR]
            [child] = [row['pid'] for row in report.rows(host.folder()) if row['role'] == 'evaluator']
            place.unlink()
            os.kill(child, signal.SIGKILL)
            while not place.exists():
                assert stranger(0.2)
            assert living(host.folder()) == [MASTER, EVALUATOR]
        assert living(host.folder()) == [MASTER]


def test_an_evaluator_that_is_refused_tries_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, '_FIRST_DELAY_SECS', 0.01)
    said = []
    monkeypatch.setattr(supervisor.logging, 'warning', lambda text, *args: said.append(text % args))
    test_evaluation.publish(tmp_path, 3)
    blocking = ledger.Entry(role='master', gpus=(NUMBER,), share=0.9)
    ledger.write(host.folder(), blocking)  # as of a session that does not see this ledger's lock
    beside = supervisor.Evaluator(settings(tmp_path), test_companion.numbers)
    with supervisor.Supervisor(test_evaluation.scaled, [beside]) as running:
        starter.wait_for(lambda: said)
        assert said[0].startswith('The evaluator test ended with 1; again in 0.01 s (1 of at most 5)')
        ledger.remove(host.folder(), blocking)
        assert running.wait(starter.LIMIT_SECS)['test']['step'] == 3
    assert not [text for text in said if 'failed' in text]


def test_a_refusal_without_an_end_is_given_up_and_its_share_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, '_FIRST_DELAY_SECS', 0.01)
    over = []
    ledger.write(host.folder(), ledger.Entry(role='master', gpus=(NUMBER,), share=0.9))
    beside = supervisor.Evaluator(settings(tmp_path, eval_restarts=1), test_companion.numbers)
    with supervisor.Supervisor(test_evaluation.scaled, [beside], over.append):
        starter.wait_for(lambda: over)
    assert over == ['test']


@pytest.fixture
def commands():
    made = starter.Starter()
    yield made
    made.close()


def test_a_later_training_is_refused_while_the_evaluators_of_an_earlier_one_start(commands, tmp_path):
    train = starter.ROOT / 'scripts/train.py'
    common = ['--model=mlp', '--device=cpu', f'--visible_gpus={NUMBER}', '--log_steps=1000']
    own = ['--gpu_memory_fraction=0.5', '--evaluator=x:device=cpu,gpu_memory_fraction=0.4', '--eval_max_slowdown=1', '--train_secs=5']
    first = commands.start(tmp_path / 'first', train, *common, *own, '--train_steps=1000000', f'--model_dir={tmp_path / "run"}')
    starter.wait_for(lambda: ledger.read(host.folder()))
    found = ledger.read(host.folder())
    assert [seen.entry.role for seen in found if not seen.entry.is_coming] == ['master'] and found[0].entry.pid == first.pid
    second = commands.start(tmp_path / 'second', train, *common, '--gpu_memory_fraction=0.3', '--train_steps=1')
    assert second.wait() == 2, second.text()
    assert 'wants 0.30 of fake GPU 6, of which 0.90 is held and 0.10 free' in second.text() and 'evaluator x' in second.text()
    assert f'or wait for the end of {first.pid}.' in second.text()
    assert first.wait() == 0, first.text()
    [row] = (tmp_path / 'run/eval/x/results.jsonl').read_text().splitlines()[-1:]
    assert 'accuracy' in json.loads(row)
    assert ledger.read(host.folder()) == []
