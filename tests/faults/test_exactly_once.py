"""Killed at any moment and started again, a training takes the same examples in the same steps, and reports the same losses."""

import json
import pathlib
import random
import signal
import time

import harness
import numpy as np
import pytest
import starter

from towers.checkpoint import manifest

PROGRAM = pathlib.Path(__file__).with_name('logged_training.py')
STEPS = 60
PASSES = -(-STEPS // 7)  # of 7 batches


@pytest.fixture(scope='module')
def train(commands, tmp_path_factory):
    """Starts the training on n towers in a folder of this file's."""
    place = tmp_path_factory.mktemp('exactly-once')
    return lambda name, n, steps=STEPS: commands.start(place / name, str(PROGRAM), n, steps)


@pytest.fixture(scope='module')
def whole(train):
    """The folder of an uninterrupted training on n towers, made once."""
    made = {}

    def run(n=1, steps=STEPS):
        if (n, steps) not in made:
            command = train(f'whole-{n}-{steps}', n, steps)
            assert command.wait() == 0, command.text()
            made[n, steps] = command.folder
        return made[n, steps]

    return run


def rows(folder, name, value):
    """Step -> value of a log, later lines winning, and how many lines there are."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()] if (folder / name).exists() else []
    return {line['step']: line[value] for line in lines}, len(lines)


def killed_after(command, lines, secs):
    """Kills a training some steps after it has come to its first new one."""
    starter.wait_for(lambda: rows(command.folder, 'ids.jsonl', 'ids')[1] >= lines or command.code() is not None)
    time.sleep(secs)
    command.send(signal.SIGKILL)
    return command.wait() == -signal.SIGKILL


def broken(train, towers, seed, steps=STEPS):
    """A run that is killed once on each number of towers but the last; returns its folder and how often it was killed."""
    chance, killed = random.Random(seed), 0
    for n in towers[:-1]:
        command = train(f'broken-{seed}', n, steps)
        before = rows(command.folder, 'ids.jsonl', 'ids')[1]
        killed += killed_after(command, before + chance.randint(1, 12), chance.uniform(0.0, 0.01))
    command = train(f'broken-{seed}', towers[-1], steps)
    assert command.wait() == 0, command.text()
    if killed:
        assert 'is gone without having given it back: taken over' in command.text()
    assert 'starts at the beginning of an epoch' not in command.text()
    return command.folder, killed


def check_same(one, other, steps, *, exact):
    ids, _ = rows(one, 'ids.jsonl', 'ids')
    others, lines = rows(other, 'ids.jsonl', 'ids')
    assert others == ids and list(ids) == list(range(1, steps + 1))
    losses, others = rows(one, 'run/metrics.jsonl', 'loss')[0], rows(other, 'run/metrics.jsonl', 'loss')[0]
    assert list(losses) == sorted(others) == list(range(1, steps + 1))
    tolerance = harness.EXACT if exact else harness.FP32_SUM
    np.testing.assert_allclose([others[step] for step in losses], list(losses.values()), rtol=tolerance, atol=tolerance)
    return lines - steps  # steps made again


def test_the_training_itself_takes_each_example_once_in_a_pass_and_each_pass_in_another_order(whole):
    ids, _ = rows(whole(), 'ids.jsonl', 'ids')
    passes = [sum((ids.get(step, []) for step in range(7 * number + 1, 7 * number + 8)), []) for number in range(PASSES)]
    for order in passes[:-1]:
        assert sorted(order) == list(range(50))
    assert len(set(map(tuple, passes))) == PASSES


@pytest.mark.parametrize(
    ('towers', 'seed'),
    [
        ((1, 1, 1, 1), 1),
        ((1, 4, 2, 1), 2),
        *[pytest.param((2,) * 21, seed, marks=pytest.mark.soak) for seed in (3, 4)],
        *[pytest.param((1, 2, 4, 3) * 5 + (1,), seed, marks=pytest.mark.soak) for seed in (5, 6)],
    ],
)
def test_a_killed_training_goes_on_as_if_nothing_had_been(train, whole, towers, seed):
    steps = STEPS * max(1, len(towers) // 4)
    folder, killed = broken(train, towers, seed, steps)
    again = check_same(whole(towers[0], steps), folder, steps, exact=len(set(towers)) == 1)
    print(f'{killed} of {len(towers) - 1} killed, {again} steps made again, newest step {manifest.newest(str(folder / "run")).step}')
    assert killed == len(towers) - 1
