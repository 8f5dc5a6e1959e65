"""The benchmark: its tables, its comparison with an earlier run, its flags, and that each side trains."""

import itertools
import json
import re
import resource
import signal
import statistics
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from scripts import _measure
from scripts._bench import beside, options, peers, profile, report, running, sides, soak, suite, workloads
from towers import errors
from towers.jobs import stepping

ROW = {
    'workload': 'w1', 'towers': 4, 'source': 'constants', 'side': 'towers', 'base': 'one device',
    'steps_per_sec': 100.0, 'ratio': 1.3, 'low': 1.2, 'high': 1.4,
    'start_secs': 0.5, 'peak_mb': 600.0, 'slices': 9, 'clean': 8, 'is_disturbed': False,
}  # fmt: skip


def row(**changes):
    return {**ROW, **changes}


def test_the_table_has_a_line_for_each_side():
    text = report.table([row(side='one device', ratio=1.0), row()])
    assert [line.split()[:3] for line in text.splitlines()[1:]] == [['w1', 'x', '4']] * 2
    assert re.search(r'towers +1\.30 \(1\.20-1\.40\) +#{30} ', text) and text.endswith('8/9')


def test_what_was_written_is_read_again(tmp_path):
    path = str(tmp_path / 'rows.jsonl')
    for side in ('towers', 'classic'):
        out = report.Out(path)
        out.add([row(side=side)])
        out.close()
    assert report.read(path) == [row(side='towers'), row(side='classic')]


def test_rows_that_a_full_disk_does_not_take_come_later(tmp_path):
    path = str(tmp_path / 'rows.jsonl')
    out = report.Out(path)
    out.add([row(side='towers')])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))  # in the middle of the second row
        out.add([row(side='classic')])
        assert report.read(path) == [row(side='towers')]
        with pytest.raises(errors.NotWritten, match=f'{re.escape(path)} lacks the last 1 rows'):
            out.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    out.add([row(side='Keras fit')])
    out.close()
    assert [each['side'] for each in report.read(path)] == ['towers', 'classic', 'Keras fit']


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ValueError, match=f'--out={re.escape(str(tmp_path))} can not be written .*; give a file'):
        report.Out(str(tmp_path))


@pytest.mark.parametrize('text', ['', 'no json\n', '3\n', '{"workload": "w1"}\n'])
def test_a_file_that_holds_something_else_is_refused(text, tmp_path):
    path = tmp_path / 'rows.jsonl'
    path.write_text(json.dumps(ROW) + '\n' + text if text else '')
    with pytest.raises(ValueError, match=f'{re.escape(str(path))}.*expected'):
        report.read(path)


@pytest.mark.parametrize(
    ('now', 'told'),
    [
        ({'ratio': 1.29}, None),
        ({'ratio': 1.1, 'low': 1.0, 'high': 1.15}, 'w1 4 constants towers: 1.30 -> 1.10 (-15%), slower'),
        ({'ratio': 1.6, 'low': 1.5, 'high': 1.7}, 'w1 4 constants towers: 1.30 -> 1.60 (+23%), faster'),
        ({'ratio': 9.0, 'towers': 8}, 'Nothing to compare: the earlier run has none of these cases with these sides.'),
        ({'ratio': 9.0, 'base': 'classic'}, 'Nothing to compare: the earlier run has none of these cases with these sides.'),
    ],
)
def test_only_what_left_its_spread_has_moved(now, told):
    assert list(report.moved([ROW], [row(**now)])) == ([told] if told else [])


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('--workloads=w1,w9', r'--workloads takes w1, w2, w3, w4, got w9; give one'),
        ('--sides=estimator', r'--sides takes one device, towers, .*, got estimator'),
        ('--sources=disk', r'--sources takes constants, pipeline, got disk'),
        ('--towers=1,none', r'--towers takes numbers of at least 1, got 1,none'),
        ('--secs=0', r'--secs must be at least 1, got 0; give'),
        ('--sides=towers,classic,towers', '--sides has towers twice; give each once'),
        ('--rounds=0', r'--rounds and --slice_steps must be at least 1'),
    ],
)
def test_what_there_is_not_is_refused(argument, message):
    values = options.define()
    values(['benchmark.py', argument])
    with pytest.raises(ValueError, match=message):
        options.names(values)


@pytest.mark.parametrize(
    ('arguments', 'workloads_there', 'towers', 'sources'),
    [
        ([], ('w1', 'w2', 'w3', 'w4'), (1, 2, 4, 8), ('constants', 'pipeline')),
        (['--num_gpus=4', '--workloads=w2'], ('w2',), (4,), ('constants', 'pipeline')),
        (['--num_gpus=1', '--sources=pipeline'], ('w1', 'w2', 'w3', 'w4'), (1,), ('pipeline',)),
        (['--workloads=w1,w3', '--num_gpus=4', '--towers=2,8', '--sources=constants'], ('w1', 'w3'), (2, 8), ('constants',)),
    ],
)
def test_cases_are_all_combinations(arguments, workloads_there, towers, sources):
    values = options.define()
    values(['benchmark.py', *arguments])
    assert options.names(values).cases == list(itertools.product(workloads_there, towers, sources))


def watched(case):
    """The product with a hook of a user's, so that every step is looked at."""
    return sides.product(case, hooks=[tf.train.SessionRunHook()])


def loss_of(made):
    return made.report[1] if isinstance(made, stepping.Made) else float(made[-1])


@pytest.mark.parametrize('source', sides.SOURCES)
@pytest.mark.parametrize('make', [sides.one_device, sides.classic, watched], ids=['one device', 'classic', 'towers'])
def test_a_side_trains(make, source):
    def losses():
        with make(sides.Case(workloads.WORKLOADS['w1'], 2, source)) as step:
            return [loss_of(step()) for _ in range(25)]

    found = losses()
    assert found[-1] < found[0] - 0.2


def test_a_profile_says_where_the_time_went():
    rows = profile.measure(sides.Case(workloads.WORKLOADS['w1'], 2, 'pipeline'))
    assert {'a traced step', 'operations at once', 'towers, of all operations', 'apply, of all operations'} <= set(rows)
    shares = [float(value.rstrip('%')) for name, value in rows.items() if name.endswith('of all operations')]
    assert 95 <= sum(shares) <= 105


@pytest.mark.parametrize('source', sides.SOURCES)
def test_sides_are_measured_in_turn_in_processes_of_their_own(source, monkeypatch):
    monkeypatch.setattr(suite, 'SLICE_SECS', 0.02)
    found = suite.measure(('w1', 2, source), ['one device', 'MirroredStrategy', 'Keras fit'], rounds=2)
    assert [each['side'] for each in found] == ['one device', 'MirroredStrategy', 'Keras fit']
    assert found[0]['ratio'] == 1.0 and 0 < found[1]['ratio'] < 1 and all(each['slices'] == 2 for each in found)


def test_a_side_that_is_killed_is_left_out(monkeypatch, capsys):
    slice_of = suite._Child.slice

    def killed(child):
        if child.name == 'classic' and child.rates:
            child._process.kill()
        slice_of(child)

    monkeypatch.setattr(suite, 'SLICE_SECS', 0.02)
    monkeypatch.setattr(suite._Child, 'slice', killed)
    found = suite.measure(('w1', 2, 'constants'), ['one device', 'classic', 'no such side', 'towers'], rounds=3)
    assert [(each['side'], each['slices']) for each in found] == [('one device', 3), ('towers', 3)]
    unknown, dead = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"no such side is left out: its process has ended with 1; see why by: .* 'no such side' w1 2 constants", unknown)
    assert re.fullmatch(r'classic is left out: its process has ended with -9; see why by: .* classic w1 2 constants', dead)


def test_a_side_that_hangs_is_left_out_and_without_the_first_there_are_no_ratios(monkeypatch, capsys):
    def stopped(child):
        child._process.send_signal(signal.SIGSTOP)
        suite._Child._run(child, 1)

    monkeypatch.setattr(suite, 'ANSWER_SECS', 30.0)
    monkeypatch.setattr(suite._Child, 'calibrate', lambda child: monkeypatch.setattr(suite, 'ANSWER_SECS', 0.5))
    monkeypatch.setattr(suite._Child, 'slice', stopped)
    assert suite.measure(('w1', 1, 'constants'), ['one device'], rounds=1) == []
    assert re.match('one device is left out: its process gave no answer in 0.5 s; see why by: ', capsys.readouterr().err)
    assert report.table([]) == 'Nothing to compare: the first side is left out.'


@pytest.mark.parametrize('source', sides.SOURCES)
def test_keras_reads_the_features_and_labels_that_all_sides_have(source):
    case = sides.Case(workloads.WORKLOADS['w4'], 2, source)
    with tf.init_scope():
        features, labels = next(iter(peers.pairs(case)))
        expected = case.workload.features(case.global_batch if source == 'constants' else 8 * case.global_batch)
    np.testing.assert_array_equal(features, expected['ids'][: case.global_batch])
    np.testing.assert_array_equal(labels, expected['label'][: case.global_batch])


def test_as_many_steps_are_made_as_are_asked_for_whoever_else_makes_some():
    """The bare callable, beside which the product is measured, makes steps in the same session that the product does not know of."""
    values, argv = options.define(), ['benchmark.py', '--device=cpu', '--model=mlp', '--dataset=digits', '--num_gpus=2']
    values(argv)
    with running.asked_for(values) as (made, master, step):
        bare, raw = master.raw_session().make_callable(stepping.bare(made.step)), master.raw_session()
        step()
        for asked in (1, 2, 30):
            for _ in range(20):
                bare()
            before = int(raw.run(made.step.global_step))
            step(asked)
            assert int(raw.run(made.step.global_step)) - before == asked


@pytest.mark.parametrize('values', [[2.0], [1.0, 9.0], [3.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0]])
def test_quartiles_lie_between_what_was_measured(values):
    low, middle, high = _measure.quartiles(values)
    assert min(values) <= low <= middle <= high <= max(values) and middle == statistics.median(values)


def test_one_round_is_shown_without_a_spread():
    assert _measure.table({'a': [3.0], 'b': [2.0]})['a / b (median, quartiles)'] == '1.500 (1.500 to 1.500)'


def test_the_four_workloads_are_what_they_are_called():
    sizes = {}
    for name in ('w1', 'w3', 'w4'):
        with tf.Graph().as_default():
            work = workloads.WORKLOADS[name]
            work.model(work.features(2), training=True)
            sizes[name] = sum(variable.shape.num_elements() for variable in tf.trainable_variables()), len(tf.trainable_variables())
    assert sizes == {'w1': (79_510, 4), 'w3': (25_557_032, 161), 'w4': (6_400_650, 3)}


def beside_flags(*more):
    values, argv = options.define(), ['benchmark.py', '--measure=evaluator', '--device=cpu', '--model=mlp', '--dataset=digits', *more]
    values(argv)
    return values, argv


def test_a_training_is_measured_with_an_evaluator_and_without(monkeypatch):
    monkeypatch.setattr(beside, '_SLICE_SECS', 0.05)
    values, argv = beside_flags('--eval_max_slowdown=1')
    assert options.names(values).parts == ['evaluator']
    found = beside.measure(values, argv, rounds=3)
    rates = [float(found[f'{name}, steps/s (median)']) for name in ('training alone', 'with an evaluator')]
    assert min(rates) > 0 and re.fullmatch(r'\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)', found['with / alone (median, quartiles)'])
    assert float(found["the evaluator's processor time / time (median)"]) >= 0


def test_the_evaluator_of_a_measurement_yields_to_it_and_is_held(monkeypatch, capfd):
    texts, used = [''], []

    def in_turn(step, tell, pid, rounds):
        tell('go')
        while 'A training is at work in' not in texts[0]:
            step()
            texts[0] += capfd.readouterr().err
        tell('hold')
        for _ in range(2):
            used.append(beside._processor_secs(pid))
            time.sleep(0.3)
        return [(beside.Slice(1.0, 0.0), beside.Slice(1.0, 0.0))]

    monkeypatch.setattr(beside, '_in_turn', in_turn)
    beside.measure(*beside_flags(), rounds=1)
    assert 1 < used[0] <= used[1] < used[0] + 0.1


def test_without_anything_to_evaluate_on_it_says_so():
    values, argv = options.define(), ['benchmark.py', '--eval_dataset=none']
    values(argv)
    with pytest.raises(ValueError, match='--measure=evaluator needs an evaluation dataset, got none'):
        beside.measure(values, argv, rounds=1)


def samples(*, of='threads', rise=0.0, noise=0.0, hours=1.0):
    """Sixty samples of a run in which one kind rises by so much an hour, and jumps up and down by `noise`."""
    flat = dict.fromkeys(soak.KINDS, 100.0)
    times = [hours * index / 60 for index in range(60)]
    return [
        {**flat, 'time': 3600 * at, of: 100.0 + rise * at + noise * (-1) ** (index * (index + 1) // 2)} for index, at in enumerate(times)
    ]


@pytest.mark.parametrize('kind', soak.KINDS)
def test_a_soak_fails_where_a_slope_is_above_its_bound_and_not_in_the_noise(kind):
    most = soak.KINDS[kind].most * (100.0 if soak.KINDS[kind].relative else 1.0)
    rows, exceeded = soak.judged(samples(of=kind, rise=1.1 * most))
    assert exceeded == [kind]
    [shown] = [float(value.split()[0]) for name, value in rows.items() if name.startswith(f'{kind}, an hour')]
    assert shown == pytest.approx(1.1 * most, rel=0.01)
    assert soak.judged(samples(of=kind, rise=0.9 * most))[1] == []
    assert soak.judged(samples(of=kind, rise=-2 * most))[1] == []
    assert soak.judged(samples(of=kind, rise=1.1 * most, noise=2 * most))[1] == []
    assert soak.judged(samples(of=kind, rise=20 * most, noise=most, hours=0.5))[1] == [kind]


def test_a_soak_trains_and_looks_at_its_process():
    values, argv = options.define(), ['benchmark.py', '--measure=soak', '--secs=1', '--device=cpu', '--model=mlp', '--dataset=digits']
    values(argv)
    rows, _ = soak.measure(values, secs=values.secs)
    assert options.names(values).parts == ['soak'] and float(rows['step time (median)'].split()[0]) > 0
    assert float(rows['resident memory (median)'].split()[0]) > 100 and float(rows['threads (median)']) > 2


def test_a_soak_sees_what_a_training_leaves_behind(tmp_path):
    """A step that keeps a file open, and what it read of it."""
    kept = []

    def leaking():
        kept.append((open(tmp_path / f'file-{len(kept)}', 'w'), b'x' * 2**20))
        time.sleep(0.01)

    try:
        assert set(soak.judged(soak._samples(leaking, 1.0))[1]) >= {'resident memory', 'open files'}
    finally:
        for file, _ in kept:
            file.close()
