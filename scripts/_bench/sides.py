"""The ways to train a workload that are measured against each other.

A side is a function from (workload, towers, source) to a context of a `Step`: a call makes one step on the global batch, or as many
as it is given where it takes a number; it may return the seconds that they took, where a call costs much beside them. All of them train
with momentum on the same examples: `constants` are part of the graph, a `pipeline` is read by tf.data.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow.compat.v1 as tf

import towers
from scripts._bench import running, workloads
from towers.jobs import program

Step: TypeAlias = Callable[..., Any]
SOURCES = ('constants', 'pipeline')


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained: the workload, on how many towers, from which source."""

    workload: workloads.Workload
    towers: int
    source: str

    @property
    def global_batch(self) -> int:
        return self.workload.batch * self.towers


@contextlib.contextmanager
def product(case: Case, hooks: Sequence[tf.train.SessionRunHook] = ()) -> Iterator[Step]:
    """Towers as it comes: default hooks, reports and checkpoints, all written to a folder; `hooks` besides."""
    with tempfile.TemporaryDirectory(prefix='towers-benchmark-') as folder, _silent():
        config = towers.Config(
            num_gpus=case.towers, device='cpu', batch_size=_batch_size(case), train_steps=10**9, model_dir=folder,
            optimizer='momentum', momentum=workloads.MOMENTUM, learning_rate=workloads.RATE, l2=case.workload.l2,
        )  # fmt: skip
        made = program.make(*_given(case), config)
        with running.opened(made, config, hooks) as (_, step):
            yield step


def _batch_size(case: Case) -> int:
    """Examples of the dataset for each tower: one where they stand for a constant batch, since no other side reads any then."""
    return case.workload.batch if case.source == 'pipeline' else 1


def _given(case: Case) -> tuple[Callable[..., towers.ModelOutput], Callable[[], tf.data.Dataset]]:
    """Model and dataset as a user gives them; with constants the examples are numbers that the model does not look at."""
    work = case.workload
    if case.source == 'pipeline':
        return work.model, lambda: work.pipeline(case.global_batch)

    def model(batch: tf.Tensor, *, training: bool) -> towers.ModelOutput:
        del batch
        return work.model(_constants(work, work.batch), training=training)

    return model, lambda: tf.data.Dataset.range(2**62)


@contextlib.contextmanager
def one_device(case: Case) -> Iterator[Step]:
    """One device, TensorFlow's default settings, the whole global batch: the run in which replication is free."""
    with tf.Graph().as_default():
        loss = loss_of(case.workload, _batch(case))
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            train = make_optimizer().minimize(loss)
        with opened(tf.ConfigProto()) as session:
            yield lambda: session.run([train, loss])


@contextlib.contextmanager
def classic(case: Case) -> Iterator[Step]:
    """The loop of the CIFAR-10 tutorial, by hand: towers, add_n, session.run, default settings."""
    yield from _classic(case, tf.ConfigProto())


@contextlib.contextmanager
def classic_threads(case: Case) -> Iterator[Step]:
    """The same with the threads that Towers takes."""
    yield from _classic(case, tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=os.cpu_count()))


def _classic(case: Case, proto: tf.ConfigProto) -> Iterator[Step]:
    proto.device_count['CPU'] = case.towers + 1
    with tf.Session(graph=tf.Graph(), config=proto):  # the first session of a process decides on its threads
        pass
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        optimizer, towers_gradients, losses = make_optimizer(), [], []
        for index, share in enumerate(shares(case)):
            with tf.device(_on(index + 1)), tf.variable_scope('', reuse=index > 0), tf.name_scope(f'tower_{index}'):
                losses.append(loss_of(case.workload, share))
                towers_gradients.append(optimizer.compute_gradients(losses[-1]))
            if index == 0:
                updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        average = [(_mean([gradient for gradient, _ in each]), each[0][1]) for each in zip(*towers_gradients, strict=True)]
        with tf.control_dependencies(updates):
            train = optimizer.apply_gradients(average)
        loss = tf.add_n(losses) / case.towers
        with opened(proto) as session:
            yield lambda: session.run([train, loss])


def _on(index: int) -> Callable[[tf.Operation], str]:
    """Variables on the parameter device, everything else on the tower's."""
    return lambda operation: '/cpu:0' if operation.type in ('VarHandleOp', 'VariableV2', 'ReadVariableOp') else f'/cpu:{index}'


def _mean(gradients: list[Any]) -> Any:
    if isinstance(gradients[0], tf.IndexedSlices):
        values = tf.concat([gradient.values for gradient in gradients], 0) / len(gradients)
        return tf.IndexedSlices(values, tf.concat([gradient.indices for gradient in gradients], 0), gradients[0].dense_shape)
    return tf.add_n(gradients) / len(gradients)


def make_optimizer(rate: float = workloads.RATE) -> tf.train.Optimizer:
    """The optimizer that all sides train with."""
    return tf.train.MomentumOptimizer(rate, workloads.MOMENTUM)


def loss_of(
    work: workloads.Workload, batch: Mapping[str, tf.Tensor], trained: Callable[[], Sequence[tf.Variable]] = tf.trainable_variables
) -> tf.Tensor:
    """The loss with the penalty in it, as slim and the tutorials have it; `trained` says on which variables, once they are there."""
    loss = work.model(batch, training=True).loss
    if work.l2:
        loss += work.l2 * tf.add_n([tf.nn.l2_loss(variable) for variable in trained()])
    return loss


def shares(case: Case) -> list[Mapping[str, tf.Tensor]]:
    """The part of the global batch that each tower has."""
    parts = {name: tf.split(value, case.towers) for name, value in _batch(case).items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(case.towers)]


def _batch(case: Case) -> Mapping[str, tf.Tensor]:
    if case.source == 'constants':
        return _constants(case.workload, case.global_batch)
    iterator = tf.data.make_initializable_iterator(batches(case).prefetch(tf.data.AUTOTUNE))
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def batches(case: Case) -> tf.data.Dataset:
    """Global batches without end from the pipeline that all sides share, not made ahead."""
    return case.workload.pipeline(case.global_batch).batch(case.global_batch, drop_remainder=True)


def _constants(work: workloads.Workload, examples: int) -> Mapping[str, tf.Tensor]:
    """A batch that is made once: constants, which TensorFlow does not make anew at each step."""
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={'CPU': 1})) as session:
        values = session.run(work.features(examples))
    return {name: tf.constant(value) for name, value in values.items()}


@contextlib.contextmanager
def opened(proto: tf.ConfigProto) -> Iterator[tf.Session]:
    """A session on the default graph whose variables and iterators are there."""
    with tf.Session(config=proto) as session:
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        yield session


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Progress lines are written, as in a training, to where nobody reads them."""
    with open(os.devnull, 'w') as unread, contextlib.redirect_stdout(unread):
        yield
