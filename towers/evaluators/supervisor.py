"""The evaluators of a training: which there are, their processes beside it, or their turn at its end."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import logging

from towers import config as config_lib
from towers import structs
from towers.config import evaluation as eval_config
from towers.config import stopping
from towers.evaluators import companion, evaluation, scoring
from towers.evaluators import results as results_lib

_SLICE_SECS = 0.1
_FIRST_DELAY_SECS = 1.0
_LONGEST_DELAY_SECS = 60.0

Scores = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """One of the evaluators of a run.

    Attributes:
      config: the run's, with this evaluator's own values in its `eval_*` fields.
      dataset: what it evaluates on.
    """

    config: config_lib.Config
    dataset: structs.Dataset

    @property
    def name(self) -> str:
        """Under `eval/<name>` it writes."""
        return self.config.eval_name


def of(config: config_lib.Config, datasets: structs.Dataset | Mapping[str, structs.Dataset] | None) -> tuple[Evaluator, ...]:
    """The evaluators that a run is asked for; the first one's results are the run's.

    Args:
      config: `eval_*`, and `evaluator` for what each has of its own.
      datasets: one for all, or a dataset for each evaluator by its name.

    Raises:
      ValueError: evaluators are asked for and there is no dataset for one of them.
    """
    own = eval_config.specs(config.evaluator)
    if datasets is None:
        if config.evaluate or own or config.eval_every_steps:
            flag = '--eval_every_steps' if config.eval_every_steps else '--evaluate'
            raise ValueError(f'{flag} needs an evaluation dataset, got none; give --eval_dataset (eval_dataset= in Python).')
        return ()
    names = list(own) if own and not config.evaluate else [config.eval_name, *own]
    by_name = dict(datasets) if isinstance(datasets, Mapping) else dict.fromkeys(names, datasets)
    missing = [name for name in own if name not in by_name]
    if missing:
        raise ValueError(f'The evaluator {missing[0]!r} has no dataset, got those of {", ".join(by_name)}; give it one of its name.')
    fields = {name: {**own.get(name, {}), 'eval_name': name} for name in by_name}
    for values in fields.values():
        values.pop('dataset', None)  # that is the caller's name for it
    return tuple(Evaluator(dataclasses.replace(config, **fields[name]), dataset) for name, dataset in by_name.items())


def check(config: config_lib.Config) -> None:
    """Raises ValueError where a training is asked for what it has no evaluator, or no averages, for."""
    for name in ('eval_parts', 'eval_max_slowdown', 'eval_cadence', 'eval_threads', 'eval_nice', 'eval_restarts'):
        value, is_given = getattr(config, name), getattr(config, name) != getattr(config_lib.EvalConfig, name)
        config_lib.require(
            not config.eval_every_steps or not is_given,
            f'--eval_every_steps={config.eval_every_steps} evaluates in the training, --{name} is for evaluators of their own; give one.',
        )
        config_lib.require(
            name == 'eval_parts' or config.evaluate or bool(config.evaluator) or not is_given,
            f'--{name}={value} is for an evaluator beside the training, got none; give --evaluate or --evaluator too, or leave it out.',
        )
    config_lib.require(
        not config.use_ema or config.ema_decay is not None,
        '--use_ema evaluates with the averages that --ema_decay makes, got none; give e.g. --ema_decay=0.999, or leave it out.',
    )
    if config.early_stop and not (config.evaluate or config.evaluator or config.eval_every_steps):
        text = '--early_stop=%s: this training has no evaluator; only what one started by hand as %r finds counts (else give --evaluate).'
        logging.warning(text, config.early_stop, config.eval_name)


def check_metrics(config: config_lib.Config, evaluators: Sequence[Evaluator], reported: Collection[str], model: structs.Model) -> None:
    """Raises ValueError where `keep_best` or `early_stop` names a metric that no evaluation will report.

    Args:
      config: both, as the run is asked.
      evaluators: the run's; without any, where others may be started by hand, it is a WARNING.
      reported: names of the model's metrics in training; where they lack it, the model is built out of training, too.
      model: as in `towers.train`.
    """
    wanted = {'early_stop': stopping.parse(config.early_stop).metric if config.early_stop else None}
    wanted['keep_best'] = config.keep_best.partition(':')[0] if config.keep_best else None
    missing = {flag: name for flag, name in wanted.items() if name is not None and name not in (scoring.LOSS, *reported)}
    known = _evaluated(model, evaluators[0]) if missing and evaluators else None
    names = {scoring.LOSS, *reported} if known is None else known
    for flag, name in missing.items():
        text = f'--{flag}={getattr(config, flag)}: the model reports {", ".join(sorted(names))}, not {name}; name one of these.'
        config_lib.require(known is None or name in known, text)
        if known is None:
            logging.warning('%s', text)


def _evaluated(model: structs.Model, first: Evaluator) -> set[str] | None:
    """What an evaluation reports; None where it can't be built, of which the evaluator itself will tell."""
    try:
        return scoring.names(model, first.dataset, first.config)
    except Exception:
        return None


def at_end(model: structs.Model, evaluators: Sequence[Evaluator], *, known: int | None, stop: threading.Event) -> Scores:
    """Evaluates the newest checkpoint by each evaluator in turn, in this process.

    Args:
      model: as in `towers.evaluate`.
      evaluators: whose turn it is.
      known: the step of the newest checkpoint where no step was made, so that what is known of it holds.
      stop: ends it when set.
    """
    scores: Scores = {}
    for each in evaluators:
        scores[each.name] = results_lib.Results(str(each.config.model_dir), each.name).last()
        if known is None or scores[each.name].get('step') != known:
            config = dataclasses.replace(each.config, eval_gpu_memory_fraction=None)  # this process has its share
            scores[each.name] = evaluation.once(model, each.dataset, config, stop=stop)
    return scores


def known(evaluators: Sequence[Evaluator], step: int) -> Scores:
    """What each evaluator has found of a step, the newest there is; empty where it hasn't."""
    found = {each.name: results_lib.Results(str(each.config.model_dir), each.name).last() for each in evaluators}
    return {name: values if values.get('step') == step else {} for name, values in found.items()}


class Supervisor(contextlib.AbstractContextManager):
    """The processes of evaluators beside a training; the `with` block starts them and leaves none behind.

        with supervisor.Supervisor(model, evaluators) as beside:
            ...train...
            scores = beside.wait(timeout=600)

    One that crashes is started again, after a second first and after a minute at most, `eval_restarts` times in a row; one
    whose work can't be right is not. Whatever happens to them the training goes on: a failure is a WARNING.

    Args:
      model: a function of a module, or a functools.partial of one.
      evaluators: what to evaluate and how; their datasets are such functions too.
      over: called with the name of each that is not started any more.

    Raises:
      ValueError: as `companion.Companion`.
    """

    def __init__(self, model: structs.Model, evaluators: Sequence[Evaluator], over: Callable[[str], None] = lambda name: None):
        self._over = over
        self._beside = [companion.Companion(model, each.dataset, each.config) for each in evaluators]
        self._stopping = threading.Event()
        self._good: set[str] = set()
        self._threads: dict[companion.Companion, threading.Thread] = {}

    def __enter__(self) -> 'Supervisor':
        for each in self._beside:
            if _started(each):
                self._threads[each] = threading.Thread(target=self._watch, args=(each,), name='towers-supervisor', daemon=True)
                self._threads[each].start()
            else:
                self._over(each.config.eval_name)
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def wait(self, timeout: float, *, stop: threading.Event | None = None) -> Scores:
        """Says that the newest checkpoint is the last one, and waits until each evaluator is done with it.

        Args:
          timeout: seconds after which the evaluators are stopped.
          stop: ends the wait, and the evaluators, when set.

        Returns:
          Each one's last result, as `towers.evaluate` returns it; empty where it failed, was late or was stopped.
        """
        for each in self._beside:
            each.say_over()
        end = time.monotonic() + timeout
        while any(thread.is_alive() for thread in self._threads.values()) and time.monotonic() < end and not (stop and stop.is_set()):
            self._stopping.wait(_SLICE_SECS)
        late = [each.config.eval_name for each, thread in self._threads.items() if thread.is_alive()]
        if late:
            text = 'The evaluator %s was stopped before the last checkpoint was evaluated; run scripts/evaluate.py to do it.'
            logging.warning(text, ', '.join(late))
        self.stop()
        names = {each.config.eval_name: each for each in self._beside}
        return {name: _results(each).last() if name in self._good else {} for name, each in names.items()}

    def stop(self) -> None:
        """Ends the processes within some seconds; what they have written stays."""
        self._stopping.set()
        for thread in self._threads.values():
            thread.join()
        for each in self._beside:
            each.stop()

    def _watch(self, each: companion.Companion) -> None:
        try:
            self._keep(each)
        finally:
            self._over(each.config.eval_name)

    def _keep(self, each: companion.Companion) -> None:
        """Starts an evaluator again until it is done, hopeless, or not wanted any more."""
        crashes, name, limit = 0, each.config.eval_name, each.config.eval_restarts
        before = _newest(each)
        while (code := self._end_of(each)) is not None:
            if code == 0:
                self._good.add(name)
                return
            newest = _newest(each)
            crashes, before = 1 if newest != before else crashes + 1, newest
            if code == companion.WRONG_USE or crashes > limit:
                text = 'The evaluator %s beside the training failed with exit code %d; run scripts/evaluate.py to do its work.'
                logging.warning(text, name, code)
                return
            delay = min(_LONGEST_DELAY_SECS, _FIRST_DELAY_SECS * 2 ** (crashes - 1))
            logging.warning('The evaluator %s ended with %d; again in %g s (%d of at most %d).', name, code, delay, crashes, limit)
            each.stop()
            if self._stopping.wait(delay) or not _started(each):
                return

    def _end_of(self, each: companion.Companion) -> int | None:
        """The exit code of an evaluator, once it has ended; None where it is not wanted any more."""
        while not self._stopping.is_set():
            if each.join(_SLICE_SECS):
                return each.exitcode
        return None


def _started(each: companion.Companion) -> bool:
    """Starts the process, unless the machine has none left."""
    try:
        each.start()
    except OSError as error:
        logging.warning('The evaluator %s could not be started (%s); run scripts/evaluate.py to do its work.', each.config.eval_name, error)
        return False
    return True


def _results(each: companion.Companion) -> results_lib.Results:
    return results_lib.Results(str(each.config.model_dir), each.config.eval_name)


def _newest(each: companion.Companion) -> Any:
    """Identifies the checkpoint that was evaluated last."""
    return _results(each).latest().get('saved')
