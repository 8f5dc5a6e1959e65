"""Event files and JSON lines: whole records only, and no failure to write stops a training."""

import json
import math
import os
import resource

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorboard.backend.event_processing import event_accumulator

from towers.run import writers


def event_files(folder):
    return sorted(path for path in folder.iterdir() if 'tfevents' in path.name)


def events(path):
    """The events of a file; a record that is cut or mixed up raises."""
    data = tf.data.TFRecordDataset(str(path))
    return [tf.Event.FromString(record.numpy()) for record in data]


def scalars(folder):
    """(tag, step) -> value over all files of a folder."""
    found = {}
    for path in event_files(folder):
        for event in events(path):
            found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
    return found


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that the writers log."""
    logged = []
    monkeypatch.setattr(writers.logging, 'warning', lambda text, *values: logged.append(text % values))
    return logged


@pytest.fixture
def small_files():
    """Sets the largest size of a file in this process: 0 lifts it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_event_file_starts_with_its_version_and_the_start(tmp_path):
    writer = writers.EventWriter(str(tmp_path / 'made' / 'here'))
    writer.start(120)
    writer.scalars(121, {'loss': np.float32(0.5), 'accuracy': 1, 'confusion': np.eye(2)})
    graph = tf.Graph()
    with graph.as_default():
        tf.constant(1.0, name='only')
    writer.graph(graph)
    (path,) = event_files(tmp_path / 'made' / 'here')
    version, start, values, drawn = events(path)  # readable before the writer is closed
    assert version.file_version == 'brain.Event:2'
    assert start.session_log.status == tf.SessionLog.START and start.step == 120
    assert {value.tag: value.simple_value for value in values.summary.value} == {'loss': 0.5, 'accuracy': 1.0}
    assert [node.name for node in tf.GraphDef.FromString(drawn.graph_def).node] == ['only']
    assert all(event.wall_time > 1e9 for event in (version, start, values, drawn))
    writer.close()


def test_it_writes_inside_a_graph_and_in_any_thread(tmp_path):
    writer = writers.EventWriter(str(tmp_path))
    with tf.Graph().as_default() as graph:
        graph.finalize()
        writer.scalars(1, {'a': 2.0})
    writer.close()
    assert scalars(tmp_path) == {('a', 1): 2.0}


def test_starts_within_one_second_write_files_in_the_order_of_the_starts(tmp_path):
    for start in range(5):
        writer = writers.EventWriter(str(tmp_path))
        writer.start(start)
        writer.scalars(start, {'loss': float(start)})
        writer.close()
    starts = [event.step for path in event_files(tmp_path) for event in events(path) if event.HasField('session_log')]
    assert starts == [0, 1, 2, 3, 4]
    assert len(scalars(tmp_path)) == 5


def shown(folder):
    """What TensorBoard shows: tag -> [(step, value)], by its own reader."""
    seen = event_accumulator.EventAccumulator(str(folder))
    seen.Reload()
    return {tag: [(point.step, point.value) for point in seen.Scalars(tag)] for tag in seen.Tags()['scalars']}


def killed_at(folder, first, last, value):
    """What a session leaves that starts at `first` and is killed after `last`, in the middle of a record."""
    writer = writers.EventWriter(str(folder))
    writer.start(first)
    for step in range(first + 1, last + 1):
        writer.scalars(step, {'loss': value + step})
        if step % 5 == 0:
            writer.summary(step, tf.Summary(value=[tf.Summary.Value(tag='norm', simple_value=value)]))
    writer.close()
    with open(event_files(folder)[-1], 'ab') as file:
        file.write(b'\x50\0\0\0\0\0\0\0half')


def test_a_resumed_run_loses_no_point_and_has_none_twice(tmp_path):
    killed_at(tmp_path, 0, 13, 0.0)
    killed_at(tmp_path, 10, 10, 0.0)  # killed at once
    killed_at(tmp_path, 10, 17, 100.0)
    killed_at(tmp_path, 15, 20, 200.0)
    losses = [*range(1, 11), *range(111, 116), *range(216, 221)]
    assert shown(tmp_path) == {
        'loss': [(step, float(loss)) for step, loss in enumerate(losses, 1)],
        'norm': [(5, 0.0), (10, 0.0), (15, 100.0), (20, 200.0)],
    }
    starts = [[event.step for event in writers._events(path) if event.HasField('session_log')] for path in event_files(tmp_path)]
    assert starts == [[0], [10], [10], [15]]


def test_a_resumed_run_of_large_files_loses_no_point_either(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, '_MOST_READ', 100)
    killed_at(tmp_path, 0, 13, 0.0)
    killed_at(tmp_path, 10, 12, 100.0)
    assert shown(tmp_path)['loss'] == [(step, float(step)) for step in range(1, 11)] + [(11, 111.0), (12, 112.0)]


def test_nothing_is_made_before_the_first_event(tmp_path):
    writers.EventWriter(str(tmp_path)).close()
    assert not event_files(tmp_path)


def test_files_that_may_not_grow_lose_single_events_and_warn_once(tmp_path, small_files, warnings):
    writer = writers.EventWriter(str(tmp_path))
    small_files(4000)
    for step in range(100):
        writer.scalars(step, {'loss': float(step), 'text' * 100: 0.0})
    small_files(0)
    for step in range(100, 110):
        writer.scalars(step, {'loss': float(step)})
    writer.close()
    found = {step for tag, step in scalars(tmp_path) if tag == 'loss'}  # every file is readable to its end
    assert set(range(5)) | set(range(100, 110)) <= found and len(found) < 110
    assert len(warnings) == 1 and 'File too large' in warnings[0] and '\n' not in warnings[0]


@pytest.mark.parametrize('kind', ['events', 'lines'])
def test_a_folder_that_can_not_be_written_is_warned_of_once(tmp_path, warnings, kind):
    (tmp_path / 'file').write_text('')
    folder = tmp_path / 'file' / 'under'  # a file is no folder
    writer = writers.EventWriter(str(folder)) if kind == 'events' else writers.JsonLines(str(folder / 'rows'))
    for step in range(3):
        writer.scalars(step, {'a': 1.0}) if kind == 'events' else writer.append({'a': 1.0})
    writer.close()
    assert len(warnings) == 1 and 'can not be written' in warnings[0]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_one_line_of_plain_json(tmp_path):
    path = tmp_path / 'new' / 'metrics.jsonl'
    lines = writers.JsonLines(str(path))
    lines.append({'step': np.int64(3), 'loss': np.float32(0.5), 'nan': math.nan, 'inf': np.float32(np.inf), 'name': 'a\nb', 'none': None})
    lines.append({'matrix': np.array([[1.0, np.nan]])})
    assert rows(path) == [
        {'step': 3, 'loss': 0.5, 'nan': None, 'inf': None, 'name': 'a\nb', 'none': None},
        {'matrix': [[1.0, None]]},
    ]
    assert path.read_bytes().endswith(b'\n')
    lines.close()


@pytest.mark.parametrize('left', ['', '{"step": 1}\n', '{"step": 1}\n{"ste', '{"step": 1}'])
def test_a_later_start_appends_whole_lines(tmp_path, left):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(left)
    lines = writers.JsonLines(str(path))
    lines.append({'step': 2})
    lines.append({'step': 3})
    lines.close()
    assert path.read_text() == left + ('\n' if left and not left.endswith('\n') else '') + '{"step": 2}\n{"step": 3}\n'


def test_a_full_disk_leaves_whole_lines_and_is_warned_of_once(tmp_path, small_files, warnings):
    path = tmp_path / 'metrics.jsonl'
    lines = writers.JsonLines(str(path))
    small_files(1000)
    for step in range(30):
        lines.append({'step': step, 'text': 'x' * 90})
    assert [row['step'] for row in rows(path)] == list(range(8))
    small_files(0)
    lines.append({'step': 30})
    lines.close()
    assert rows(path)[-1] == {'step': 30} and len(rows(path)) == 9
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ('left', 'step', 'kept'),
    [
        ([1, 2, 3, 4], 2, [1, 2]),
        ([1, 2, 3, 4], 4, [1, 2, 3, 4]),
        ([10, 20], 5, []),
        ([10, 20, '{"step": 30, "lo'], 20, [10, 20]),  # a killed process's
        ([10, '{"step": 30, "lo', 40], 20, [10]),
        ([], 3, []),
        ([1, 2, 3, 2, 3], 2, [1, 2, 3, 2]),  # what a version that did not cut wrote
    ],
)
def test_rows_of_steps_that_are_made_again_are_cut_off(tmp_path, left, step, kept, monkeypatch):
    monkeypatch.setattr(writers, '_BLOCK', 7)
    path = tmp_path / 'metrics.jsonl'
    texts = [json.dumps({'step': row, 'loss': 0.5}) if isinstance(row, int) else row for row in left]
    path.write_text('\n'.join(texts) + ('\n' if texts and texts[-1].endswith('}') else ''))
    lines = writers.JsonLines(str(path))
    lines.cut(step)
    lines.append({'step': 99})
    lines.close()
    assert [row['step'] for row in rows(path)] == [*kept, 99]
    writers.JsonLines(str(tmp_path / 'none')).cut(3)
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize(
    ('left', 'step'),
    [
        (None, None),
        ('', None),
        ('{"step": 7}\n', 7),
        ('{"step": 1}\n{"step": 2, "text": "' + 'x' * 20 + '"}\n', 2),
        ('{"step": 1}\n{"ste', None),
        ('[1]\n', None),
    ],
    ids=['no file', 'empty', 'one', 'a long one', 'cut', 'no row'],
)
def test_the_step_of_the_last_row(tmp_path, left, step, monkeypatch):
    monkeypatch.setattr(writers, '_BLOCK', 7)
    if left is not None:
        (tmp_path / 'metrics.jsonl').write_text(left)
    assert writers.JsonLines(str(tmp_path / 'metrics.jsonl')).last_step() == step


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_no_space_left_is_warned_of_once(warnings):
    lines = writers.JsonLines('/dev/full')
    lines.append({'step': 1})
    lines.append({'step': 2})
    assert len(warnings) == 1 and 'No space left' in warnings[0]
