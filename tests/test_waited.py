"""Which part of their time the steps wait for their batch: measured in the graph, reported in rows, events and lines."""

import dataclasses
import json
import re
import time

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.jobs import program, training

SECS, STEPS = 0.05, 6


def nap(values):
    time.sleep(SECS)
    return values


def napping(tensor):
    return tf.ensure_shape(tf.numpy_function(nap, [tensor], tensor.dtype), tensor.shape)


def rows(slow):
    """Batches of 4 examples, of which the first takes its time where the data is slow."""

    def data():
        numbers = tf.data.Dataset.range(400).map(lambda x: tf.cast(x, tf.float32))
        return numbers.map(lambda x: tf.cond(x % 4 > 0, lambda: x, lambda: napping(x))) if slow else numbers

    return data


def model(slow):
    def loss(batch, *, training):
        with tf.control_dependencies([napping(batch)] * slow):
            return towers.ModelOutput(tf.reduce_mean(batch * harness.variable('w', 1.0)))

    return loss


def reports(folder, capfd):
    """The rows and the lines of a training, and what TensorBoard shows by step."""
    found = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    shares = re.findall(r'^step (\d+)/.* examples/s  input (\d+)%', capfd.readouterr().out, re.MULTILINE)
    written = [event for path in folder.glob('events.*') for event in tf.train.summary_iterator(str(path))]
    events = [(event.step, value.simple_value) for event in written for value in event.summary.value if value.tag == 'input_wait']
    return found, {int(step): int(share) / 100 for step, share in shares}, dict(events)


# Four slow towers that read for themselves would block all threads before the last one's batch can be seen to have come.
@pytest.mark.parametrize(
    ('n', 'input_pipeline', 'slow', 'steps_per_run'),
    [(n, pipeline, 'input', 1) for n in (1, 4) for pipeline in ('global', 'sharded')]
    + [(n, pipeline, 'model', 1) for n, pipeline in ((1, 'global'), (4, 'global'), (1, 'sharded'))]
    + [(2, 'global', slow, 3) for slow in ('input', 'model')],
)
def test_the_share_tells_slow_data_from_a_slow_model(n, input_pipeline, slow, steps_per_run, tmp_path, capfd):
    settings = harness.config(
        n=n, global_batch_size=4, learning_rate=0.1, train_steps=STEPS, log_steps=3, model_dir=str(tmp_path),
        input_pipeline=input_pipeline, prefetch=0, exact_resume=False, steps_per_run=steps_per_run,
    )  # fmt: skip
    towers.train(model(slow == 'model'), rows(slow == 'input'), settings)
    found, shown, events = reports(tmp_path, capfd)
    shares = {row['step']: row['input_wait'] for row in found}
    assert list(shares) == list(events) == [3, 6] and list(shown) == [3, 6][steps_per_run > 1 :]  # the first call has no rate
    for step, share in shares.items():
        assert 0.6 < share <= 1 if slow == 'input' else 0 <= share < 0.4
        assert shown.get(step, share) == pytest.approx(share, abs=0.0051) and events[step] == pytest.approx(share)


def test_a_row_holds_the_part_of_the_time_since_the_row_before_without_the_first_step(tmp_path, capfd):
    secs = np.array([[9, 9], [1, 2], [1, 4], [0, 2], [0, 1], [0, 7]], np.float64)
    settings = harness.config(train_steps=6, global_batch_size=2, log_steps=3, model_dir=str(tmp_path))
    made = program.make(model(False), harness.numbers(1, 2), settings)
    with made.graph.as_default():
        waited = tf.gather(secs, made.step.step - 1)
    made = dataclasses.replace(made, step=dataclasses.replace(made.step, waited=waited))
    with training.opened(made, settings) as master:
        while not master.should_stop():
            master.run((*made.step.ops, made.step.step))
    found, shown, events = reports(tmp_path, capfd)
    assert [row['input_wait'] for row in found] == pytest.approx([2 / 6, 0.0])
    assert shown == {3: 0.33, 6: 0.0} and events == pytest.approx({3: 2 / 6, 6: 0.0})


def test_what_measures_stands_on_the_inputs_host_alone():
    made = program.make(model(False), harness.numbers(1, 2), harness.config(n=2, global_batch_size=2))
    times = [op for op in made.graph.get_operations() if op.type == 'Timestamp']
    assert len(times) == 3 and {op.device for op in times} == {'/device:CPU:0'}
