"""Where reports go: TensorBoard's event files and a file of JSON lines, neither of which can stop a training.

A disk that is full, or any other failure to write, is warned of once; what could not be written is lost, and writing goes
on when it is possible again. Readers never see half a record.
"""

import contextlib
import glob
import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging
from google.protobuf import message

_FAILURES = (OSError, tf.errors.OpError)  # TensorFlow says OutOfRangeError for a file that may not grow
_MOST_READ = 2**27  # bytes of an earlier file that a start reads
_BLOCK = 2**12  # bytes read at a time from the end of a file
_RECORD_FRAME = 16  # bytes of length and checksums round a record
_count = itertools.count()


class EventWriter:
    """Writes TensorBoard events to a file of its own in a folder.

    The file is made at the first event. Its name holds the time in nanoseconds and the process, so that two starts within
    one second write two files, in the order in which TensorBoard reads them. Each event is handed to the operating system
    at once; there is no thread, and no graph is needed.
    """

    def __init__(self, folder: str) -> None:
        """Writes under `folder`, which is made where it is missing."""
        self._folder = folder
        self._file: Any = None
        self._path = ''
        self._size = 0
        self._warned = False

    def start(self, step: int) -> None:
        """Marks a start at `step`: TensorBoard drops what an earlier process wrote at this step and later.

        What was written at the step itself happened before the start, so it is written once more. Where the earlier file
        is too large to look for it, the start is marked at the next step instead, which drops the same but for that.
        """
        again = _written_at(step, self._folder)
        at = step + 1 if again is None else step
        self._write(tf.Event(step=at, session_log=tf.SessionLog(status=tf.SessionLog.START)))
        for event in again or ():
            self._write(event, event.wall_time)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one point for each scalar; a value that isn't one number is left out."""
        scalars = {tag: np.asarray(value) for tag, value in values.items()}
        points = [tf.Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items() if value.size == 1]
        self.summary(step, tf.Summary(value=points))

    def summary(self, step: int, summary: tf.Summary) -> None:
        """Writes a Summary as it is."""
        self._write(tf.Event(step=step, summary=summary))

    def graph(self, graph: tf.Graph) -> None:
        """Writes the graph for TensorBoard's graph view."""
        self._write(tf.Event(graph_def=graph.as_graph_def(add_shapes=True).SerializeToString()))

    def close(self) -> None:
        """Closes the file; a later event begins a new one."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except _FAILURES as error:
                self._warned = _warn(error, self._path, self._warned)

    def _write(self, event: tf.Event, wall_time: float | None = None) -> None:
        event.wall_time = wall_time or time.time()
        try:
            if self._file is None:
                self._open()
            self._append(event)
        except _FAILURES as error:
            self._warned = _warn(error, self._path or self._folder, self._warned)
            self._give_up()

    def _open(self) -> None:
        now = time.time_ns()
        name = f'events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now % 10**9:09d}.{os.getpid()}.{next(_count)}'
        tf.gfile.MakeDirs(self._folder)
        self._path, self._size = os.path.join(self._folder, name), 0
        self._file = tf.python_io.TFRecordWriter(self._path)
        self._append(tf.Event(wall_time=now / 1e9, file_version='brain.Event:2'))

    def _append(self, event: tf.Event) -> None:
        record = event.SerializeToString()
        self._file.write(record)
        self._file.flush()
        self._size += len(record) + _RECORD_FRAME

    def _give_up(self) -> None:
        """Leaves the file with whole records only, since a reader never gets past half a one; the next event begins another."""
        self.close()
        with contextlib.suppress(OSError):  # it was never made, or it isn't on a local disk
            if self._size:
                os.truncate(self._path, self._size)
            else:
                os.remove(self._path)


class JsonLines:
    """Appends JSON objects to a file, one a line, each in a single write."""

    def __init__(self, path: str) -> None:
        """Appends to `path`; a last line that a killed process left unfinished is ended first."""
        self._path = path
        self._file: Any = None
        self._warned = False

    def append(self, values: Mapping[str, Any]) -> OSError | None:
        """Appends one object of numbers, strings, None and arrays; a number that is not finite becomes null.

        Returns:
          what kept it from being written; None where it was
        """
        line = json.dumps({name: _plain(value) for name, value in values.items()}, allow_nan=False)
        try:
            self._file = self._file or self._open()
            self._append(line.encode() + b'\n')
        except OSError as error:
            self._warned = _warn(error, self._path, self._warned)
            self.close()
            return error
        return None

    def cut(self, step: int) -> None:
        """Drops the rows at the end that are of steps after `step`, which will be made again, and what is no whole row.

        The rows before stay as they are, whenever the process is killed.
        """
        self.close()
        try:
            with open(self._path, 'r+b') as file:
                file.truncate(_end_of(step, file))
        except FileNotFoundError:
            return
        except OSError as error:
            self._warned = _warn(error, self._path, self._warned)

    def last_step(self) -> int | None:
        """The step of the last row; None where there is none, or it isn't whole."""
        try:
            with open(self._path, 'rb') as file:
                end = file.seek(0, os.SEEK_END)
                start = file.seek(_start_of_line(file, end) if end else 0)
                return int(json.loads(file.read(end - start))['step'])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def close(self) -> None:
        """Closes the file; a later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> Any:
        os.makedirs(os.path.dirname(self._path) or '.', exist_ok=True)
        file = open(self._path, 'a+b', buffering=0)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b'\n':
                file.write(b'\n')
        return file

    def _append(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(f'only a part of {len(line)} bytes could be written')
        except OSError:
            with contextlib.suppress(OSError):  # it isn't a plain file
                self._file.truncate(size)
            raise


class Reports:
    """What a training reports in its run directory: events for TensorBoard, and rows in metrics.jsonl.

    Attributes:
      counts: name -> number of what happened outside the steps, which each row and event of scalars holds too.
    """

    def __init__(self, model_dir: str) -> None:
        self.events = EventWriter(model_dir)
        self.rows = JsonLines(os.path.join(model_dir, 'metrics.jsonl'))
        self.counts: dict[str, int] = {}

    def row(self, values: Mapping[str, Any]) -> None:
        """Appends a row."""
        self.rows.append({**values, **self.counts})

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a point for each scalar."""
        self.events.scalars(step, {**values, **self.counts})

    def start(self, step: int) -> None:
        """Marks that the training goes on from `step`: what was reported of later steps is void."""
        self.rows.cut(step)
        self.events.start(step)

    def close(self) -> None:
        """Closes the files."""
        self.rows.close()
        self.events.close()


def _end_of(step: int, file: Any) -> int:
    """Where the last row ends that is not of a step after `step`."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = _start_of_line(file, end)
        file.seek(start)
        with contextlib.suppress(ValueError, TypeError):
            row = json.loads(file.read(end - start))
            if isinstance(row, dict) and row.get('step', step) <= step:
                return end
        end = start
    return 0


def _start_of_line(file: Any, end: int) -> int:
    """Where the line begins that ends at `end`."""
    at = end - 1  # its own newline
    while at:
        size = min(_BLOCK, at)
        found = file.seek(at - size) + file.read(size).rfind(b'\n')
        if found >= at - size:
            return found + 1
        at -= size
    return 0


def _written_at(step: int, folder: str) -> list[tf.Event] | None:
    """The summaries of a step in the newest event file that has any; None where a file to be read is too large."""
    paths = glob.glob(os.path.join(glob.escape(folder), 'events.out.tfevents.*')) if step else []
    try:
        for path in sorted(paths, reverse=True):
            if os.path.getsize(path) > _MOST_READ:
                return None
            events = list(_events(path))
            found = [event for event in events if event.step == step and event.HasField('summary')]
            if found or any(event.HasField('session_log') and event.step < step for event in events):
                return found  # a session that began before the step, so no earlier one has it
    except OSError as error:
        logging.warning('The earlier events in %s can not be read (%s); TensorBoard will not show those of step %d.', folder, error, step)
    return []


def _events(path: str) -> Iterator[tf.Event]:
    """The whole events of a file, up to where a killed process stopped writing."""
    left = os.path.getsize(path)
    with open(path, 'rb') as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack('<Q', header[:8])
            left -= length + _RECORD_FRAME
            if left < 0:
                return
            record = file.read(length + 4)
            with contextlib.suppress(message.DecodeError):
                yield tf.Event.FromString(record[:length])


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _warn(error: Exception, path: str, warned: bool) -> bool:
    if not warned:
        logging.warning('%s can not be written (%s); the work goes on without what is lost here.', path, ' '.join(str(error).split()))
    return True
