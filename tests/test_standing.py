"""Notes about where variables stand: what they allow, and that a step which was given up can't write behind them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import standing

DEVICE = '/job:localhost/task:0/cpu:0'


def point(step, batch=0):
    return standing.Point(step, 10 * step, 0, (0, batch))


def note(begun, done, batch=0):
    return standing.Note(begun, point(done, batch), '')


@pytest.mark.parametrize(
    ('notes', 'found'),
    [
        ([note(7, 7)], point(7)),
        ([note(8, 7)], None),  # begun and not done
        ([note(7, 7), note(7, 7)], point(7)),
        ([note(8, 7), note(7, 7)], point(7)),  # not begun everywhere, so nothing is written
        ([note(8, 7), note(8, 7)], None),
        ([note(8, 8), note(8, 7)], point(8)),  # done somewhere, so all is written
        ([note(-1, 7), note(-1, 7)], None),  # being set
        ([note(5, 5), note(-1, 5)], None),
        ([note(7, 7, 3), note(7, 7, 4)], point(7, 4)),  # a batch that was held back
    ],
)  # fmt: skip
def test_variables_are_whole_where_no_update_can_have_written_a_part_of_them(notes, found):
    assert standing.whole(notes) == found


class Session:
    """A graph with notes and an update of one variable, on the server of this process."""

    def __init__(self, target):
        with tf.Graph().as_default() as graph, tf.device(DEVICE):
            zeros = {'initializer': tf.zeros_initializer(), 'use_resource': True, 'trainable': False}
            counters = [tf.get_variable(name, [], tf.int64, **zeros) for name in ('step', 'examples', 'skipped')]
            self.weight = tf.get_variable('weight', [], **zeros)
            source = structs.Input((), tf.constant(1), tf.no_op(), (), None, None, '')
            self.go, self.reached = tf.placeholder(tf.float32, []), tf.placeholder(tf.string, [])
            self.noted = standing.of([*counters, self.weight], counters, source, {'loss': self.go / 3, 'rate': -self.go})
            step, after = counters[0].read_value() + 1, counters[1].read_value() + 8
            with tf.control_dependencies(self.noted.begins(step, [self.go])):
                write = self.weight.assign_add(self.go, read_value=False)
            with tf.control_dependencies([write]):
                counts = [counters[0].assign(step, read_value=False), counters[1].assign(after, read_value=False)]
                ends = self.noted.ends([step, after, counters[2].read_value()])
            self.update = tf.group(*counts, *ends)
            self.hold_back = self.noted.ends([counters[0].read_value(), counters[1].read_value(), tf.constant(5, tf.int64)], held_back=True)
            self.init = tf.global_variables_initializer()
        self.session = tf.Session(target, graph=graph)

    def start(self):
        self.session.run(self.noted.claim)
        self.session.run(self.noted.void)
        self.session.run(self.init)
        self.noted.settle(self.session, 'a run')

    def step(self):
        self.session.run(self.update, {self.go: 1.0})

    def where(self):
        return standing.whole(self.noted.read(self.session))


@pytest.fixture(scope='module')
def target():
    return tf.train.Server.create_local_server().target


def test_a_session_goes_on_where_another_was_and_the_other_can_not_write_any_more(target):
    first, second = Session(target), Session(target)
    assert first.noted.read(first.session) == [None]
    first.start()
    for _ in range(3):
        first.step()
    assert second.where() == standing.Point(3, 24, 0, (0, 0))
    second.session.run(second.noted.claim)
    with pytest.raises(tf.errors.InvalidArgumentError, match='a newer session has taken these variables over'):
        first.step()
    assert second.session.run(second.weight) == 3 and second.where() is None  # the older one has said that it begins
    second.noted.settle(second.session, 'a run')
    second.step()
    assert second.where().step == 4 and second.session.run(second.weight) == 4
    [found] = second.noted.read(second.session)
    assert found.run == 'a run'
    reported = {'loss': np.float32(1) / np.float32(3), 'rate': -1.0}
    assert found.done.report == reported == {name: np.float32(value) for name, value in found.done.report.items()}
    assert second.noted.reported(second.session) == {'step': 4, 'examples_seen': 32, 'skipped': 0, **reported}
    third = Session(target)  # goes on behind a step that the second one may not have lived to report
    third.session.run(third.noted.claim)
    third.noted.settle(third.session, 'a run', third.noted.read(third.session)[0].done.report)
    assert third.where() == second.where() and third.noted.reported(third.session) == {
        'step': 4,
        'examples_seen': 32,
        'skipped': 0,
        **reported,
    }
    third.session.run(third.hold_back, {third.go: 1.0})
    assert third.where().skipped == 5 and third.noted.reported(third.session) == {}
    second.session.run(second.noted.claim)
    second.session.run(second.noted.void)
    assert second.where() is None
    second.noted.count(second.session, standing.Point(9, 72, 1, (0, 0)))
    second.noted.settle(second.session, 'a run')
    assert second.where() == standing.Point(9, 72, 1, (0, 0))
