"""One dataset split over several evaluators of one name: each takes parts of it, and those of a dead one are redone.

Below `eval/<name>/parts/`, a folder for each checkpoint holds `<part>.npz`, the sums over a part, and `<part>.claim-<n>`: who
works on it. A claim is made by one exclusive step. Where its maker is gone, known at once on its own machine and elsewhere
when it gave no sign of life for a minute, the claim of the next number is made. When all sums are there, the last part of
the work, `result`, is claimed in the same way: adding them, and writing the one row of the result.
"""

import contextlib
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from towers.checkpoint import files, manifest
from towers.directory import holder
from towers.evaluators import evaluator, scoring
from towers.evaluators import results as results_lib

LIMIT_SECS = 60.0
_POLL_SECS = 0.2
_RESULT = 'result'


class Parts:
    """The parts of one checkpoint's evaluation.

    Args:
      session: has loaded the checkpoint.
      checkpoint: the one to evaluate.
      results: where the result goes.
    """

    def __init__(self, session: evaluator.Evaluator, checkpoint: manifest.Checkpoint, results: results_lib.Results):
        self._session, self._checkpoint, self._results = session, checkpoint, results
        name = f'{checkpoint.step}-{checkpoint.manifest.time:.6f}-{session.parts}'
        self._folder = os.path.join(results.folder, 'parts', name)
        self._all = [str(number) for number in range(session.parts)]

    def score(self, stop: threading.Event) -> dict:
        """Takes parts until the checkpoint is evaluated, by this process and others, and returns its result; empty if `stop` was set.

        Raises:
          RuntimeError: the parts together had other examples than the dataset says it has.
        """
        while not stop.is_set() and not self._results.has(self._checkpoint):
            os.makedirs(self._folder, exist_ok=True)
            left = [part for part in self._all if not os.path.exists(self._sums(part))]
            if not any(self._work(part, stop) for part in left or [_RESULT]):
                stop.wait(_POLL_SECS)
        if self._results.has(self._checkpoint):
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._results.row(self._checkpoint)

    def _work(self, part: str, stop: threading.Event) -> bool:
        """Makes a part, or the result of all, unless another process does; says whether it did."""
        with self._claimed(part) as mine:
            if not mine:
                return False
            if part == _RESULT:
                self._add_up()
            elif not os.path.exists(self._sums(part)):  # not made since the claims were looked at
                made = self._session.sums(self._checkpoint, stop, part=int(part))
                if made is not None:
                    self._write(part, made)
            return True

    def _add_up(self) -> None:
        total = scoring.Sums()
        try:
            for part in self._all:
                total = total.add(self._read(part))
        except FileNotFoundError:  # another process has written the result, and tidied up
            return
        if not self._results.has(self._checkpoint):
            self._results.add(self._session.result(self._checkpoint, total), parts=self._session.parts)

    @contextlib.contextmanager
    def _claimed(self, part: str) -> Iterator[bool]:
        """Whether this process may make a part for the `with` block; it keeps giving signs of life."""
        number, before = self._last_claim(part)
        path = os.path.join(self._folder, f'{part}.claim-{number + 1}')
        if (before is not None and self._lives(before, f'{part}.claim-{number}')) or not _create(path, number + 1):
            yield False
            return
        over = threading.Event()
        threading.Thread(target=_beat, args=(path, over), name='towers-part', daemon=True).start()
        try:
            yield True
        finally:
            over.set()
            with contextlib.suppress(OSError):  # given back, made or not
                os.unlink(path)

    def _last_claim(self, part: str) -> tuple[int, holder.Holder | None]:
        form = re.compile(rf'{part}\.claim-(\d+)')
        numbers = sorted(int(match[1]) for match in map(form.fullmatch, files.names(self._folder)) if match)
        if not numbers:
            return 0, None
        try:
            with open(os.path.join(self._folder, f'{part}.claim-{numbers[-1]}'), 'rb') as file:
                return numbers[-1], holder.Holder(**json.loads(file.read()))
        except FileNotFoundError:
            return numbers[-1], None
        except (ValueError, TypeError):
            return numbers[-1], holder.Holder(generation=numbers[-1])

    def _lives(self, claim: holder.Holder, name: str) -> bool:
        if claim.is_here and not claim.lives_here:
            return False
        clock = os.path.join(self._folder, f'clock-{uuid.uuid4().hex}')
        with open(clock, 'wb') as file:  # the file system's time
            file.write(b'.')
        silent = holder.changed(clock) - holder.changed(os.path.join(self._folder, name))
        os.unlink(clock)
        return silent < LIMIT_SECS

    def _write(self, part: str, made: scoring.Sums) -> None:
        arrays: dict[str, Any] = {'examples': np.int64(made.examples), 'seconds': np.float64(made.seconds)}
        for name, sums in (made.totals or {}).items():
            arrays |= {f'{name}/{place}': array for place, array in enumerate(sums)}
        path = f'{self._sums(part)}.{uuid.uuid4().hex}'
        with contextlib.suppress(FileNotFoundError):  # another process made it meanwhile, and tidied up
            with open(path, 'wb') as file:
                np.savez(file, **arrays)
            os.replace(path, self._sums(part))

    def _read(self, part: str) -> scoring.Sums:
        with np.load(self._sums(part)) as file:
            found = {name: file[name] for name in file.files}
        examples, seconds = int(found.pop('examples')), float(found.pop('seconds'))
        totals: dict[str, list[np.ndarray]] = {}
        for key, array in found.items():  # in the order in which they were written
            totals.setdefault(key.rpartition('/')[0], []).append(array)
        return scoring.Sums(examples, {name: tuple(arrays) for name, arrays in totals.items()} or None, seconds)

    def _sums(self, part: str) -> str:
        return os.path.join(self._folder, f'{part}.npz')


def _create(path: str, number: int) -> bool:
    """Makes a claim that no other process has made."""
    draft = f'{path}.{uuid.uuid4().hex}'
    try:
        with open(draft, 'xb') as file:
            file.write(holder.this_process(number).content())
        os.link(draft, path)
    except (FileExistsError, FileNotFoundError):
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)
    return True


def _beat(path: str, over: threading.Event) -> None:
    while not over.wait(LIMIT_SECS / 6):
        with contextlib.suppress(OSError):
            os.utime(path)
