"""Bad data under the real command: it is named and ends the run, or it is left out and counted; no end is silent."""

import json
import re

import dataset_files
import injected
import pytest

OWN = """
import numpy as np
import tensorflow.compat.v1 as tf
import towers


def model(batch, *, training):
    return towers.ModelOutput(tf.reduce_mean(batch) * tf.get_variable('w', [], initializer=tf.ones_initializer()))


def numbers():
    return tf.data.Dataset.range(12).map(lambda i: tf.cast(i, tf.float32))


def closed_queue():
    queue = tf.queue.FIFOQueue(99, tf.float32, [])

    def from_closed():
        with tf.control_dependencies([queue.close()]):
            return queue.dequeue()

    def number(i):
        return tf.cond(i < 6, lambda: tf.cast(i, tf.float32), from_closed)

    return tf.data.Dataset.range(12).map(number)


def filtered():
    return numbers().filter(lambda x: x > 99.0)


def records():
    return tf.data.TFRecordDataset('cut.tfrecord').map(lambda text: tf.cast(tf.strings.length(text), tf.float32))


def generated():
    return tf.data.Dataset.from_generator(lambda: iter(np.arange(12, dtype=np.float32)), tf.float32, [])
"""


@pytest.fixture
def train(commands, tmp_path):
    """Trains to the end in the test's folder and returns the command."""
    (tmp_path / 'own_data.py').write_text(OWN)

    def run(*flags):
        common = ['--device=cpu', '--global_batch_size=4', '--train_steps=20', '--model_dir=run', '--eval_dataset=none', '--log_steps=1']
        command = commands.start(tmp_path, injected.TRAIN, *common, *flags)
        command.wait()
        return command

    return run


def own(dataset):
    return ['--model=own_data:model', f'--dataset=own_data:{dataset}']


def check(command, code, message):
    """Its exit code, and its last line, which stands alone: no traceback."""
    assert command.wait() == code, command.text()
    assert re.search(message, command.text().splitlines()[-1]), command.text()
    assert 'Traceback' not in command.text()


def test_a_damaged_record_is_named_at_the_start_or_when_it_is_read_or_left_out(train, tmp_path):
    dataset_files.write_tfrecord(tmp_path / 'data')
    path = tmp_path / 'data' / 'train-00001-of-00002'
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(bytes(content))
    flags = ['--model=mlp', '--dataset=tfrecord', '--data_dir=data']
    check(train(*flags), injected.MISUSED, 'data/train-00001-of-00002: record 0 is bad: its data does not match its checksum')
    late = train(*flags, '--data_args=classes=3')
    check(late, injected.FAILED, r'data/train-00001-of-00002: record 0 cannot be read or decoded: it is damaged')
    assert injected.last_shown(late) < 18  # of 70 examples in batches of 4
    done = train(*flags, '--max_bad_records=1')
    assert done.wait() == injected.DONE, done.text()
    assert 'Left out data/train-00001-of-00002: record 0: its data does not match its checksum.' in done.text()
    assert 'records left out  1' in done.text()
    rows = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert rows and all(row['bad_records'] == 1 for row in rows)


@pytest.mark.parametrize('pipeline', ['global', pytest.param('sharded', marks=pytest.mark.soak)])
def test_a_closed_queue_in_a_users_map_is_a_failure(train, pipeline):
    command = train(*own('closed_queue'), '--noexact_resume', f'--input_pipeline={pipeline}')
    check(command, injected.FAILED, r'OutOfRangeError: .*queue.* is closed')
    assert injected.last_shown(command) <= 1


def test_data_that_a_filter_drops_is_a_failure(train):
    check(train(*own('filtered')), injected.FAILED, 'A pass over the dataset gave no example; expected at least one')


def test_a_users_own_cut_file_is_a_failure(train, tmp_path):
    dataset_files.write_records(tmp_path / 'cut.tfrecord', [bytes(9), bytes(9), bytes(9)])
    content = (tmp_path / 'cut.tfrecord').read_bytes()
    (tmp_path / 'cut.tfrecord').write_bytes(content[:-2])
    check(train(*own('records')), injected.FAILED, 'truncated record at')


def test_data_without_a_position_is_refused_at_the_start(train):
    command = train(*own('generated'))
    check(command, injected.MISUSED, r"^The input's position can't be saved: PyFunc in the FlatMapDataset made at .*own_data\.py:\d+ has")
    assert injected.last_shown(command) == 0
    assert train(*own('generated'), '--noexact_resume').wait() == injected.DONE
