"""The reports that cost something, computed only in the steps in which they are due: summaries, norms, per-tower values."""

from collections.abc import Callable, Iterable, Sequence

import tensorflow.compat.v1 as tf

from towers import structs
from towers.hooks import every, looks


class SummaryHook(tf.train.SessionRunHook):
    """Fetches `TrainStep.scalars` and `TrainStep.summaries` in the steps in which they are due, and writes them.

    The steps in which they are due fetch one more set of tensors than the others, so TensorFlow prepares twice in all.
    """

    def __init__(
        self,
        train_step: structs.TrainStep,
        *,
        when: every.Every,
        write: Callable[[int, tf.Summary], None],
        seen: looks.Looks | None = None,
    ) -> None:
        """Reports to `write`.

        Args:
          train_step: what to report.
          when: of the summaries.
          write: takes a step and its Summary, such as `writers.EventWriter.summary`.
          seen: the steps of which hooks are told; None = all.
        """
        self._global_step = train_step.global_step
        self._prefixes = train_step.summary_prefixes
        self._names = tuple(train_step.scalars)
        self._quiet = tf.train.SessionRunArgs((train_step.step,))
        self._full = tf.train.SessionRunArgs((train_step.step, *train_step.scalars.values(), *train_step.summaries))
        self._when = when
        self._seen = seen or looks.Looks()
        self._seen.at(when)
        self._write = write
        self._step = 0
        self._stride = 1  # steps between two looks, as far as was seen
        self._steps: int | None = None  # that the call makes, where that is planned
        self._coming = 0  # the step that it ends with
        self._back: int | None = None
        self._due = False
        self._began = 0.0
        self._usual: float | None = None  # seconds a step of a call without summaries
        self._prepared = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads the step that the session starts from."""
        self._step = int(session.run(self._global_step))

    def steps_until_due(self, step: int) -> float:
        """How many steps after `step` the summaries are due."""
        return self._when.next(step) - step

    def planned(self, step: int, steps: int) -> None:
        """Says that the next call makes so many steps after `step`."""
        self._step, self._steps = step, steps
        self._when.begins(step)  # the call before may have ended early

    def went_back(self, step: int) -> None:
        """Takes the steps after `step` as new ones."""
        self._back = step

    def before_run(self, run_context: tf.train.SessionRunContext) -> tf.train.SessionRunArgs:
        """Asks for the summaries where they are due."""
        if self._steps is not None:
            self._coming = self._step + self._steps
        else:
            self._coming = self._step + self._stride if self._seen.step is None else self._seen.step
        self._due = self._when.due(self._coming)
        self._began = self._when.clock()
        return self._full if self._due else self._quiet

    def after_run(self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues) -> None:
        """Writes the summaries that were due."""
        step = int(run_values.results[0])
        self._stride, self._step = max(1, step - self._step), step
        if self._due:
            scalars, summaries = run_values.results[1 : 1 + len(self._names)], run_values.results[1 + len(self._names) :]
            values = [tf.Summary.Value(tag=name, simple_value=float(value)) for name, value in zip(self._names, scalars, strict=True)]
            self._write(step, tf.Summary(value=[*values, *merge(summaries, self._prefixes)]))
            self._note_cost()
        elif self._prepared:
            self._usual = (self._when.clock() - self._began) / (self._steps or 1)
        if step < self._coming:  # it was held back, and comes again
            self._step, self._back = step if self._back is None else self._back, None
            self._when.begins(self._step)

    def _note_cost(self) -> None:
        """What these summaries cost above steps without; the first ones don't count, for which TensorFlow prepares itself."""
        if self._prepared and self._usual is not None:
            self._when.took(max(0.0, self._when.clock() - self._began - self._usual * (self._steps or 1)))
        self._prepared = True


def merge(summaries: Iterable[bytes], prefixes: Sequence[str]) -> list[tf.Summary.Value]:
    """The values of serialised Summary protos, their tags without the scopes in which a tower was built."""
    values = [value for proto in summaries for value in tf.Summary.FromString(proto).value]
    for value in values:
        value.tag = strip(value.tag, prefixes)
    return values


def strip(tag: str, prefixes: Sequence[str]) -> str:
    """A tag without the first of `prefixes` that it holds as whole parts between slashes.

    A summary with a family has its scope inside the tag: 'family/tower_0/family/name'. 'tower_1' is no part of
    'tower_10/loss'.
    """
    for prefix in prefixes:
        scope = f'/{prefix.strip("/")}/'
        if scope in f'/{tag}':
            return f'/{tag}'.replace(scope, '/', 1)[1:]
    return tag
