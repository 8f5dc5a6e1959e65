"""tensorpack, from a checkout that is on the path: its trainers for several GPUs round the model function of a workload."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from scripts._bench import sides

_GPU = '/device:GPU:'


@contextlib.contextmanager
def parameter_server(case: sides.Case) -> Iterator[sides.Step]:
    """Its SyncMultiGPUTrainerParameterServer: each variable on one device, each tower reads it."""
    yield from _opened(case, 'SyncMultiGPUTrainerParameterServer')


@contextlib.contextmanager
def replicated(case: sides.Case) -> Iterator[sides.Step]:
    """Its SyncMultiGPUTrainerReplicated: each tower has variables of its own."""
    yield from _opened(case, 'SyncMultiGPUTrainerReplicated')


def _opened(case: sides.Case, name: str) -> Iterator[sides.Step]:
    trainer = getattr(importlib.import_module('tensorpack.train'), name)(case.towers)
    with tf.Graph().as_default(), tf.device(_on_cpu):
        loss = _set_up(trainer, case)
        trainer.setup_callbacks([importlib.import_module('tensorpack.callbacks').RunUpdateOps()], [])
        with _session(trainer, case):
            yield lambda: trainer.hooked_sess.run([trainer.train_op, loss])


def _set_up(trainer: Any, case: sides.Case) -> tf.Tensor:
    """Has the trainer build the graph; the mean loss of the towers."""
    with tf.device('/cpu:0'):
        shares = sides.shares(case)
    names, left, losses = list(shares[0]), iter(shares), []
    towers = importlib.import_module('tensorpack.tfutils.tower')

    def read() -> list[tf.Tensor]:
        return list(next(left).values())

    def trained() -> Sequence[tf.Variable]:
        tower = towers.get_current_tower_context()
        return tower.get_collection_in_tower(tf.GraphKeys.TRAINABLE_VARIABLES) if tower.has_own_variables else tf.trainable_variables()

    def cost(*values: tf.Tensor) -> tf.Tensor:
        losses.append(sides.loss_of(case.workload, dict(zip(names, values, strict=True)), trained))
        return losses[-1]

    signature = [tf.TensorSpec(value.shape, value.dtype, name) for name, value in shares[0].items()]
    source = importlib.import_module('tensorpack.input_source').TensorInput(read)
    trainer.setup_graph(signature, source, cost, sides.make_optimizer)
    with tf.device('/cpu:0'):
        return tf.add_n(losses) / case.towers


@contextlib.contextmanager
def _session(trainer: Any, case: sides.Case) -> Iterator[None]:
    """What its `train` does before the first step and after the last one; with its own session settings."""
    proto = importlib.import_module('tensorpack.tfutils.common').get_default_sess_config()
    proto.device_count['CPU'] = case.towers + 1
    creator = importlib.import_module('tensorpack.tfutils.sesscreate').NewSessionCreator(config=proto)
    trainer.initialize(creator, importlib.import_module('tensorpack.tfutils.sessinit').JustCurrentSession())
    with trainer.sess.as_default():
        trainer._callbacks.before_train()
        try:
            yield
        finally:
            trainer.hooked_sess.close()


def _on_cpu(operation: tf.Operation) -> str:
    """Its GPU k is /cpu:k+1, as the towers of the other sides."""
    kind, found, index = operation.device.partition(_GPU)
    return f'{kind}/device:CPU:{int(index) + 1}' if found else operation.device
