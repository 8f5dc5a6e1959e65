"""Which checkpoints stay, as pure functions of what is on the disk."""

import pytest

from towers import config
from towers.checkpoint import manifest, retention

HOUR = 3600.0


def found(*steps, times=None):
    times = times or [float(step) for step in steps]
    made = [manifest.Manifest(step=step, examples=0, files={}, time=time) for step, time in zip(steps, times, strict=True)]
    return [manifest.Checkpoint(each.step, f'ckpt-{each.step}', each) for each in made]


@pytest.mark.parametrize(('keep', 'expected'), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_the_newest(keep, expected):
    assert retention.kept(found(10, 20, 30, 40), config=config.CheckpointConfig(keep_checkpoints=keep)) == expected


def test_the_first_of_every_so_many_hours_whenever_it_is_asked():
    settings = config.CheckpointConfig(keep_checkpoints=1, keep_hours=2)
    times = [HOUR * hour for hour in (0.5, 1.9, 2.0, 3.9, 4.1, 9.0, 9.5)]
    everything = found(*range(7), times=times)
    assert retention.kept(everything, config=settings) == [0, 2, 4, 5, 6]
    left = []
    for each in everything:  # asked after each save, on what is still there
        steps = retention.kept([*left, each], config=settings)
        left = [one for one in [*left, each] if one.step in steps]
    assert [one.step for one in left] == [0, 2, 4, 5, 6]


def test_the_best(tmp_path, caplog):
    for name, rows in (
        ('test', '{"step": 10, "accuracy": 0.9, "loss": 3.0}\n{"step": 20, "accu'),
        ('other', '{"step": 30, "accuracy": 0.8}\n'),
    ):
        (tmp_path / 'eval' / name).mkdir(parents=True)
        (tmp_path / 'eval' / name / 'results.jsonl').write_text(f'[]\n{rows}\n{{"step": 30, "accuracy": NaN, "loss": 1.0}}\n')
    best = [best_of(tmp_path, metric, 10, 20, 30) for metric in ('accuracy', 'accuracy:min', 'loss', 'loss:max', 'recall', None)]
    assert best == [10, 30, 30, 10, None, None]
    assert 'no evaluator reports recall, got accuracy, loss.' in caplog.text and 'reports loss' not in caplog.text
    assert best_of(tmp_path, 'accuracy', 20, 30) == 30
    assert best_of(tmp_path / 'none', 'accuracy', 10) is None
    assert retention.kept(found(10, 20, 30), config=config.CheckpointConfig(keep_checkpoints=1), best=10) == [10, 30]
    assert retention.kept(found(20, 30), config=config.CheckpointConfig(keep_checkpoints=1), best=10) == [30]


def best_of(model_dir, metric, *steps):
    return retention.best_step(str(model_dir), metric, found(*steps))


def test_a_result_of_an_older_checkpoint_of_the_same_step_does_not_count(tmp_path):
    (tmp_path / 'eval' / 'test').mkdir(parents=True)
    rows = '{"step": 10, "accuracy": 0.9, "saved": 5.0}\n{"step": 20, "accuracy": 0.1, "saved": 20.0}\n'
    (tmp_path / 'eval' / 'test' / 'results.jsonl').write_text(rows)
    assert best_of(tmp_path, 'accuracy', 10, 20) == 20
    assert retention.best_step(str(tmp_path), 'accuracy', found(10, 20, times=[5.0, 20.0])) == 10


@pytest.mark.parametrize('text', ['', ':min', 'accuracy:', 'accuracy:highest', 'a:b:max'])
def test_a_metric_that_can_not_be_meant(text):
    with pytest.raises(ValueError, match='--keep_best wants a metric, or one with :min or :max'):
        config.CheckpointConfig(keep_best=text)
