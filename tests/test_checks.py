"""The checks for GPUs: what a check's command shows, and when it fails."""

import json

import pytest

from scripts import _checks

SAYS = ['-c', 'print("examples/s  12"); print("other")']


@pytest.mark.parametrize(
    ('check', 'limit', 'expected'),
    [
        (_checks.Check('a', SAYS), 60, ('', ['examples/s  12'])),
        (_checks.Check('b', SAYS, lambda output: 'too few' if 'other' in output else ''), 60, ('too few', ['examples/s  12'])),
        (_checks.Check('c', ['-c', 'import sys; print("why"); sys.exit(3)']), 60, ('exit code 3', ['why'])),
        (_checks.Check('d', ['-c', 'import time; time.sleep(60)']), 0.5, ('no end within the 0 s that were left', [])),
    ],
    ids='abcd',
)
def test_a_check(check, limit, expected):
    assert _checks._made(check, limit) == expected


@pytest.mark.parametrize(
    ('losses', 'wrong'),
    [
        ([1.0, 0.5], ''),
        ([1.0, 0.5004], ''),
        ([1.0, 0.6], 'losses differ by 0.1, expected 0.001 at most'),
        ([1.0], '2 and 1 rows, expected 2 each'),
    ],
)
def test_losses_of_two_runs(losses, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(_checks, '_STEPS', 2)
    for name, column in (('one', [1.0, 0.5]), ('other', losses)):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'metrics.jsonl').write_text(''.join(json.dumps({'loss': loss}) + '\n' for loss in column))
    assert _checks._differ(tmp_path / 'one', tmp_path / 'other') == wrong


def test_the_report_names_what_fails(monkeypatch):
    monkeypatch.setattr(_checks, '_checks', lambda *_: iter([_checks.Check('first', SAYS), _checks.Check('second', ['-c', '1/0'])]))
    results = _checks.run('cpu', 2, limit_secs=60)
    assert not results.good and results.lines[0].startswith('TensorFlow 2.')
    assert [line.split(' (')[0] for line in results.lines if line[:5] in ('holds', 'FAILS')] == ['holds  first', 'FAILS  second']
    assert any('ZeroDivisionError' in line for line in results.lines)


def test_without_a_gpu_nothing_is_begun():
    with pytest.raises(ValueError, match='GPUs: none: nothing to check; give --device=cpu to rehearse'):
        _checks.run('gpu', 2, limit_secs=60)


@pytest.mark.parametrize(
    ('rows', 'wrong'),
    [('{"loss": 1.5}\n', ''), ('{"loss": 1.5}\n{"loss": NaN}\n', 'no finite loss in 2 rows'), ('', 'no finite loss in 0 rows')],
)
def test_a_run_whose_loss_is_not_finite(rows, wrong, tmp_path):
    (tmp_path / 'metrics.jsonl').write_text(rows)
    assert _checks._improper(tmp_path, 'output') == wrong
