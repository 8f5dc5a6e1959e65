"""What goes over the network in a step, and how long each machine works in it, from a traced step now and then."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from towers.hooks import every

_RECEIVED = 'RecvTensor'
_MOST_TRACES = 6  # one after the other


class NetworkHook(tf.train.SessionRunHook):
    """Writes, for each task of a cluster, bytes and messages into it and out of it, and the milliseconds that its towers work.

    The tags are `cluster/worker_0/bytes_in`, `bytes_out`, `messages_in`, `messages_out`, `work_ms`, `wait_ms` (the step less the
    work), and `examples_per_sec`, by the last step that was not recorded. One that is looked at costs more than another, as
    TensorFlow records all operations of it.

    TensorFlow's record of a step may lack some of what crossed, or a machine. What crosses is the same in each step but for the
    size of a last batch, so the most that was ever recorded counts, and steps are looked at until nothing is added any more.

    Args:
      step: int64 scalar, global_step after the step.
      when: of the steps to look at; it also gives the clock.
      write: takes a step and its scalars, such as `writers.EventWriter.scalars`.
      examples: those of a step that each task's towers have, by the task as in the tags.
    """

    def __init__(
        self,
        step: tf.Tensor,
        *,
        when: every.Every,
        write: Callable[[int, Mapping[str, Any]], None],
        examples: Mapping[str, float] | None = None,
    ) -> None:
        self._usual = tf.train.SessionRunArgs(step)
        self._traced = tf.train.SessionRunArgs(step, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))
        self._when, self._write = when, write
        self._next = False
        self._examples = examples or {}
        self._started, self._usual_secs = 0.0, 0.0
        self._step = 0  # the last one
        self._known: dict[str, float] = {}
        self._traces = 0  # in a row

    def steps_until_due(self, step: int) -> float:
        """A step that is looked at is made alone."""
        return 1 if self._next else self._when.next(step) - step

    def before_run(self, run_context: tf.train.SessionRunContext) -> tf.train.SessionRunArgs:
        """Asks for a trace where the step before was one of those to look at."""
        self._started = self._when.clock()
        return self._traced if self._next else self._usual

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Writes what was recorded."""
        step, was_traced = int(run_values.results), self._next
        secs = self._when.clock() - self._started
        if not was_traced:
            self._usual_secs = secs / max(1, step - self._step)  # a call may make several
        else:
            self._look_at(step, scalars(run_values.run_metadata.step_stats, 1000 * secs))
        self._step = step
        is_due = self._when.due(step)
        self._next = self._traces > 0 if was_traced else is_due

    def _look_at(self, step: int, found: Mapping[str, float]) -> None:
        """Writes what is known, unless the record of this step added to it: then the next one is looked at too."""
        counts = {tag: max(value, self._known.get(tag, 0)) for tag, value in found.items() if not tag.endswith('_ms')}
        has_grown = any(value != self._known.get(tag) for tag, value in counts.items())
        self._known.update({**found, **counts})
        self._traces += 1
        if not has_grown or self._traces == _MOST_TRACES:
            self._traces = 0
            secs = self._usual_secs
            rates = {f'cluster/{task}/examples_per_sec': count / secs for task, count in self._examples.items() if secs > 0}
            self._write(step, {**self._known, **rates})


def scalars(stats: Any, step_ms: float) -> dict[str, float]:
    """The tags and their values.

    Args:
      stats: StepStats of a fully traced step.
      step_ms: how long it took.
    """
    found: collections.Counter[str] = collections.Counter()
    spans: dict[str, tuple[int, int]] = {}  # microseconds of each task's own clock
    nodes = [(task_of(device.device), node) for device in stats.dev_stats for node in device.node_stats]
    for task, node in nodes:
        if node.node_name == _RECEIVED:
            found.update(_transfer(node))
        elif node.node_name.startswith('tower_'):
            start, end = node.all_start_micros, node.all_start_micros + node.all_end_rel_micros
            first, last = spans.get(task, (start, end))
            spans[task] = min(first, start), max(last, end)
    made: dict[str, float] = {f'cluster/{name}': value for name, value in sorted(found.items())}
    for task, (first, last) in sorted(spans.items()):
        made[f'cluster/{task}/work_ms'] = (last - first) / 1000
        made[f'cluster/{task}/wait_ms'] = max(0.0, step_ms - (last - first) / 1000)
    return made


def _transfer(node: Any) -> dict[str, int]:
    """What a received tensor adds to the counts; nothing where it came from another device of the same task."""
    source, target = (task_of(end) for end in node.timeline_label.rpartition(' from ')[2].split(' to '))
    if source == target:
        return {}
    size = sum(output.tensor_description.allocation_description.requested_bytes for output in node.output)
    return {f'{target}/bytes_in': size, f'{source}/bytes_out': size, f'{target}/messages_in': 1, f'{source}/messages_out': 1}


def task_of(device: str) -> str:
    """The task of a device as in the tags."""
    spec = tf.DeviceSpec.from_string(device)
    return f'{spec.job}_{spec.task}'
