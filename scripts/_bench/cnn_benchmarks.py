"""tf_cnn_benchmarks, from a checkout that is on the path: its variable managers round the model function of a workload.

What its BenchmarkCNN does round a manager is done here as it does it: L2 on the last tower alone, for all of them; the updates of batch
norm by tower 0; on CPUs variables on /cpu:0, which is a tower's device too, and threads as TensorFlow has them.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from scripts._bench import sides, workloads

_PARAMETERS = '/cpu:0'
_UNSCALED = types.SimpleNamespace(  # its AutoLossScaleParams for fp32
    enable_auto_loss_scale=False, loss_scale=None, loss_scale_normal_steps=None, inc_loss_scale_every_n=1000, is_chief=True
)


@contextlib.contextmanager
def parameter_server(case: sides.Case) -> Iterator[sides.Step]:
    """--variable_update=parameter_server: variables on one device, each tower reads them."""
    yield from _opened(case, lambda variable_mgr, bench: variable_mgr.VariableMgrLocalFetchFromPS(bench), workloads.RATE)


@contextlib.contextmanager
def replicated(case: sides.Case) -> Iterator[sides.Step]:
    """--variable_update=replicated: each tower has variables of its own.

    Its gradients are a sum over the towers, where those of the others are a mean, so it has an Nth of the learning rate.
    """
    yield from _opened(
        case, lambda variable_mgr, bench: variable_mgr.VariableMgrLocalReplicated(bench, None, 0, 10, 1), workloads.RATE / case.towers
    )


def _opened(case: sides.Case, make: Callable[[Any, Any], Any], rate: float) -> Iterator[sides.Step]:
    tf.disable_v2_behavior()  # what its own script begins with
    manager = make(_variable_mgr(), _stand_in(case.towers))
    manager.benchmark_cnn.devices = manager.get_devices()
    with tf.Graph().as_default():
        train, loss = _step(case, manager, rate)
        prepare = manager.get_post_init_ops()
        with sides.opened(tf.ConfigProto(allow_soft_placement=True, device_count={'CPU': case.towers})) as session:
            session.run(prepare)
            yield lambda: session.run([train, loss])


def _variable_mgr() -> Any:
    """The module of the checkout, with what TensorFlow has removed since."""
    operations = importlib.import_module('variable_mgr_util').ops
    if not hasattr(operations, 'Tensor'):  # it asks for gradients that are not IndexedSlices by this name
        operations.Tensor = tf.Tensor
    return importlib.import_module('variable_mgr')


def _stand_in(towers: int) -> types.SimpleNamespace:
    """What a manager asks its BenchmarkCNN for: the defaults of its flags with --device=cpu --local_parameter_device=cpu."""
    parameters = types.SimpleNamespace(
        num_gpus=towers, gpu_indices='', local_parameter_device='cpu', use_resource_vars=False, use_fp16=False, xla_compile=False,
        variable_consistency='strong', compact_gradient_transfer=True, gradient_repacking=0, all_reduce_spec=None, hierarchical_copy=False,
        network_topology=None, agg_small_grads_max_bytes=0, agg_small_grads_max_group=10,
    )  # fmt: skip
    return types.SimpleNamespace(
        params=parameters, raw_devices=[f'/cpu:{index}' for index in range(towers)], param_server_device=_PARAMETERS,
        local_parameter_device_flag='cpu', enable_auto_loss_scale=False,
    )  # fmt: skip


def _step(case: sides.Case, manager: Any, rate: float) -> tuple[tf.Operation, tf.Tensor]:
    with tf.device(_PARAMETERS):
        shares = sides.shares(case)
    losses, gradients = [], []
    for index, share in enumerate(shares):
        with tf.name_scope(f'tower_{index}'), manager.create_outer_variable_scope(index):
            losses.append(_loss(case, manager, index, share))
            with tf.device(manager.benchmark_cnn.devices[index]):
                gradients.append(_gradients(manager, index, losses[-1]))
        if index == 0:
            operations = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    devices, state = manager.preprocess_device_grads(gradients)
    for index, device in enumerate(devices):
        with tf.device(device):
            loss = tf.reduce_mean(losses)
            pairs = manager.get_gradients_to_apply(index, state)
            manager.append_apply_gradients_ops(state, sides.make_optimizer(rate), pairs, operations, _UNSCALED)
    return tf.group(*operations), loss


def _loss(case: sides.Case, manager: Any, index: int, share: Mapping[str, tf.Tensor]) -> tf.Tensor:
    with tf.device(manager.benchmark_cnn.devices[index]):
        loss = case.workload.model(share, training=True).loss
        if case.workload.l2 and index == case.towers - 1:
            trained = manager.trainable_variables_on_device(index, index)
            loss += case.towers * case.workload.l2 * tf.add_n([tf.nn.l2_loss(variable) for variable in trained])
    return loss


def _gradients(manager: Any, index: int, loss: tf.Tensor) -> list[tuple[Any, tf.Variable]]:
    read = manager.trainable_variables_on_device(index, index)
    written = manager.trainable_variables_on_device(index, index, writable=True)
    return list(zip(tf.gradients(loss, read), written, strict=True))
