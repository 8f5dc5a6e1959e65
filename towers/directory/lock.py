"""One writer for one run directory.

A trainer holds the run directory whose lock file has the highest generation, `sessions/writer-<generation>.json`. It takes
the directory by making the file of the next generation, which of several trainers only one can. So no lock is ever
removed by one step and taken by the next, with room for another trainer between them: one that its holder gave back
stays as a file that says so, and one whose holder died is taken over.

Whether a holder lives is known at once on its own machine, by the number and the start of its process. On another one
its heartbeat is watched: the file's time of change, compared with that of a file made beside it, so that the clocks of
two machines don't matter.

No file system can stop a write that is under way. A holder that was silent for so long that it was taken over (it was
stopped, or cut off) finds that before its next write, and writes nothing more. On NFS the exclusive step is a hard link,
and listings are as fresh as the cache of attributes: mount with `actimeo` well below the limit of 60 seconds.
"""

import contextlib
import dataclasses
import errno
import os
import threading
import time
import uuid
from typing import Any

from absl import logging

from towers.directory import holder as holder_lib

_FOLDER = 'sessions'
_ATTEMPTS = 100
_POLL_SECS = 0.2
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)  # nor can one be made


class LockError(RuntimeError):
    """A run directory could not be taken, or is another trainer's now."""


class WriterLock(contextlib.AbstractContextManager):
    """The right to write in a run directory; the `with` block holds it.

        with lock.WriterLock(model_dir) as held:
            held.check()
            ...write...

    Args:
      model_dir: the run directory, which is made where it isn't there.
      beat_secs: seconds between heartbeats.
      limit_secs: seconds without a heartbeat after which a holder on another machine counts as dead.
      stop: ends the wait for such a holder when set, with a KeyboardInterrupt.
    """

    def __init__(self, model_dir: str, *, beat_secs: float = 10.0, limit_secs: float = 60.0, stop: threading.Event | None = None):
        self._model_dir = os.path.abspath(model_dir)
        self._folder = os.path.join(self._model_dir, _FOLDER)
        self._beat_secs = beat_secs
        self._limit_secs = limit_secs
        self._stop = stop or threading.Event()
        self._over = threading.Event()
        self._mine: holder_lib.Holder | None = None
        self._checked = 0.0

    @property
    def generation(self) -> int:
        """How often this run directory has been taken; 0 where it is not held."""
        return self._mine.generation if self._mine else 0

    def __enter__(self) -> 'WriterLock':
        """Takes the run directory.

        Raises:
          ValueError: a living trainer holds it, or it is read-only; the message names who and the way out.
          LockError: its storage failed.
          KeyboardInterrupt: `stop` was set while it was unknown whether the holder lives.
        """
        try:
            os.makedirs(self._folder, exist_ok=True)
            self._acquire()
        except OSError as error:
            problem = f'--model_dir={self._model_dir} can not be written ({error.strerror})'
            if error.errno in _READ_ONLY or (error.errno in _NO_FOLDER and not os.path.isdir(self._folder)):
                raise ValueError(f'{problem}; give a folder that can.') from error
            raise LockError(f'{problem}.') from error
        self._checked = time.monotonic()
        self._over.clear()
        threading.Thread(target=self._beat, args=(self._path(self.generation),), name='towers-heartbeat', daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Gives the run directory back, if it is still held."""
        self._over.set()
        mine, self._mine = self._mine, None
        try:
            if mine is not None and holder_lib.read(self._folder) == mine:
                draft = self._draft(dataclasses.replace(mine, released=True))
                os.replace(draft, self._path(mine.generation))
        except OSError as error:
            logging.warning('The lock of %s was not given back (%s); the next trainer takes it over.', self._model_dir, error)

    def check(self, *, every_secs: float = 0.0) -> None:
        """Looks whether the run directory is still held.

        Args:
          every_secs: does nothing where the last look is not so long ago, so that it may be called at each step.

        Raises:
          LockError: another trainer has taken it over, or the lock file is gone, and the run directory perhaps with it.
        """
        now = time.monotonic()
        if now - self._checked < every_secs:
            return
        self._checked = now
        try:
            found = holder_lib.read(self._folder)
        except OSError:  # the storage is ill, which is no sign of another trainer
            return
        if found is not None and found == self._mine:
            return
        kept = f'process {os.getpid()}, of generation {self.generation}, stops and writes nothing more'
        if found is None:
            raise LockError(
                f'The lock in {self._folder} is gone, or all of the run directory with it: {kept}. Leave it alone in a training.'
            )
        raise LockError(f'{self._model_dir} was taken over by {found}, generation {found.generation}: {kept}. Run one trainer there.')

    def _acquire(self) -> None:
        for _ in range(_ATTEMPTS):
            before = holder_lib.read(self._folder)
            if before is not None and not before.released:
                self._require_dead(before)
            if self._take(before.generation + 1 if before else 1):
                if before is not None and not before.released:
                    logging.warning('%s, which trained in %s, is gone without having given it back: taken over.', before, self._model_dir)
                return
        raise LockError(f'{self._model_dir} was taken by others {_ATTEMPTS} times in a row. Run one trainer there.')

    def _require_dead(self, before: holder_lib.Holder) -> None:
        """Refuses where the holder lives; where that isn't known at once it waits for a sign of life."""
        alive = before.lives_here if before.is_here else self._beats(before)
        if alive and holder_lib.read(self._folder) == before:
            since = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(before.since))
            raise ValueError(
                f'{self._model_dir} is being trained by {before} since {since} (generation {before.generation}), expected no other '
                'trainer there; stop it, wait for its end, or give another --model_dir.'
            )

    def _beats(self, before: holder_lib.Holder) -> bool:
        """Whether a heartbeat comes before the holder has been silent for the limit."""
        path = self._path(before.generation)
        last = holder_lib.changed(path)
        draft = self._draft(before)
        silent = holder_lib.changed(draft) - last  # by one clock, the file system's
        _unlink(draft)
        left = min(max(self._limit_secs - silent, 0.0), self._limit_secs)
        if left:
            logging.info('%s was held by %s; waiting up to %.0f s for a sign of life.', self._model_dir, before, left)
        end = time.monotonic() + left
        while time.monotonic() < end:
            if self._stop.wait(_POLL_SECS):
                raise KeyboardInterrupt
            if holder_lib.changed(path) != last:
                return True
        return False

    def _take(self, generation: int) -> bool:
        """Makes the lock file of `generation`; False where another trainer made it, or a later one, first."""
        mine = holder_lib.this_process(generation)
        if not self._create(mine):
            return False
        # A listing may miss what is made while it is read; nobody can take the directory twice in two listings.
        others = {*holder_lib.generations(self._folder), *holder_lib.generations(self._folder)} - {generation}
        if max(others, default=0) > generation:  # this one is late: this generation had come and gone before
            _unlink(self._path(generation))
            return False
        for other in others:
            _unlink(self._path(other))
        for name in os.listdir(self._folder):
            if name.startswith('writer-') and name.endswith('.tmp'):  # a killed trainer's; a living one makes another
                _unlink(os.path.join(self._folder, name))
        self._mine = mine
        return True

    def _create(self, mine: holder_lib.Holder) -> bool:
        path, draft = self._path(mine.generation), self._draft(mine)
        try:
            os.link(draft, path)
        except (FileExistsError, FileNotFoundError):  # another one has it, or has swept the draft
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_in_place(path, mine.content())
        finally:
            _unlink(draft)
        return True

    def _draft(self, content: holder_lib.Holder) -> str:
        path = os.path.join(self._folder, f'writer-{uuid.uuid4().hex}.tmp')
        with open(path, 'xb') as file:
            file.write(content.content())
        return path

    def _beat(self, path: str) -> None:
        warned = False
        while not self._over.wait(self._beat_secs):
            try:
                os.utime(path)
            except holder_lib.GONE:  # `check` says so
                return
            except OSError as error:
                if not warned:
                    logging.warning('The heartbeat in %s can not be written (%s).', path, error)
                warned = True

    def _path(self, generation: int) -> str:
        return holder_lib.path_of(self._folder, generation)


def _create_in_place(path: str, content: bytes) -> bool:
    """For file systems without hard links: another trainer may see the file before its content, and waits then."""
    try:
        with open(path, 'xb', buffering=0) as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
