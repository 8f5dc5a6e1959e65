"""Which checkpoints an evaluator takes, and in which order: each one, the newest, or one in so many steps or seconds.

What was evaluated is read from the results, so a restarted evaluator takes no checkpoint twice and leaves none out that
is still there.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from towers.checkpoint import leases, manifest
from towers.config import evaluation as eval_config
from towers.evaluators import results as results_lib

_LOOK_SECS = 0.5
_SHOWN = 6


class Queue(contextlib.AbstractContextManager):
    """The checkpoints of a run that are to be evaluated yet.

    Inside the `with` block a thread looks for new ones, so that those which come and go during an evaluation are told of.

    Args:
      model_dir: the run directory.
      results: what was evaluated.
      cadence: which are taken: 'every' one from the oldest on, the 'newest', or with '100steps' and '60secs' those that
        are so much later than the last one taken. The run's final one is always taken.
    """

    def __init__(self, model_dir: str, results: results_lib.Results, cadence: str = 'every'):
        self._model_dir = model_dir
        self._results = results
        self._how, self._gap = eval_config.cadence(cadence)
        self._reader = manifest.Reader(model_dir)
        self._waiting: dict[tuple[int, float], int] = {}  # published when last looked at: step by step and time
        self._taken: tuple[int, float] | None = None
        self._told: set[tuple[int, float]] = set()  # passed over, which was said
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name='towers-checkpoints', daemon=True)

    def __enter__(self) -> 'Queue':
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def next(self, *, over: bool = False) -> manifest.Checkpoint | None:
        """The next whole checkpoint to evaluate; None where there is none for now.

        Args:
          over: no other checkpoint will follow, so the newest is taken as the final one.
        """
        found, unseen = self._choose(over)
        if found is not None:
            self._pass_over(unseen if self._how == 'newest' else (), found)
            self._taken = _key(found)
        return found

    def is_empty(self, *, over: bool = False) -> bool:
        """Whether `next` would give none."""
        return self._choose(over)[0] is None

    def _choose(self, over: bool) -> tuple[manifest.Checkpoint | None, list[manifest.Checkpoint]]:
        """The next checkpoint, and all that were not evaluated."""
        published = self._look()
        unseen = [each for each in published if not self._results.has(each)]
        if self._how == 'newest':
            unseen.reverse()
        for each in unseen:
            last = each.manifest.final or (over and each is published[-1])
            if (last or self._is_due(each)) and self._reader.is_whole(each):
                return each, unseen
        return None, unseen

    @contextlib.contextmanager
    def taken(self, *, over: bool = False) -> Iterator[manifest.Checkpoint | None]:
        """As `next`, and the checkpoint stays for the `with` block."""
        with leases.Lease(self._model_dir, self._results.holder) as lease:
            found = self.next(over=over)  # only what is found with the lease in hand stays
            if found is not None:
                lease.narrow(found.step)
            yield found

    def is_done(self) -> bool:
        """Whether the newest checkpoint is the run's final one and evaluated."""
        try:
            found = self._reader.newest()
        except manifest.CheckpointError:
            return False
        return found is not None and found.manifest.final and self._results.has(found)

    def _is_due(self, each: manifest.Checkpoint) -> bool:
        if self._how == 'every':
            return True
        last = self._results.latest()
        if self._how == 'newest':
            return each.manifest.time > last.get('saved', 0.0)
        now, then = (each.step, last.get('step')) if self._how == 'steps' else (each.manifest.time, last.get('saved'))
        return then is None or now - then >= self._gap

    def _look(self) -> list[manifest.Checkpoint]:
        """The published checkpoints by rising step; says which of those seen before are gone."""
        with self._lock:
            published = manifest.all(self._model_dir)
            there = {_key(each): each.step for each in published}
            missing = [(key, step) for key, step in self._waiting.items() if key not in there and key != self._taken]
            gone = [step for key, step in missing if not self._results.has_key(*key)]
            self._waiting = there
        if gone and self._how == 'every':
            logging.warning(
                'Passed over the checkpoints of steps %s (%s): removed before they were evaluated; raise --keep_checkpoints, or '
                '--eval_max_slowdown where it pauses for the training.',
                _listed(gone),
                self._results.holder,
            )
        return published

    def _pass_over(self, unseen: Sequence[manifest.Checkpoint], taken: manifest.Checkpoint) -> None:
        steps = {_key(each): each.step for each in unseen if each.step < taken.step and self._is_due(each)}
        new = [step for key, step in steps.items() if key not in self._told]
        self._told |= steps.keys()
        if new:
            text = 'Passed over the checkpoints of steps %s (%s), since that of %d is there.'
            logging.info(text, _listed(new), self._results.holder, taken.step)

    def _keep_looking(self) -> None:
        while not self._ended.wait(_LOOK_SECS):
            self._look()


def _key(each: manifest.Checkpoint) -> tuple[int, float]:
    return each.step, each.manifest.time


def _listed(steps: Sequence[int]) -> str:
    """The steps, rising; of many the first and the last."""
    some = [str(step) for step in sorted(steps)]
    return ', '.join(some if len(some) <= _SHOWN else [*some[: _SHOWN - 2], '...', f'{some[-1]} ({len(some)} in all)'])
