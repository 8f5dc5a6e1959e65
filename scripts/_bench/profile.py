"""Where a step's time goes: the operations of traced steps of the whole product, by what they belong to."""

import collections
import re
import statistics
import time
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from scripts._bench import sides

_STEPS, _WARM = 20, 10
_PARTS = (
    ('transfers', re.compile(r'(_Send|_Recv|MEMCPY|/_\d+$|^_)')),
    ('input', re.compile(r'^input/')),
    ('towers', re.compile(r'^tower_\d+/')),
    ('reduce', re.compile(r'^average/')),
    ('apply', re.compile(r'^(apply|count)/')),
)


class Tracer(tf.train.SessionRunHook):
    """Traces some steps after the first ones; `shares` tells where their time went."""

    def __init__(self) -> None:
        """Traces nothing yet."""
        self._step = 0
        self._began = 0.0
        self._walls: list[float] = []
        self._spans: list[float] = []
        self._busy: collections.Counter[str] = collections.Counter()

    def before_run(self, run_context: tf.train.SessionRunContext) -> tf.train.SessionRunArgs | None:
        """Asks for a trace of the steps that count."""
        self._step += 1
        self._began = time.perf_counter()
        traced = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        return tf.train.SessionRunArgs([], options=traced) if self._step > _WARM else None

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Adds the step's operations to what they belong to."""
        nodes = list(_nodes(run_values.run_metadata.step_stats))
        if self._step <= _WARM or not nodes:
            return
        self._walls.append(time.perf_counter() - self._began)
        self._spans.append((max(end for _, _, end in nodes) - min(start for _, start, _ in nodes)) / 1e6)
        for name, start, end in nodes:
            self._busy[_part(name)] += end - start

    def shares(self) -> dict[str, str]:
        """Of a step: its wall time, the host's part in it, and the share of each kind in the time of all operations."""
        wall, span = statistics.median(self._walls), statistics.median(self._spans)
        total = sum(self._busy.values())
        rows = {f'{part}, of all operations': f'{busy / total:.0%}' for part, busy in self._busy.most_common()}
        at_once = total / 1e6 / sum(self._spans)
        return {
            'a traced step': f'{1000 * wall:.2f} ms', 'outside of TensorFlow (host)': f'{max(0.0, 1 - span / wall):.0%}',
            'operations at once': f'{at_once:.2f}', **rows,
        }  # fmt: skip


def measure(case: sides.Case) -> dict[str, str]:
    """Rows of a table for one workload."""
    tracer = Tracer()
    with sides.product(case, hooks=[tracer]) as step:
        for _ in range(_WARM + _STEPS):
            step()
    return tracer.shares()


def _nodes(stats: tf.RunMetadata) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of each operation, in microseconds; what stands for a whole function is left to its parts."""
    for device in stats.dev_stats:
        for node in device.node_stats:
            start = node.all_start_micros
            yield node.node_name, start, start + max(node.op_end_rel_micros, 0)


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS if pattern.search(name)), 'bookkeeping')
