"""When one tower reads each weight and has made each gradient, measured in a traced step."""

from collections.abc import Callable

import tensorflow.compat.v1 as tf

from scripts import _network
from towers import config as config_lib
from towers.graph import train_step
from towers.input import inputs
from towers.jobs import connecting, program

_WARM, _STEPS = 3, 5


def measure(
    model: Callable[..., object], dataset: Callable[[], tf.data.Dataset], config: config_lib.Config
) -> tuple[list[_network.Weight], float]:
    """The weights of one tower in time, and how many seconds it computes: of the fastest of some steps, which others disturb least."""
    site = connecting.local(config)
    placement = site.placement
    with tf.Graph().as_default() as graph, tf.device(placement.parameter_device):
        count = train_step.counters(placement.parameter_device)
        source = inputs.training(inputs.open_source(dataset, host=placement.towers[0].host, proto=site.proto), config, placement.towers)
        _, made = program.compute(model, config, source, placement, count.step)
        output = made.outputs[0]
        pairs = [(v, g) for v, g in zip(output.variables, output.gradients, strict=True) if g is not None]
        fetches = [output.output.loss.op, *[tensor.op for _, g in pairs for tensor in tf.nest.flatten(g, expand_composites=True)]]
        init = [tf.global_variables_initializer(), tf.local_variables_initializer(), tf.tables_initializer(), source.initializer]
        with site.session(graph) as session:
            for operation in init:
                session.run(operation)
            traces = [_trace(session, fetches) for _ in range(_WARM + _STEPS)][_WARM:]
    names = [variable.op.name for variable, _ in pairs]
    readers = {name: _readers(graph, f'tower_0/read/{name}/') for name in names}
    weights = []
    trace = min(traces, key=_length)
    work = _length(trace)
    for variable, gradient in pairs:
        last = tf.nest.flatten(gradient, expand_composites=True)[0].op.name
        needed = min((trace[reader][0] for reader in readers[variable.op.name] if reader in trace), default=0.0)
        ready = trace[last][1] if last in trace else work
        size = (variable.shape.num_elements() or 0) * variable.dtype.size
        weights.append(_network.Weight(variable.op.name, size, needed, max(ready, needed)))
    return weights, work


def _trace(session: tf.Session, fetches: list[tf.Operation]) -> dict[str, tuple[float, float]]:
    """Operation -> (start, end) in seconds from the first that is not of the input."""
    metadata = tf.RunMetadata()
    session.run(fetches, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    found = {
        node.node_name: (node.all_start_micros / 1e6, (node.all_start_micros + node.all_end_rel_micros) / 1e6)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        if node.node_name.startswith('tower_0/')
    }
    first = min(start for start, _ in found.values())
    return {name: (start - first, end - first) for name, (start, end) in found.items()}


def _length(trace: dict[str, tuple[float, float]]) -> float:
    """Seconds to the end of the last operation."""
    return max(end for _, end in trace.values())


def _readers(graph: tf.Graph, prefix: str) -> list[str]:
    """The operations that use what a tower has read of a variable."""
    reads = [op for op in graph.get_operations() if op.name.startswith(prefix)]
    return [user.name for op in reads for tensor in op.outputs for user in tensor.consumers() if not user.name.startswith(prefix)]
