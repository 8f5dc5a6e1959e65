"""The options of a session, from what was asked and where the towers run."""

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import identity, structs

_ROW_UPDATES = 'ResourceScatter', 'ResourceSparseApply'


def make(config: config_lib.DeviceConfig, placement: structs.Placement) -> tf.ConfigProto:
    """The options of a session, or of a server, in which then only the server's count.

    Several towers on the CPU get one thread inside an operation and as many operations at once as there are cores:
    1.13 to 1.25 times the speed of TensorFlow's defaults on small networks, as the towers already fill the cores. GPUs
    and a single tower keep the defaults. The pools are the process's own: its first session decides (`process.claim`).

    A session on the CPU leaves GPUs alone. One on GPUs takes those of the placement, lets their memory grow, and puts what
    has no GPU kernel on the CPU, unless the config says otherwise.

    Args:
      config: what the user has set.
      placement: devices of the towers.
    """
    several = len(placement.towers) > 1
    soft = config.placement == 'soft' or (config.placement == 'auto' and not placement.fake)
    proto = tf.ConfigProto(allow_soft_placement=soft, log_device_placement=config.log_placement)
    proto.device_count['CPU'] = len(placement.towers) + 1 if placement.fake and several else 1
    proto.device_count['GPU'] = 0 if placement.fake else len(placement.gpus)
    if not placement.fake:
        _set_gpus(proto, config, placement)
    if placement.fake and several:
        proto.intra_op_parallelism_threads = 1
        proto.inter_op_parallelism_threads = identity.cores()
    if config.intra_op_threads is not None:
        proto.intra_op_parallelism_threads = config.intra_op_threads
    if config.inter_op_threads is not None:
        proto.inter_op_parallelism_threads = config.inter_op_threads
    proto.use_per_session_threads = config.per_session_threads
    return proto


def for_graph(proto: tf.ConfigProto, config: config_lib.DeviceConfig, placement: structs.Placement, graph: tf.Graph) -> tf.ConfigProto:
    """The options for the session of a training graph: whether TensorFlow rewrites it before the first step (Grappler).

    That takes most of the first step (80 % with ResNet-50 on 4 towers), again for each set of fetches. On fake GPUs the steps
    of dense networks are as fast without or faster (0 to 5 %), those that update rows of a table 5 % slower. On GPUs it chooses
    the layout of images, so it stays on.
    """
    mode = config.graph_optimizer
    if mode == 'auto':
        by_rows = any(operation.type.startswith(_ROW_UPDATES) for operation in graph.get_operations())
        mode = 'off' if placement.fake and not by_rows else 'on'
    made = tf.ConfigProto()
    made.CopyFrom(proto)
    made.graph_options.rewrite_options.disable_meta_optimizer = mode == 'off'
    return made


def environment(config: config_lib.DeviceConfig, placement: structs.Placement) -> dict[str, str]:
    """What TensorFlow reads from the environment, not from a session's options, when it makes its GPU devices."""
    if placement.fake or config.gpu_thread_mode == 'global':
        return {}
    count = {} if config.gpu_thread_count is None else {'TF_GPU_THREAD_COUNT': str(config.gpu_thread_count)}
    return {'TF_GPU_THREAD_MODE': config.gpu_thread_mode, **count}


def _set_gpus(proto: tf.ConfigProto, config: config_lib.DeviceConfig, placement: structs.Placement) -> None:
    options = proto.gpu_options
    options.allow_growth = config.gpu_allow_growth
    options.visible_device_list = ','.join(str(number) for number, _ in placement.gpus)
    options.per_process_gpu_memory_fraction = config.gpu_memory_fraction or 0.0
    options.experimental.use_cuda_malloc_async = config.gpu_allocator == 'cuda_malloc_async'
    if config.gpu_memory_limit_mb is not None:  # TensorFlow has a limit in MiB only for virtual devices, one or more on a GPU
        for _ in placement.gpus:
            options.experimental.virtual_devices.add(memory_limit_mb=[config.gpu_memory_limit_mb] * config.towers_per_gpu)
    elif config.towers_per_gpu > 1:
        options.experimental.num_virtual_devices_per_gpu = config.towers_per_gpu
    if config.xla:
        proto.graph_options.optimizer_options.global_jit_level = tf.OptimizerOptions.ON_1
