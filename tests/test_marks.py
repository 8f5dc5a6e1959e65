"""Marks tell, beside a step that does not end, what it is waited for."""

import threading

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import structs
from towers.graph import marks

TOWERS = [structs.Tower(index, (f'/cpu:{index + 1}',), '/cpu:0') for index in range(2)]


class Step:
    """A step whose input and towers each wait for a queue of their own."""

    def __init__(self):
        with tf.Graph().as_default() as graph:
            queues = [tf.FIFOQueue(9, tf.float32, shapes=[[]]) for _ in range(3)]
            batch = queues[0].dequeue()
            made = [batch * queue.dequeue() for queue in queues[1:]]
            one = structs.TowerBatch({'x': batch}, tf.constant(1, tf.int64), tf.constant(0, tf.int64))
            source = structs.Input((one, one), one.examples, tf.no_op(), (), None, None, '')
            self.marks = marks.make(source, [(tower, [None, value]) for tower, value in zip(TOWERS, made, strict=True)])
            self._fill = [queue.enqueue(1.0) for queue in queues]
            with tf.control_dependencies(made):
                self._last = tf.FIFOQueue(1, tf.float32).dequeue()  # an update that hangs
            self._init = tf.local_variables_initializer()
        config = tf.ConfigProto(device_count={'CPU': 3}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
        self.session = tf.Session(graph=graph, config=config)
        self.session.run(self._init)
        self._fetches = [self._last, [mark.advance for mark in self.marks]]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with pytest.raises(tf.errors.CancelledError):
            self.session.run(self._fetches)

    def fill(self, part):
        self.session.run(self._fill[part])

    def close(self):
        self.session.close()
        self._thread.join()


def settles(reader, expected):
    """Whether the reader comes to say `expected`: what was waited for before takes a moment to be done."""
    for _ in range(500):
        if reader.late(0) == expected:
            return True
    return False


def test_the_input_the_towers_and_the_update_are_told_apart():
    step = Step()
    try:
        reader = marks.Reader(step.session, step.marks)
        assert reader.late(0) == 'the input, or for TensorFlow to prepare the first step'
        step.fill(0)
        assert settles(reader, 'tower 0 on /cpu:1, tower 1 on /cpu:2')
        step.fill(1)
        assert settles(reader, 'tower 1 on /cpu:2')
        step.fill(2)
        assert settles(reader, 'the update of the variables')
        assert reader.late(1) == 'the input'  # of the step after
    finally:
        step.close()


def test_a_device_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(marks, '_ANSWER_SECS', 0.2)
    with tf.Graph().as_default() as graph:
        hangs = tf.FIFOQueue(1, tf.int64, shapes=[[]]).dequeue()
        counts = {'the input': tf.constant(3), 'tower 0': tf.constant(2), 'tower 1': hangs, 'tower 2': tf.constant(3)}
    given = [structs.Mark(what, hangs.op, count) for what, count in counts.items()]
    with tf.Session(graph=graph) as session:
        assert marks.Reader(session, given).late(2) == 'tower 0, tower 1 (no answer within 0.2 s from tower 1)'
        assert marks.Reader(session, ()).late(2) == 'its session'


def test_marks_are_in_no_checkpoint_and_stand_on_their_parts_devices():
    step = Step()
    try:
        with step.session.graph.as_default():
            assert tf.global_variables() == [] and len(tf.local_variables()) == 3
        assert [mark.advance.device for mark in step.marks] == ['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']
    finally:
        step.close()


@harness.each_case
@pytest.mark.parametrize('input_pipeline', ['global', 'sharded'])
def test_each_step_of_a_training_advances_every_mark(strategy, n, input_pipeline):
    def model(batch, *, training):
        rows = tf.get_variable('table', [4, 2], use_resource=True)
        return towers.ModelOutput(tf.reduce_mean(tf.nn.embedding_lookup(rows, batch)) + tf.reduce_sum(harness.variable('w', 1.0)))

    settings = harness.config(strategy, n, batch_size=2, input_pipeline=input_pipeline)
    with harness.started(model, harness.rows(np.arange(8) % 4), settings) as run:
        step = run.program.step
        for _ in range(3):
            run.session.run([step.ops, [mark.advance for mark in step.marks]])
        assert run.session.run([mark.count for mark in step.marks]) == [3] * (n + 1)
        names = [f'tower {tower.index} on {tower.devices[0]}' for tower in run.program.placement.towers]
        assert [mark.what for mark in step.marks] == ['the input', *names]
        assert not [name for name in step.saved if 'mark' in name]
        assert marks.Reader(run.session, step.marks).late(2) == 'the update of the variables'
