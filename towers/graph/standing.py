"""What the tasks that hold a run's variables say of these: the step that they stand at, and whether all of it is written.

A server keeps its variables when a session ends or its master dies. Whether the next session may go on with them as they
are is told by notes beside them, on each task: `begun`, the step whose update began last, and `done`, the last step that
was written whole, with what belongs to it outside the variables. `begun` is written on every task before an update writes
anything on any, `done` on each after it has written everything on all. So the variables stand whole at a step where one
task has not begun another and one is done with it.

A step of a session that was given up may still be under way in a task. So each session claims the notes by a number of its
own, and an update that has said that it begins ends there where the number is another's. A session that claims the notes
and then reads them finds what such an update said, or the update finds the claim.

With `done` goes what the step reports, so that the next session can report a step whose own session did not live to do so.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from towers import structs

_CONTAINER = 'towers_standing'
_SCOPE = 'standing/'  # entered again
_NOWHERE = (0, 0)  # place of an input that has none
_IN_CHANGE = -1  # as `begun`: the variables are being set, to whatever step
_ABSENT = (tf.errors.FailedPreconditionError, tf.errors.NotFoundError)  # TensorFlow's words for a variable that nobody has set


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """A moment of a run between two steps.

    Attributes:
      step: global_step.
      examples: trained on so far.
      skipped: steps that were held back so far.
      taken: place of the batch that was taken last, as `structs.Input.taken`; zeros where the input has none.
      report: name -> what the step reported; empty where the step was held back, or the variables were set from elsewhere.
    """

    step: int
    examples: int
    skipped: int
    taken: tuple[int, ...]
    report: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Note:
    """What a task says.

    Attributes:
      begun: step whose update began last; below 0 while the variables are set from elsewhere.
      done: where the last step that was written whole has led.
      run: what the variables are of, as it was given to `Standing.settle`.
    """

    begun: int
    done: Point
    run: str


def whole(notes: Sequence[Note]) -> Point | None:
    """Where all variables stand, by the notes of all tasks; None where an update may have written a part of them."""
    reached = max(note.done for note in notes)
    return reached if min(note.begun for note in notes) == reached.step else None


def host(variable: tf.Variable) -> str:
    """The CPU of the task that holds a variable."""
    spec = tf.DeviceSpec.from_string(variable.device)
    return f'/job:{spec.job}/task:{spec.task}/cpu:0'


def of(
    variables: Sequence[tf.Variable], counters: Sequence[tf.Variable], source: structs.Input, report: Mapping[str, tf.Tensor]
) -> 'Standing':
    """The notes on all tasks that hold `variables`; the counters, which are in the notes, may be elsewhere."""
    counted = {counter.ref() for counter in counters}
    return Standing(list(dict.fromkeys(host(v) for v in variables if v.ref() not in counted)), counters, source, report)


class _Notes:
    """The notes of one task, and what is done with them."""

    def __init__(self, device: str, session: int) -> None:
        self.device = device
        with tf.device(device):
            self._session = tf.constant(session, tf.int64)
            self.owner, self.begun = self._variable('owner', tf.int64, []), self._variable('begun', tf.int64, [])
            self.done, self.run = self._variable('done', tf.int64, None), self._variable('run', tf.string, [])
            read = tf.raw_ops.ReadVariableOp
            self.read = (
                read(resource=self.begun, dtype=tf.int64),
                read(resource=self.done, dtype=tf.int64),
                read(resource=self.run, dtype=tf.string),
            )

    def write(self, note: tf.Tensor, value: tf.Tensor) -> tf.Operation:
        with tf.device(self.device):
            return tf.raw_ops.AssignVariableOp(resource=note, value=value)

    def claim(self) -> tf.Operation:
        return self.write(self.owner, self._session)

    def require(self) -> tf.Operation:
        with tf.device(self.device):
            found = tf.raw_ops.ReadVariableOp(resource=self.owner, dtype=tf.int64)
            mine = tf.equal(found, self._session)
            return tf.raw_ops.Assert(condition=mine, data=['a newer session has taken these variables over'])

    @staticmethod
    def _variable(name: str, dtype: tf.DType, shape: Sequence[int] | None) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container=_CONTAINER)


class Standing:
    """The notes of all tasks that hold the variables of a graph; makes its operations for sessions at once.

    Args:
      devices: a CPU of each of these tasks.
      counters: the int64 variables of a `Point`'s step, examples and skipped.
      source: the input, whose place is noted where it has one.
      report: name -> fp32 scalar of a step.

    Attributes:
      devices, names: as given; of the report.
      counted: references to the counters.
      claim: operation that takes the variables over from the session that had them.
      void: operation that notes that the variables are being set, to be run before that begins.
    """

    def __init__(
        self, devices: Sequence[str], counters: Sequence[tf.Variable], source: structs.Input, report: Mapping[str, tf.Tensor]
    ) -> None:
        self.devices = tuple(devices)
        self.names = tuple(report)
        self.counted = frozenset(counter.ref() for counter in counters)
        with tf.name_scope(_SCOPE):
            number = random.SystemRandom().getrandbits(62)  # whatever seeds there are
            self._notes = [_Notes(device, number) for device in devices]
            self._taken = _taken(source)
            self._report = tf.cast(tf.bitcast(tf.stack(list(report.values())), tf.int32), tf.int64)  # goes with the whole numbers
            self.claim = tf.group(*[notes.claim() for notes in self._notes], name='claim')
            self.void = tf.group(*self._write_begun(tf.constant(_IN_CHANGE, tf.int64)), name='void')
            self._run, self._reported = tf.placeholder(tf.string, []), tf.placeholder(tf.int64, [None])
            named = [notes.write(notes.run, self._run) for notes in self._notes]
            now = [counter.read_value() for counter in counters]
            place = tf.constant(_NOWHERE, tf.int64) if source.taken is None else source.taken.read_value()
            with tf.control_dependencies([*named, *self._write_done(now, self._reported, place)]):
                self._settle = tf.group(*self._write_begun(now[0]), name='settle')
            self._counted = [tf.placeholder(tf.int64, []) for _ in counters]
            self._count = tf.group(
                *[counter.assign(value, read_value=False) for counter, value in zip(counters, self._counted, strict=True)], name='counted'
            )

    def begins(self, step: tf.Tensor, after: Sequence[tf.Operation | tf.Tensor]) -> list[tf.Operation]:
        """Operations that note the beginning of the update to a step; it may write nothing before they all have run.

        Args:
          step: int64 scalar.
          after: what the update waits for anyhow, so that it does not begin long before it writes.
        """
        with tf.name_scope(_SCOPE), tf.control_dependencies(after):
            made = []
            for notes, begun in zip(self._notes, self._write_begun(step), strict=True):
                with tf.control_dependencies([begun]):
                    made.append(notes.require())
            return made

    def ends(self, counted: Sequence[tf.Tensor], *, held_back: bool = False) -> list[tf.Operation]:
        """Operations that note the end of a step; to be made so that they run after all that it writes.

        Args:
          counted: int64 scalars, the counters after the step.
          held_back: whether the step is one that was.
        """
        with tf.name_scope(_SCOPE):
            return self._write_done(counted, tf.constant([], tf.int64) if held_back else self._report, self._taken)

    def read(self, session: tf.Session) -> list[Note | None]:
        """Each task's note; None where it has none.

        Raises:
          tf.errors.OpError: a task does not answer.
        """
        return [self._note(notes, session) for notes in self._notes]

    def reported(self, session: tf.Session) -> dict[str, float]:
        """What the last step reported, its counters too, as all tasks say once they are settled; empty where nobody knows."""
        note = self._note(self._notes[0], session)
        if note is None or not note.done.report:
            return {}
        return {'step': note.done.step, 'examples_seen': note.done.examples, 'skipped': note.done.skipped, **note.done.report}

    def settle(self, session: tf.Session, run: str, report: Mapping[str, float] | None = None) -> None:
        """Notes that all variables are set, to the step that the counters say, what they are of, and what the step reported."""
        values = np.array(list((report or {}).values()), np.float32)
        session.run(self._settle, {self._run: run, self._reported: values.view(np.int32)})

    def count(self, session: tf.Session, point: Point) -> None:
        """Sets the counters."""
        session.run(self._count, dict(zip(self._counted, (point.step, point.examples, point.skipped), strict=True)))

    def _write_begun(self, step: tf.Tensor) -> list[tf.Operation]:
        return [notes.write(notes.begun, step) for notes in self._notes]

    def _write_done(self, counted: Sequence[tf.Tensor], report: tf.Tensor, place: tf.Tensor) -> list[tf.Operation]:
        value = tf.concat([tf.stack([*counted, tf.size(report, out_type=tf.int64)]), report, place], 0)
        return [notes.write(notes.done, value) for notes in self._notes]

    def _note(self, notes: _Notes, session: tf.Session) -> Note | None:
        try:
            begun, done, run = session.run(notes.read)
        except _ABSENT:
            return None
        step, examples, skipped, size = map(int, done[:4])
        values, taken = np.split(done[4:], [size])
        report = dict(zip(self.names, values.astype(np.int32).view(np.float32).tolist(), strict=False))
        return Note(int(begun), Point(step, examples, skipped, tuple(taken.tolist()), report), run.decode())


def _taken(source: structs.Input) -> tf.Tensor:
    """int64 [any], the place of the batch that this step takes."""
    if source.taken is None or source.mark is None:
        return tf.constant(_NOWHERE, tf.int64)
    with tf.control_dependencies([source.mark.advance]):
        return source.taken.read_value()
