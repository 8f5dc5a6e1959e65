"""Runs whole programs for the tests of the laws: a model on N fake devices, k steps, and what came of them."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.jobs import program

EXACT, FP32_SAME_ORDER, FP32_SUM, HALF = 0.0, 1e-6, 1e-5, 1e-2  # the one table of tolerances
STRATEGIES = ('parameter_server', 'mirrored')
TOWERS = (1, 2, 4)
CASES = [*[(strategy, n) for strategy in STRATEGIES for n in TOWERS], ('collective', 2), ('balanced', 2)]
SEVERAL = [(strategy, n) for strategy, n in CASES if n > 1]

each_case = pytest.mark.parametrize(('strategy', 'n'), CASES)
each_split = pytest.mark.parametrize(('strategy', 'n'), SEVERAL)
each_strategy = pytest.mark.parametrize('strategy', STRATEGIES)

# Sessions of one process share the threads that the first one asked for, so all ask for the same.
THREADS = {'intra_op_threads': 1, 'inter_op_threads': 2}


def config(strategy='parameter_server', n=1, **changes):
    """A Config on fake devices: plain SGD at rate 1, so that a step moves a variable by its gradient."""
    settings = {'optimizer': 'sgd', 'learning_rate': 1.0, 'train_steps': 100, **changes}
    return towers.Config(num_gpus=n, strategy=strategy, device='cpu', **THREADS, **settings)


def rows(*arrays, **named):
    """A dataset function of the arrays' rows: a bare tensor, a tuple, or a dict for named ones."""
    data = named or (arrays if len(arrays) > 1 else arrays[0])
    return lambda: tf.data.Dataset.from_tensor_slices(data)


def numbers(*values):
    return rows(np.array(values, np.float32))


def variable(name, value, **settings):
    """A variable with a known value."""
    value = np.asarray(value)
    settings.setdefault('dtype', tf.float32)
    return tf.get_variable(name, value.shape, initializer=tf.constant_initializer(value), **settings)


@dataclasses.dataclass
class Run:
    """A program in a session, all variables initialised."""

    program: program.Program
    session: tf.Session

    def steps(self, count):
        """The reports of so many steps."""
        step = self.program.step
        return [self.session.run([step.report, step.ops])[0] for _ in range(count)]

    def variables(self):
        """The variables of a checkpoint by name; every copy on another tower must be the same."""
        saved = self.program.step.saved
        found, copies = self.session.run([dict(saved), dict(self._copies())])
        for name, value in copies.items():
            np.testing.assert_array_equal(value, found[re.sub(r'replica_\d+/', '', name)], err_msg=name)
        return found

    def _copies(self):
        local = self.program.graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)
        return {variable.op.name: variable for variable in local if 'replica_' in variable.op.name}


@contextlib.contextmanager
def started(model, dataset, settings, **given):
    """The program of a model in a session of its own, ready for its first step."""
    made = program.make(model, dataset, settings, **given)
    with tf.Session(graph=made.graph, config=made.proto) as session, made.graph.as_default():
        for operation in (made.init, made.step.input.initializer, made.step.sync):
            session.run(operation)
        yield Run(made, session)


def train(model, dataset, settings, *, steps=1, **given):
    """The reports and the variables of so many steps."""
    with started(model, dataset, settings, **given) as run:
        return run.steps(steps), run.variables()
