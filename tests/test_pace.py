"""How much an evaluator works beside a training: a law of simulated speeds, and one real training."""

import dataclasses
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import runs
import starter

import towers
from models.data import digits
from scripts import models
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

    def run(self, asked, secs):
        """Runs so long; returns (part of its speed that the training lost, part of the time that the evaluator worked)."""
        began, steps, worked, busy = self.now, self.steps, self.worked, 0.0
        while self.now - began < secs:
            left = asked.wait(self.now, busy, self.point)
            busy = 0.0 if left else self.batch
            self.passes(left or self.batch, 0.0 if left else 1.0)
        span = self.now - began
        return 1 - (self.steps - steps) / span / self.rate, (self.worked - worked) / span


def begun(limit, world):
    made = pace.Pace(limit)
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


@pytest.mark.parametrize('changes', [{'role': 'evaluator'}, {'machine': 'another'}, {'pid': 2**22 - 5, 'started': 1}])
def test_who_has_no_training_beside_it_does_not_wait(tmp_path, changes):
    folder = tmp_path / membership.FOLDER
    folder.mkdir()
    ledger.write(str(folder), ledger.Entry(**{'role': 'master', 'step': 4, **changes}))
    yielder = pace.Yielder(str(tmp_path), 0.1)
    yielder.begin()
    for _ in range(3):
        yielder.between(threading.Event())
    assert yielder.pace.measured == 0


def test_a_signal_ends_the_wait(tmp_path):
    folder = tmp_path / membership.FOLDER
    folder.mkdir()
    ledger.write(str(folder), ledger.Entry(role='master', step=4))
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    yielder = pace.Yielder(str(tmp_path), 0.1)
    yielder.begin()
    yielder.between(stop)  # nothing is known of the training, so it would wait for a minute
    assert stop.is_set()


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'eval_max_slowdown': 0.0}, 'above 0 and below 1, got 0.0; give e.g. 0.1'),
        ({'evaluator': ('a:max_slowdown=2',)}, 'above 0 and below 1, got 2'),
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
            given = runs.config(tmp_path, eval_batch_size=2, eval_max_slowdown=0.5)
            made = []
            original = pace.Yielder.between

            def between(self, stop):
                made.append(self.pace)
                original(self, stop)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pace.Yielder, 'between', between)
                found = evaluation.once(models.build('mlp'), digits.load().test, given, checkpoint=10)
            assert training.poll() is None
        finally:
            training.kill()
    plain = evaluation.once(
        models.build('mlp'), digits.load().test, dataclasses.replace(given, eval_name='own', eval_max_slowdown=None), checkpoint=10
    )
    assert found['examples'] == plain['examples'] and found['accuracy'] == plain['accuracy']
    assert len(made) == found['examples'] // 2 + 1 and made[0]._alone and made[0]._alone[0] > 0
    assert json.loads((tmp_path / 'eval/test/results.jsonl').read_text())['step'] == 10
