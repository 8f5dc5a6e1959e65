"""`towers.train`: the graph, its session, hooks, checkpoints and evaluation, composed."""

import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import structs
from towers.checkpoint import leases, manifest, retention, saver
from towers.directory import meaning, record, run_directory
from towers.evaluators import inside as inside_lib
from towers.evaluators import supervisor
from towers.graph import devices, optimizers
from towers.hooks import checkpointing, guard, watch
from towers.jobs import connecting, joining, leaving, program, recovering, run_hooks, starting, stepping
from towers.run import looping, process, session, signals, writers
from towers.sessions import membership

_CLOSE_SECS = 60.0  # for a checkpoint still being written when the training fails
_EVALUATION_SECS = 24 * 3600.0  # no wait is without a limit
_UNCLAIMED = run_directory.Claim()


def train(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    eval_dataset: structs.Dataset | Mapping[str, structs.Dataset] | None = None,
    hooks: Sequence[tf.train.SessionRunHook] = (),
    optimizer: optimizers.Factory | None = None,
) -> record.TrainResult:
    """Trains a model on N towers, from the newest checkpoint in the run directory where there is one.

    Args:
      model: `model(batch, *, training) -> ModelOutput` over `tf.get_variable`, for one tower.
      dataset: zero-argument function that returns a tf.data.Dataset of single examples; it is repeated, batched, split
        and prefetched here, and not shuffled.
      config: everything else; without `model_dir` the run goes to a new temporary folder.
      eval_dataset: like `dataset`; evaluated beside the training with `config.evaluate` or `config.evaluator`, between its steps
        with `config.eval_every_steps`, else once at the end. Or a dataset for each of several evaluators, by their names.
      hooks: the user's, called after the hooks that stop and before those that report and save.
      optimizer: function from the learning rate (fp32 scalar tensor) to a fresh tf.train.Optimizer, in place of
        `config.optimizer`.

    Returns:
      How it ended. A signal ends it after the step in flight, saved, with `stopped_by` 'signal'.

    Raises:
      ValueError: model, dataset and configuration don't fit together, or not to what the run was trained under; or
        another trainer is at work in the run directory; or it does not fit beside other sessions of this machine (Refused).
      LockError: another trainer has taken the run directory over, so nothing more was written.
      Diverged: the loss or a gradient is not finite.
      Stalled: a step took longer than it may; where it can't be ended the process ends, with exit code 1.
      CheckpointError: the last checkpoint could not be saved, or none of those that exist is whole.
    """
    model_dir = config.model_dir
    if model_dir is None:
        model_dir = tempfile.mkdtemp(prefix='towers-')
        logging.info('No model_dir was given; this run is in %s.', model_dir)
    config = connecting.fixed(dataclasses.replace(config, model_dir=os.path.abspath(model_dir)))
    supervisor.check(config)
    if config.steps_per_run > 1:
        looping.require(hooks)
    evaluators = supervisor.of(config, eval_dataset)  # what is wrong with them is told before anything begins
    beside = [each.config for each in evaluators] if config.evaluate or config.evaluator else []
    if optimizer is not None:
        optimizers.require_factory(optimizer)
    if config.deterministic:
        tf.compat.v2.config.experimental.enable_op_determinism()
    with joining.joined(config, joining.master(config, beside)) as (config, member):
        if not config.worker_hosts:
            process.claim(config, devices.place(config))  # here, where the caller's line is known
        job = _Job(model, dataset, config, supervisor.of(config, eval_dataset), tuple(hooks), optimizer, member)
        return signals.run_in_worker(functools.partial(_run, job), grace_secs=config.grace_secs)


@dataclasses.dataclass(frozen=True)
class _Job:
    model: structs.Model
    dataset: structs.Dataset
    config: config_lib.Config
    evaluators: tuple[supervisor.Evaluator, ...]
    hooks: tuple[tf.train.SessionRunHook, ...]
    optimizer: optimizers.Factory | None
    member: membership.Membership
    progress: recovering.Progress = dataclasses.field(default_factory=recovering.Progress)

    @property
    def model_dir(self) -> str:
        return str(self.config.model_dir)


def _run(job: _Job, stop_event: threading.Event) -> record.TrainResult:
    with contextlib.ExitStack() as closing:
        claim = closing.enter_context(run_directory.claimed(job.config, stop_event))
        leases.sweep(job.model_dir)
        beside = None
        if job.config.evaluate or job.config.evaluator:
            beside = closing.enter_context(supervisor.Supervisor(job.model, job.evaluators, job.member.release))
        link = closing.enter_context(connecting.connected(job.config, stop_event))
        attempt = functools.partial(_attempt, job, claim, stop_event)
        if stop_event.is_set():  # while others were waited for
            reached = dataclasses.replace(recovering.start(claim.found), stopped_by='signal')
        else:
            reached = recovering.lasting(attempt, link, job.config, job.progress, stop_event)
        reached.first_step = reached.first_step if job.progress.first is None else job.progress.first
        scores = _scores(job, reached, stop_event, beside)
        lacking = [each.name for each in job.evaluators if not scores.get(each.name)]
        if lacking and not stop_event.is_set() and reached.stopped_by != 'signal':
            logging.warning('Without a result of the last checkpoint: %s. Run scripts/evaluate.py to evaluate it.', ', '.join(lacking))
        if beside is not None or job.config.eval_every_steps:
            retention.settle(job.model_dir, job.config)
        if stop_event.is_set() and not all(scores.get(each.name) for each in job.evaluators):
            reached.stopped_by = 'signal'  # all steps may be done, but not the evaluation
        if link is not None and reached.stopped_by != 'signal':
            link.finish()
    newest = manifest.all(job.model_dir)
    return record.TrainResult(
        step=reached.step,
        examples=reached.examples,
        loss=reached.loss,
        steps_run=max(0, reached.step - reached.first_step),  # an earlier master's steps may be lost with the tasks that held them
        examples_per_sec=reached.examples_per_sec,
        checkpoint=newest[-1].prefix if newest else None,
        evaluation=scores.get(job.evaluators[0].name, {}) if job.evaluators else {},
        evaluations=scores,
        stopped_by=reached.stopped_by,
        model_dir=job.model_dir,
    )


def _attempt(job: _Job, claim: run_directory.Claim, stop_event: threading.Event, site: connecting.Site) -> recovering.Reached:
    """Trains on a site, from the newest checkpoint on, or with what a lost session has left in memory."""
    claim = dataclasses.replace(claim, found=claim.newest())
    facts = claim.found.manifest.semantics if claim.found else {}
    extras = program.Extras(job.optimizer, shard_examples=meaning.shard_examples(facts, job.config))
    made = program.at(site, job.model, job.dataset, job.config, extras)
    logging.info('%s', made.placement.note)
    supervisor.check_metrics(job.config, job.evaluators, made.step.metrics, job.model)
    functions = {'model': job.model, 'dataset': job.dataset, 'optimizer': job.optimizer}
    return _train(job, made, run_directory.agreed(claim, made, job.config, functions=functions), stop_event)


def _train(job: _Job, made: program.Program, claim: run_directory.Claim, stop_event: threading.Event) -> recovering.Reached:
    """Makes the steps that are left, and leaves them saved."""
    config, step, found = job.config, made.step, claim.found
    reached = recovering.start(found)
    if found is not None and made.total_steps is not None and found.step >= made.total_steps:
        logging.info('This run is done: it has reached step %d of %d.', found.step, made.total_steps)
        if not found.manifest.final:
            manifest.write(job.model_dir, dataclasses.replace(found.manifest, final=True))
        job.progress.begins(found.step)
        return reached
    if stop_event.is_set():  # while the graph was built
        if job.progress.save is not None:
            raise recovering.Stopped
        return dataclasses.replace(reached, stopped_by='signal')
    job.progress.step, job.progress.rate = lambda: reached.step, lambda: reached.examples_per_sec
    save = functools.partial(leaving.save, made, config, claim)
    job.progress.save = job.progress.save or save  # a task may hold variables of an earlier master
    job.member.follow(job.progress.step)
    inside = inside_lib.Inside(job.model, job.evaluators, stop_event) if config.eval_every_steps else None
    around = run_hooks.Around(stop_event, inside, stepping.seen(made, config, job.hooks), job.progress.saves_by)
    hooks = (*job.hooks, *made.site.hooks)
    with inside or contextlib.nullcontext(), opened(made, config, claim=claim, hooks=hooks, around=around) as master:
        if made.noted is not None:  # the tasks of a cluster may have been further than the checkpoint
            number, seen = master.raw_session().run([step.global_step, step.saved['examples_seen']])
            reached.first_step, reached.step, reached.examples = int(number), int(number), int(seen)
            reached.loss = made.noted.reported(master.raw_session()).get('loss', reached.loss)
        job.progress.save = save
        job.progress.begins(reached.step)
        _loop(master, step, reached, around)
    reached.stopped_by = master.stopped_by or 'hook'
    return reached


@contextlib.contextmanager
def opened(
    made: program.Program,
    config: config_lib.Config,
    *,
    claim: run_directory.Claim = _UNCLAIMED,
    hooks: Sequence[tf.train.SessionRunHook] = (),
    around: run_hooks.Around | None = None,
) -> Iterator[session.MasterSession]:
    """The master session of a program with all its hooks, its variables set; the body makes the steps.

    Args:
      made: what to run; its graph is finalised here.
      config: `model_dir`, reports and checkpoints.
      claim: the checkpoint to go on from, and what goes with the right to write; by default a new run that nobody disputes.
      hooks: the user's.
      around: what goes on beside the steps.
    """
    around = around or run_hooks.Around()
    step, model_dir = made.step, str(config.model_dir)
    with made.graph.as_default(), tf.device(made.placement.parameter_device), process.uncollected():
        keeper = saver.Saver(step.saved, step.input, config=config, model_dir=model_dir, facts=saver.Facts(claim.facts, claim.check))
        starter = starting.Starter(made, claim, config)
    around.told(keeper)
    with contextlib.ExitStack() as closing:
        closing.callback(keeper.close, _CLOSE_SECS)
        runs = run_hooks.several(step, config)
        watching = run_hooks.watching(made, config, runs, lambda: master.raw_session())
        # Whatever ends the run but a signal ends it for good. Saving comes last: what it saves has passed every hook.
        saving = checkpointing.CheckpointHook(keeper, step.step, config=config, final=lambda: master.stopped_by != 'signal')
        reports = writers.Reports(model_dir)
        closing.callback(reports.close)
        reports.counts.update(made.counts, **({'rollbacks': 0} if config.nan_policy == 'rollback' else {}))
        inside = around.hooks(made, watching, claim.check, lambda: master.stopped_by != 'signal')
        reporting = [*run_hooks.reporting(made, config, reports, closing, around), saving, *inside]
        run_hooks.timed(reporting, around.seen)
        back = run_hooks.going_back(functools.partial(keeper.wait, _CLOSE_SECS), starter, reports, reporting, runs)
        ending = run_hooks.stopping(made, config, around.stop or threading.Event(), runs)
        told = watch.StepHook(watching, step.step, around.seen), watch.SavingHook(watching)
        stopping = [*run_hooks.not_finite(made, config, back), *ending]
        first = [guard.GuardHook(claim.check), *filter(None, [runs]), told[0]]
        every_hook = (*first, *stopping, *hooks, told[1], *reporting)
        master = session.MasterSession(made.graph, every_hook, connect=made.site.session, initialize=starter.start, ended=step.input.ended)
        with run_hooks.rescuing(around.stop, watching, master, keeper, (step, runs)), watching, master:
            if _is_further(made, claim.found, master.raw_session()):
                saving.owes()
            try:
                yield master
            finally:
                keeper.wait(_CLOSE_SECS)  # here: a checkpoint in writing is read from the session


def _is_further(made: program.Program, found: manifest.Checkpoint | None, raw: tf.Session) -> bool:
    """Whether a new session's variables are further than the newest checkpoint, as those that the tasks of a cluster still hold may be."""
    return made.noted is not None and int(raw.run(made.step.global_step)) > (0 if found is None else found.step)


def _loop(
    master: session.MasterSession,
    step: structs.TrainStep,
    reached: recovering.Reached,
    around: run_hooks.Around,
) -> None:
    """The steps; the rate leaves out the first, in which TensorFlow prepares itself."""
    stepper, clock = stepping.Stepper(master, step, around.seen), around.clock
    started, first_examples = clock(), reached.examples
    try:
        while not master.should_stop():
            if around.stop is not None and around.stop.is_set():  # since the last step, so the next one is not begun
                master.request_stop('signal')
                break
            made = stepper.make(reached.step)
            if made.report is not None:
                reached.examples, reached.loss = made.report
            if reached.step == reached.first_step:
                started, first_examples = clock(), reached.examples
            reached.step = made.step
        reached.step, reached.examples = stepper.reached()
    finally:
        seconds = clock() - started
        reached.examples_per_sec = (reached.examples - first_examples) / seconds if seconds else 0.0


def _scores(job: _Job, reached: recovering.Reached, stop_event: threading.Event, beside: supervisor.Supervisor | None) -> supervisor.Scores:
    """The newest checkpoint's metrics by each evaluator; none after a signal."""
    if reached.stopped_by == 'signal':
        return {}
    if beside is not None:
        return beside.wait(_EVALUATION_SECS, stop=stop_event)
    known = reached.step if reached.step == reached.first_step else None
    if job.config.eval_every_steps and known is None:
        return supervisor.known(job.evaluators, reached.step)
    return supervisor.at_end(job.model, job.evaluators, known=known, stop=stop_event)
