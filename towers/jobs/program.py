"""From a model, a dataset and a Config to one graph that trains: the stages composed, and nothing run yet."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import randomness, reads, structs
from towers.graph import averages, build, chain, finite, initial, marks, moved, optimizers, schedules, standing, strategies, train_step
from towers.graph.reduce import central
from towers.jobs import connecting, feeding
from towers.run import flight, process, session_config

DEFAULT_STEPS, _IMAGES = 400, 3
_SUMMARIES = 'summaries/'  # entered again


@dataclasses.dataclass(frozen=True)
class Program:
    """A training graph, ready for a session.

    Attributes:
      graph: holds everything below.
      step: the training step.
      site: where it runs.
      total_steps: global_step at which the training ends, None where only the data or the clock ends it.
      init, beside: initialises all variables, global and local, and lookup tables; the part that is not about a checkpoint's variables.
      recorder: keeps the batch of a step that was not finite; None where none is looked for.
      counts: name -> number of what happened before the training and reports show, such as `bad_records` of the dataset.
      noted: what the tasks that hold the variables say of them; None on this machine alone.
    """

    graph: tf.Graph
    step: structs.TrainStep
    site: connecting.Site
    total_steps: int | None
    init: tf.Operation
    beside: tf.Operation
    recorder: flight.Recorder | None
    counts: Mapping[str, int]
    noted: standing.Standing | None

    @property
    def placement(self) -> structs.Placement:
        """Where the towers run."""
        return self.site.placement

    @property
    def proto(self) -> tf.ConfigProto:
        """The session's options."""
        return self.site.proto


@dataclasses.dataclass(frozen=True)
class Extras:
    """What a user may bring beside the model and the data.

    Attributes:
      optimizer: function from the learning rate (fp32 scalar tensor) to a tf.train.Optimizer, in place of `config.optimizer`.
      links: functions from Sum to Sum, the last links of the chain before the update.
      shard_examples: of each of the dataset's shards, where they are known.
    """

    optimizer: optimizers.Factory | None = None
    links: tuple[chain.Link, ...] = ()
    shard_examples: Sequence[int] | None = None


def make(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    optimizer: optimizers.Factory | None = None,
    links: Sequence[chain.Link] = (),
) -> Program:
    """Builds the training graph of `model` on every tower.

    Args:
      model: `model(batch, *, training) -> ModelOutput`, over `tf.get_variable`.
      dataset: zero-argument function that returns a tf.data.Dataset of single examples.
      config: everything else.
      optimizer: function from the learning rate (fp32 scalar tensor) to a tf.train.Optimizer, in place of `config.optimizer`.
      links: functions from Sum to Sum, the last links of the chain before the update.

    Raises:
      ValueError: the model, the dataset and the configuration don't fit together, or `placement` is strict and not possible.
    """
    return at(connecting.local(config), model, dataset, config, Extras(optimizer, tuple(links)))


def at(
    site: connecting.Site, model: structs.Model, dataset: structs.Dataset, config: config_lib.Config, extras: Extras | None = None
) -> Program:
    """Builds the training graph of `model` on every tower of a site; see `make`."""
    graph, placement, extras = tf.Graph(), site.placement, extras or Extras()
    with graph.as_default(), tf.device(placement.parameter_device), process.uncollected():
        tf.set_random_seed(config.seed)
        count = train_step.counters(placement.parameter_device)
        source = feeding.source(dataset, config, site, shard_examples=extras.shard_examples)
        steps = total_steps(config, source.epoch_examples, len(placement.towers))
        rate = _learning_rate(config, count.step, source, steps, len(placement.towers))
        given = _Given(count, rate, extras.optimizer or optimizers.make(config), extras.links, bool(site.target))
        step, gate, recorder = _step(model, config, source, placement, given)
        with tf.name_scope('init'):
            beside = tf.group(*([gate.noted.claim] if gate.noted else []), initial.group(tf.local_variables()), tf.tables_initializer())
            init = tf.group(beside, initial.group(tf.global_variables()))
    if gate.noted is None:  # other machines place their part themselves
        moved.check(graph, site.proto, config)
    site = dataclasses.replace(site, proto=session_config.for_graph(site.proto, config, placement, graph))
    counts = {'bad_records': dataset.bad_records} if hasattr(dataset, 'bad_records') else {}
    return Program(graph, step, site, steps, init, beside, recorder, counts, gate.noted)


def total_steps(config: config_lib.Config, epoch_examples: int | None, towers: int) -> int | None:
    """The global step at which a training ends: the earliest of its limits, None where it isn't known beforehand."""
    limits = [] if config.train_steps is None else [config.train_steps]
    if config.train_epochs is not None and epoch_examples is not None:
        limits.append(config.train_epochs * math.ceil(epoch_examples / config.examples_per_step(towers)))
    if config.train_steps is None and config.train_epochs is None and config.train_secs is None:
        limits.append(DEFAULT_STEPS)
    return min(limits, default=None)


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a step is made of besides the model and its input."""

    count: train_step.Counters
    rate: tf.Tensor
    optimizer: optimizers.Factory
    links: tuple[chain.Link, ...]
    is_noted: bool


def _learning_rate(config: config_lib.Config, step: tf.Tensor, source: structs.Input, steps: int | None, towers: int) -> tf.Tensor:
    size = config.examples_per_step(towers)
    epoch = None if source.epoch_examples is None else math.ceil(source.epoch_examples / size)
    with tf.name_scope('learning_rate'):
        rate = schedules.make(config, step, steps_per_epoch=epoch, examples_per_step=size, total_steps=steps)
        return rate if config.lr_scaling == 'none' else rate * _scaling(config, towers)


def _scaling(config: config_lib.Config, towers: int) -> float:
    """What the learning rate is multiplied by, which is logged."""
    if config.global_batch_size is not None:
        raise ValueError(
            f'--lr_scaling={config.lr_scaling} is for a batch that grows with the towers, got --global_batch_size='
            f'{config.global_batch_size}; give --batch_size, or the --learning_rate that suits the batch.'
        )
    factor = float(towers) if config.lr_scaling == 'linear' else math.sqrt(towers)
    logging.info('The learning rate is multiplied by %g, as --lr_scaling=%s asks for %d towers.', factor, config.lr_scaling, towers)
    return factor


@dataclasses.dataclass(frozen=True)
class Computed:
    """What a step computes before it changes anything.

    Attributes:
      outputs: the towers'.
      total: gradients that are ready to apply, but for a user's links.
      penalty: fp32 scalar.
      unclipped: `total` before clipping.
      others: the same as `total` beside the other towers' variables, where each has its own.
    """

    outputs: tuple[structs.TowerOutput, ...]
    total: structs.Sum
    penalty: tf.Tensor
    unclipped: structs.Sum
    others: tuple[structs.Sum, ...] = ()


def compute(
    model: structs.Model, config: config_lib.Config, source: structs.Input, placement: structs.Placement, step: tf.Tensor
) -> tuple[structs.Strategy, Computed]:
    """Builds the model on every tower, and the mean gradient with penalties, in the current graph.

    Args:
      model: as in `make`.
      config: everything else.
      source: the input that feeds the towers.
      placement: where they run.
      step: int64 scalar, global_step before the update.

    Raises:
      ValueError: the model does not fit.
    """
    strategy, draws = strategies.make(config, placement), functools.partial(randomness.Draws, config.seed, step)
    if strategies.are_surveyed(config, placement):
        build.survey(model, source, placement.towers[0], scope=strategy.scope, draws=draws)
    outputs = build.training(model, source, placement.towers, scope=strategy.scope, draws=draws)
    with tf.name_scope('average/'):
        made = chain.run_each(strategy.reduce(outputs), config, normalised=central.normalised(outputs), penalties=outputs[0].penalties)
    return strategy, Computed(outputs, *made[0], tuple(each for each, _, _ in made[1:]))


def _step(
    model: structs.Model, config: config_lib.Config, source: structs.Input, placement: structs.Placement, given: _Given
) -> tuple[structs.TrainStep, train_step.Gate, flight.Recorder | None]:
    strategy, made = compute(model, config, source, placement, given.count.step)
    outputs = made.outputs
    with tf.name_scope('average/'):
        total = chain.follow(made.total, given.links)
        totals = [total] if given.links else [total, *made.others]  # a link runs once, as it may draw at random
        report = {
            'loss': total.loss,
            'penalty': made.penalty,
            'total_loss': chain.with_penalty(total.loss, made.penalty),
            'learning_rate': given.rate,
        }
        gate, recorder = _gate(config, source, outputs, total, report)
        if given.is_noted:
            gate = dataclasses.replace(gate, noted=standing.of(tf.global_variables(), given.count.variables, source, report))

    def apply(update: structs.Update, after: Sequence[tf.Tensor]) -> tf.Operation:
        return optimizers.apply(given.optimizer, update, learning_rate=given.rate, weight_decay=config.weight_decay, after=after)

    averaged = averages.followed(apply, total.variables, config.ema_decay, given.count.step)
    operation, report, sync = train_step.make(gate, strategy.spread(totals, outputs), given.count, apply=averaged, report=report)
    step = structs.TrainStep(
        ops=(operation,),
        step=report['step'],
        report=report,
        scalars=_scalars(made.unclipped, outputs, operation),
        metrics=total.metrics,
        summaries=_finite_only((*outputs[0].summaries, *_summaries(total, source, config, operation))),
        summary_prefixes=(f'{outputs[0].tower.scope}/',),
        global_step=given.count.global_step,
        saved=train_step.saved(),
        sync=sync,
        input=source,
        marks=marks.make(source, [(output.tower, output.gradients) for output in outputs]),
        waited=marks.waited(source, placement.towers, operation),
    )
    return step, gate, recorder


def _gate(
    config: config_lib.RunConfig,
    source: structs.Input,
    outputs: Sequence[structs.TowerOutput],
    total: structs.Sum,
    report: Mapping[str, tf.Tensor],
) -> tuple[train_step.Gate, flight.Recorder | None]:
    """What lets a step through, and what looks into one that is not finite."""
    first = () if source.mark is None else (source.mark.advance,)
    if config.nan_policy == 'ignore':
        return train_step.Gate(total.weight, total.examples, first=first), None
    also = {'the loss with the penalty': report['total_loss'], 'the learning rate': report['learning_rate']}
    also.update({f'the new value of {write.variable.op.name}': write.value for write in total.state})
    recorder = flight.Recorder(source, outputs, total, also)
    is_finite = finite.everywhere(total, list(also.values()))
    return train_step.Gate(total.weight, total.examples, is_finite, recorder.keep, first), recorder


def _scalars(total: structs.Sum, outputs: Sequence[structs.TowerOutput], operation: tf.Operation) -> Mapping[str, tf.Tensor]:
    """What is worth a look now and then, too dear for each step."""
    scalars = {f'towers/{output.tower.index}/loss': output.output.loss for output in outputs}
    with tf.name_scope('norms'):
        with tf.control_dependencies([operation]):  # The weights after this step, not a mixture.
            values = [reads.read(v) for v in total.variables]
        return {**scalars, 'gradient_norm': chain.global_norm(total), 'weight_norm': tf.linalg.global_norm(values)}


def _summaries(total: structs.Sum, source: structs.Input, config: config_lib.Config, operation: tf.Operation) -> tuple[tf.Tensor, ...]:
    made = []
    with tf.name_scope(_SUMMARIES):  # raw operations, since tf.summary would put the scope into the tag
        for variable, gradient in zip(total.variables, total.gradients, strict=True) if config.histograms else ():
            with tf.control_dependencies([operation]):
                made.append(tf.raw_ops.HistogramSummary(tag=f'weights/{variable.op.name}', values=variable.read_value()))
            if gradient is not None:
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                made.append(tf.raw_ops.HistogramSummary(tag=f'gradients/{variable.op.name}', values=values))
        for path, leaf in flight.leaves(source.batches[0].features) if config.images else ():
            if leaf.shape.rank == 4 and leaf.shape[-1] in (1, 3, 4):
                made.append(tf.raw_ops.ImageSummary(tag=f'input/{path.strip().replace(" ", "/") or 0}', tensor=leaf, max_images=_IMAGES))
    return tuple(made)


def _finite_only(summaries: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """The same summaries, histograms of finite values only: one of others fails the step before anybody can look into it."""
    made: list[tf.Tensor] = []
    for summary in summaries:
        if summary.op.type == 'MergeSummary':
            made.extend(_finite_only(list(summary.op.inputs)))
        elif summary.op.type == 'HistogramSummary':
            tag, values = summary.op.inputs
            with tf.device(summary.device), tf.name_scope(_SUMMARIES):
                finite = tf.boolean_mask(values, tf.math.is_finite(values)) if values.dtype.is_floating else values
                made.append(tf.raw_ops.HistogramSummary(tag=tag, values=finite))
        else:
            made.append(summary)
    return tuple(made)
