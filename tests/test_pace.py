"""How much an evaluator works beside a training: a law of simulated speeds, and one real training."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import runs
import starter
import tensorflow.compat.v1 as tf

import towers
from models.data import digits
from scripts import models
from towers import identity, structs
from towers.evaluators import evaluation, pace
from towers.sessions import ledger, membership


@dataclasses.dataclass
class World:
    """A training and an evaluator beside it, in simulated time.

    Attributes:
      rate: steps per second of the training alone.
      cost: part of it that is lost while the evaluator works.
      batch: seconds of one batch of the evaluation.
      rows: steps between two points that the evaluator sees.
      noise: spread of the training's speed.
    """

    rate: float = 200.0
    cost: float = 0.3
    batch: float = 0.05
    rows: int = 20
    noise: float = 0.0

    def __post_init__(self):
        self.now, self.steps, self.point, self.worked = 1000.0, 0.0, None, 0.0
        self.random = np.random.default_rng(5)

    def passes(self, secs, part):
        """Time goes by, of which the evaluator works a part."""
        speed = self.rate * (1 - self.cost * part) * max(0.1, self.random.normal(1, self.noise))
        before, self.steps = self.steps, self.steps + secs * speed
        last = self.steps // self.rows * self.rows
        if last > before // self.rows * self.rows:
            self.point = pace.Point(self.now + secs * (last - before) / (self.steps - before), int(last))
        self.now, self.worked = self.now + secs, self.worked + secs * part

    def run(self, asked, secs, *, batches=0):
        """Runs so long; returns (part of its speed that the training lost, part of the time that the evaluator worked).

        Args:
          asked: the evaluator's Pace.
          secs: simulated ones.
          batches: in one evaluation, after which the next one begins; 0 = there is but one.
        """
        began, steps, worked, busy, left_over = self.now, self.steps, self.worked, 0.0, batches
        while self.now - began < secs:
            if busy and batches:
                left_over -= 1
                if not left_over:
                    left_over = batches
                    self.passes(0.1, 0.0)
                    asked.begin(self.now)
            left = asked.wait(self.now, busy, self.point)
            busy = 0.0 if left else self.batch
            self.passes(left or self.batch, 0.0 if left else 1.0)
        span = self.now - began
        return 1 - (self.steps - steps) / span / self.rate, (self.worked - worked) / span


def begun(limit, world, cost=1.0):
    made = pace.Pace(limit, cost)
    made.begin(world.now)
    return made


CASES = [
    World(cost=cost, **given)
    for cost in (0.02, 0.3, 1.0)
    for given in ({}, {'batch': 2.0}, {'batch': 0.03, 'rows': 100}, {'rate': 3000.0, 'batch': 0.2}, {'rate': 10.0, 'rows': 5})
]


@pytest.mark.parametrize('limit', [0.03, 0.1, 0.3])
@pytest.mark.parametrize('case', range(len(CASES)))
def test_the_training_loses_no_more_than_the_limit_and_the_evaluator_not_much_more_than_it_must(case, limit):
    world = dataclasses.replace(CASES[case])
    asked = begun(limit, world)
    world.run(asked, 300)
    lost, worked = world.run(asked, 700)
    assert lost <= limit * 1.05
    possible = min(1.0, limit / world.cost)
    assert worked >= 0.45 * possible  # pauses in which the training is measured, doubt, and the margin take their part


@pytest.mark.parametrize('noise', [0.02, 0.1])
@pytest.mark.parametrize('cost', [0.1, 0.4])
def test_it_holds_for_a_training_of_changing_speed(cost, noise):
    world = World(cost=cost, noise=noise)
    asked = begun(0.1, world)
    lost, worked = world.run(asked, 1500)
    assert lost <= 0.1 + noise / 2 and worked > 0.05


def test_before_anything_is_known_work_is_taken_to_cost_everything():
    world = World(rate=200.0, cost=1.0)
    lost, _ = world.run(begun(0.1, world), 30)
    assert lost < 0.12


@pytest.mark.parametrize('cost', [0.05, 0.4, 1.0])
@pytest.mark.parametrize('believed', [1 / 16, 0.5, 1.0])
def test_what_is_believed_says_how_much_is_worked_at_first_and_is_forgotten(believed, cost):
    world = World(cost=cost)
    asked = begun(0.05, world, believed)
    assert asked.share == pytest.approx(0.04 / believed)
    world.run(asked, 300)
    lost, worked = world.run(asked, 700)
    assert lost <= 0.05 * 1.05 and worked >= 0.45 * min(1.0, 0.05 / cost)


@pytest.mark.parametrize('batches', [1, 3])
def test_evaluations_that_follow_one_another_are_measured_as_one(batches):
    world = World(cost=0.3)
    asked = begun(0.05, world)
    world.run(asked, 300, batches=batches)
    lost, worked = world.run(asked, 700, batches=batches)
    assert asked.measured == 10 and lost <= 0.05 * 1.05 and worked >= 0.45 * 0.05 / 0.3


def test_an_evaluation_begins_behind_the_pause_that_the_last_batch_of_another_is_followed_by():
    world = World(cost=1.0)
    asked = begun(0.1, world)
    world.run(asked, 100)
    while asked.wait(world.now, 0.0, world.point):
        world.passes(0.1, 0.0)
    world.passes(8.0, 1.0)
    assert asked.wait(world.now, 8.0, world.point) > 0
    began = world.now
    world.passes(10.0, 0.0)
    asked.begin(world.now)
    while asked.wait(world.now, 0.0, world.point):
        world.passes(0.1, 0.0)
    assert world.now - began > 60


def test_a_training_that_became_slower_between_two_evaluations_has_not_lost_that_to_the_second():
    world = World(cost=0.3)
    asked = begun(0.1, world)
    world.run(asked, 30)
    share, measured = asked.share, asked.measured
    world.passes(1000.0, 0.0)
    world.rate /= 2
    asked.begin(world.now)
    world.run(asked, 20)
    assert asked.measured > measured and asked.share == pytest.approx(share, rel=0.2)


@pytest.mark.parametrize('rate', [0.02, 200.0])
def test_a_first_batch_waits_for_nothing(rate):
    world = World(rate=rate)
    assert begun(0.05, world).wait(world.now, 0.0, world.point) == 0


@pytest.mark.parametrize('rate', [0.0, 0.02])
def test_a_training_that_can_not_be_measured_leaves_the_share_as_it_is_and_the_evaluator_goes_on(rate):
    world = World(rate=max(rate, 1e-9), cost=1.0)
    asked = begun(0.1, world)
    _, worked = world.run(asked, 1500)
    assert asked.share == pytest.approx(0.08) and asked.measured == 0 and 0.03 < worked < 0.09


def test_a_clock_that_goes_back_is_not_waited_for():
    world = World()
    asked = begun(0.1, world)
    world.run(asked, 100)
    world.now -= 10**6
    world.point = None
    _, worked = world.run(asked, 1000)
    assert worked > 0.05


def test_a_row_that_is_whole_says_when_it_was_written(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    assert pace.newest_row(str(path)) is None
    path.write_text('{"step": 7}\n')
    os.utime(path, (50, 50))
    assert pace.newest_row(str(path)) == (50.0, 7)
    for text in ('', '{"step": 9', 'no row\n', '{"loss": 1}\n', '[]\n'):
        path.write_text(text)
        assert pace.newest_row(str(path)) is None
    path.write_text('{"step": 9}\n{"step": 10, "l')
    assert pace.newest_row(str(path)).step == 9


OWN, OTHER = ({'pid': pid, 'started': identity.start_of(pid)} for pid in (os.getpid(), os.getppid()))  # processes that live


def register(tmp_path, **fields):
    """Writes the entry of a session that lives, of another process unless `fields` say which."""
    folder = tmp_path / membership.FOLDER
    folder.mkdir(exist_ok=True)
    ledger.write(str(folder), ledger.Entry(**{**OTHER, **fields}))


def waits(yielder):
    """Whether a Yielder waits behind a first batch, so long that a signal comes; not before it."""
    stop = threading.Event()
    yielder.begin()
    yielder.between(stop)
    time.sleep(0.1)  # the batch
    ending = threading.Timer(0.2, stop.set)
    ending.start()
    yielder.between(stop)
    ending.cancel()
    return stop.is_set()


@pytest.mark.parametrize('changes', [{'role': 'evaluator'}, {'machine': 'another'}, {'pid': 2**22 - 5, 'started': 1}, OWN])
def test_who_has_no_training_beside_it_does_not_wait(tmp_path, changes):
    register(tmp_path, **{'role': 'master', 'step': 4, **changes})
    assert not waits(pace.Yielder(str(tmp_path), 0.1))


def test_a_signal_ends_the_wait_which_is_told_of_once(tmp_path, caplog):
    register(tmp_path, role='master', step=4)
    with caplog.at_level('INFO', 'absl'):
        yielder = pace.Yielder(str(tmp_path), 0.1)
        assert waits(yielder) and waits(yielder)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and str(tmp_path) in told[0] and '--eval_max_slowdown=0.1' in told[0] and 'works 8 %' in told[0]


@pytest.mark.parametrize(('row', 'waited'), [(None, False), (7, False), (8, True)])
def test_a_training_that_is_done_is_not_waited_for_and_one_that_goes_on_is(tmp_path, row, waited):
    register(tmp_path, role='master')
    runs.publish(tmp_path, 5)
    assert waits(pace.Yielder(str(tmp_path), 0.1))
    runs.publish(tmp_path, 7, final=True)
    if row is not None:
        (tmp_path / 'metrics.jsonl').write_text(f'{{"step": {row}}}\n')
    assert waits(pace.Yielder(str(tmp_path), 0.1)) is waited


@pytest.mark.parametrize('others', [0, 2])
def test_evaluators_on_one_machine_share_the_limit(tmp_path, others):
    register(tmp_path, role='master', step=4)
    register(tmp_path, role='evaluator', name='own', **OWN)
    for name in map(str, range(others)):
        register(tmp_path, role='evaluator', name=name, step=3)
    register(tmp_path, role='evaluator', name='waits')
    register(tmp_path, role='evaluator', name='far', machine='another', step=3)
    register(tmp_path, role='evaluator', name='dead', pid=2**22 - 5, started=1, step=3)
    yielder = pace.Yielder(str(tmp_path), 0.3)
    assert waits(yielder)
    assert yielder.pace.share == pytest.approx(0.24 / (1 + others))


@pytest.mark.parametrize(
    ('fake', 'threads', 'cores', 'cost'),
    [(True, (1, 1), 16, 1 / 16), (True, (1, 1), 2, 0.5), (True, (4, 1), 2, 1.0), (True, (1, 2), 8, 0.25), (True, (0, 1), 8, 1.0),
     (False, (1, 1), 16, 1.0)],
)  # fmt: skip
def test_work_on_the_cpu_is_believed_to_cost_the_cores_that_it_keeps_busy(monkeypatch, fake, threads, cores, cost):
    monkeypatch.setattr(identity, 'cores', lambda: cores)
    proto = tf.ConfigProto(intra_op_parallelism_threads=threads[0], inter_op_parallelism_threads=threads[1])
    assert pace.believed(structs.Placement((), '/cpu:0', fake, ''), proto) == cost


@pytest.mark.parametrize(('settings', 'share'), [({}, 0.096), ({'eval_max_slowdown': 0.1}, 0.32), ({'eval_max_slowdown': 1}, None)])
def test_an_evaluator_yields_by_default_and_at_a_limit_of_1_not_at_all(tmp_path, settings, share):
    made = pace.of(runs.config(tmp_path, **settings), 0.25)
    assert (made and made.pace.share) == (share and pytest.approx(share))


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'eval_max_slowdown': 0.0}, 'above 0 and at most 1, got 0.0; give e.g. 0.05, or 1'),
        ({'evaluator': ('a:max_slowdown=2',)}, 'above 0 and at most 1, got 2'),
    ],
)
def test_wrong_use_says_what_to_do(settings, message):
    with pytest.raises(ValueError, match=message):
        towers.Config(**settings)


def test_a_real_training_is_measured_and_evaluated_exactly(tmp_path):
    script = starter.ROOT / 'scripts' / 'train.py'
    command = [sys.executable, script, '--model=mlp', '--dataset=digits', '--device=cpu', '--log_steps=5', '--save_steps=10']
    command += ['--train_steps=100000000', f'--model_dir={tmp_path}', '--keep_checkpoints=1000']
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
        try:
            starter.wait_for(lambda: (tmp_path / 'ckpt-10.json').exists())
            given = runs.config(tmp_path, eval_batch_size=2, eval_max_slowdown=0.2)
            made = []
            original = pace.Yielder.between

            def between(self, stop):
                made.append(self.pace)
                original(self, stop)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pace.Yielder, 'between', between)
                patch.setattr(pace, '_WORK_SECS', 0.5)
                found = evaluation.once(models.build('mlp'), digits.load().test, given, checkpoint=10)
            assert training.poll() is None
        finally:
            training.kill()
    plain = evaluation.once(
        models.build('mlp'), digits.load().test, dataclasses.replace(given, eval_name='own', eval_max_slowdown=1), checkpoint=10
    )
    assert found['examples'] == plain['examples'] and found['accuracy'] == plain['accuracy']
    assert len(made) == found['examples'] // 2 + 1 and made[0]._alone and made[0]._alone[0] > 0
    assert json.loads((tmp_path / 'eval/test/results.jsonl').read_text())['step'] == 10
