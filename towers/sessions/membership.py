"""A session's place among the others: admitted, registered, kept alive by a heartbeat, and given back."""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from absl import logging

from towers.sessions import admission, host, ledger

FOLDER = 'sessions'
_BEAT_SECS = 5.0


class Membership(contextlib.AbstractContextManager):
    """Registers a session in its run directory and on this machine for the `with` block.

        with membership.Membership(entry, machine) as member:
            member.entry.share   # what it was given
            member.follow(lambda: reached.step)

    Args:
      asked: the session.
      machine: what there is to share.
      plan: as `admission.admit`.
      beat_secs: seconds between heartbeats.
      folder: the machine's ledger; None = `host.folder()`.
    """

    def __init__(
        self,
        asked: ledger.Entry,
        machine: admission.Machine,
        *,
        plan: bool = False,
        beat_secs: float = _BEAT_SECS,
        folder: str | None = None,
    ) -> None:
        self.entry = asked
        self._admit = (machine, plan)
        self._coming: list[ledger.Entry] = []  # what it will start
        self._writing = threading.Lock()
        self._beat_secs = beat_secs
        self._here = folder
        self._folders: dict[str, str] = {}  # what must be there -> where the entry stands
        if asked.model_dir:
            self._folders[asked.model_dir] = os.path.join(asked.model_dir, FOLDER)
        self._warned = False
        self._step: Callable[[], int | None] = lambda: None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> 'Membership':
        """Takes the place.

        Raises:
          Refused: the session does not fit beside the others.
        """
        try:
            self._take_place(self._here or host.folder())
        except OSError as error:  # a full disk keeps nobody from training
            logging.warning('This session is not registered on this machine (%s); others will not see what it holds.', error)
        with contextlib.suppress(OSError):
            if self.entry.role == 'master' and self.entry.model_dir:  # others wait until there is one
                os.makedirs(self.entry.model_dir, exist_ok=True)
            for folder in self._folders.values():
                ledger.sweep(folder)
        self._write()
        self._thread = threading.Thread(target=self._beat, name='towers-ledger', daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        if self._thread is not None and not sys.is_finalizing():  # where no other thread runs any more
            self._thread.join(self._beat_secs + _BEAT_SECS)
        self._remove(self.entry, *self._coming)

    def release(self, name: str) -> None:
        """Gives back what is held for a session of that name, which is not started any more."""
        with self._writing:
            gone = [each for each in self._coming if each.name == name]
            self._coming = [each for each in self._coming if each.name != name]
            self._remove(*gone)

    def _remove(self, *entries: ledger.Entry) -> None:
        for folder in self._folders.values():
            for entry in entries:
                with contextlib.suppress(OSError):
                    ledger.remove(folder, entry)

    def _take_place(self, here: str) -> None:
        machine, plan = self._admit
        with host.locked(here):
            others = [seen.entry for seen in ledger.sweep(here) if not seen.entry.is_own]
            held = [entry for entry in ledger.pending([*others, self.entry]) if entry is not self.entry]
            self.entry = admission.admit(self.entry, held, machine, plan=plan)
            self._coming = machine.coming(self.entry)
            self._folders[here] = here
            self._write_to(here)

    def follow(self, step: Callable[[], int | None]) -> None:
        """Says in the next heartbeats which step the session is at; `step` is called from another thread."""
        self._step = step

    def _beat(self) -> None:
        while not self._over.wait(self._beat_secs):
            self.entry = dataclasses.replace(self.entry, step=self._step())
            self._write()

    def _write(self) -> None:
        """Writes the entries where their folder is; a run directory that isn't there yet may come."""
        for place, folder in self._folders.items():
            if not os.path.isdir(place):
                continue
            try:
                os.makedirs(folder, exist_ok=True)
                self._write_to(folder)
            except OSError as error:  # an evaluator may read a run directory that it can't write
                if not self._warned:
                    logging.warning('This session is not registered in %s (%s).', folder, error)
                self._warned = True

    def _write_to(self, folder: str) -> None:
        with self._writing:
            for entry in (self.entry, *self._coming):
                ledger.write(folder, entry)
