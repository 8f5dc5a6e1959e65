"""Other frameworks from checkouts: which they are, that they train as the classic loop does, and what is said where they can't."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

from scripts._bench import checkouts, options, suite, tensorpacks

HERE = pathlib.Path(__file__).resolve().parent
CNN, PACK = str(HERE / 'checkouts/benchmarks'), str(HERE / 'checkouts/tensorpack')
SIDES = {CNN: ['tf_cnn_benchmarks ps', 'tf_cnn_benchmarks replicated'], PACK: ['tensorpack ps', 'tensorpack replicated']}
MARKS = {CNN: 'scripts/tf_cnn_benchmarks/variable_mgr.py', PACK: 'tensorpack/train/trainers.py'}


def parsed(*arguments):
    values = options.define()
    values(['benchmark.py', *arguments])
    return values


def test_a_checkout_brings_its_sides_after_the_chosen_ones():
    found = options.names(parsed('--sides=classic', f'--peer={PACK}', f'--peer={CNN}'))
    assert found.sides == ('classic', *SIDES[PACK], *SIDES[CNN])
    assert found.peers == {name: folder for folder, names in SIDES.items() for name in names}
    assert options.names(parsed('--sides=classic')).sides == ('classic',)


def test_a_folder_may_be_relative(monkeypatch):
    monkeypatch.chdir(HERE)
    assert set(options.names(parsed('--peer=checkouts/tensorpack')).peers.values()) == {PACK}


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([f'--peer={HERE}'], f'--peer={HERE}: expected a checkout of tf_cnn_benchmarks .* or tensorpack .*, got another; give'),
        ([f'--peer={HERE}/none'], r'/none: expected a checkout of .*, got no folder; give'),
        ([f'--peer={PACK}', f'--peer={PACK}'], f'expected one checkout of each kind, got a second of tensorpack, {PACK}; leave'),
        ([f'--peer={PACK}', '--measure=overhead'], '--peer is for --measure=sides; add it'),
    ],
    ids=['another', 'no folder', 'twice', 'not measured'],
)
def test_what_is_no_peer_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        options.names(parsed(*arguments))


@pytest.mark.parametrize('folder', SIDES, ids=['tf_cnn_benchmarks', 'tensorpack'])
def test_a_peer_trains_as_the_classic_loop_does(folder):
    """Dense gradients and sparse ones; with reference variables a read may see an update of the same step, so equal to some digits."""
    done = subprocess.run(
        [sys.executable, HERE / 'side_losses.py', 'w1,w4', '2', 'constants', folder], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for workload, tolerance in (('w1', 2e-3), ('w4', 1e-5)):
        losses = json.loads(done.stdout)[workload]
        expected = losses.pop('classic')
        assert expected[-1] < expected[0] - 100 * tolerance * expected[0] and set(losses) == set(SIDES[folder])
        for found in losses.values():
            assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    ('asked', 'given'), [('/gpu:0', '/device:CPU:1'), ('/gpu:3', '/device:CPU:4'), ('/cpu:2', '/device:CPU:2'), ('', '')]
)
def test_towers_that_ask_for_gpus_have_the_devices_of_the_other_sides(asked, given):
    with tf.Graph().as_default(), tf.device(tensorpacks._on_cpu), tf.device(asked):
        assert tf.constant(1).device == given


def copied(folder, tmp_path, begins):
    """A checkout whose known file begins otherwise."""
    made = shutil.copytree(folder, tmp_path / 'checkout')
    file = made / MARKS[folder]
    file.write_text(f'{begins}\n{file.read_text()}')
    return str(made)


def test_a_peer_that_lacks_something_is_named_with_the_reason(tmp_path):
    folder = copied(PACK, tmp_path, 'import not_there')
    with pytest.raises(ValueError, match=r"^--peer=.*/checkout: tensorpack ps does not run .*: No module named 'not_there'; install what"):
        checkouts.try_out(checkouts.named([folder]))


def test_a_peer_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkouts, '_LIMIT_SECS', 1)
    folder = copied(CNN, tmp_path, 'import time\ntime.sleep(1000)')
    with pytest.raises(ValueError, match='tf_cnn_benchmarks ps does not run .*: no first step within 1 s; install'):
        checkouts.try_out(checkouts.named([folder]))


def test_a_peer_is_measured_as_the_other_sides(monkeypatch):
    monkeypatch.setattr(suite, 'SLICE_SECS', 0.02)
    name = SIDES[PACK][0]
    [found] = suite.measure(('w1', 2, 'constants'), [name], rounds=2, checkouts={name: PACK})
    assert (found['side'], found['slices']) == (name, 2) and found['steps_per_sec'] > 0 and found['start_secs'] > 0


def test_the_reason_is_the_last_error_that_was_written():
    text = 'Traceback\n  here\nKeyError: 1\nDuring this\nmy.module.OwnError: what\n2026: a line of the runtime\n'
    assert checkouts._reason(text) == 'my.module.OwnError: what'
    assert checkouts._reason('aborted\n') == 'aborted' and re.search('ended', checkouts._reason(''))
