"""The nouns of Towers: frozen records that the stages hand to one another; none stores on its argument."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import tensorflow.compat.v1 as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
Batch: TypeAlias = Any  # a structure of tensors whose first axis is the example
Dataset: TypeAlias = Callable[[], tf.data.Dataset]  # makes a dataset of single examples in the current graph


@dataclasses.dataclass(frozen=True)
class Tower:
    """Where one copy of the model runs.

    Attributes:
      index: 0-based number of the tower over all machines.
      devices: device strings of this tower; more than one means model parallelism inside the tower.
      host: device string of its machine's CPU.
      is_survey: nothing runs there: the model is built once before all towers, for its variables and what it reads of them.
    """

    index: int
    devices: tuple[str, ...]
    host: str
    is_survey: bool = False

    @property
    def scope(self) -> str:
        """The name scope in which this tower is built: `tower_0`, `tower_1`, ..."""
        return 'survey' if self.is_survey else f'tower_{self.index}'


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices of the towers and of what they share.

    Attributes:
      towers: one for each copy of the model, in order of their index.
      parameter_device: device string of the variables and the averages.
      fake: the towers run on the CPU, in place of GPUs.
      note: one line for the log that says where the towers run and why.
      gpus: (number as CUDA counts, physical number) of each GPU that the towers need, real or fake.
      ps: devices that hold the variables in place of the parameter device.
    """

    towers: tuple[Tower, ...]
    parameter_device: str
    fake: bool
    note: str
    gpus: tuple[tuple[int, int], ...] = ()
    ps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Metric:
    """A quantity that adds up over examples, towers, batches and evaluators.

    Attributes:
      sums: tensors of any shape that add: the totals of two batches are the sums of their `sums`.
      result: function from the totals (numpy arrays, in the order of `sums`) to the value, a float or an array.
    """

    sums: tuple[tf.Tensor, ...]
    result: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Objective:
    """One of several losses of a model, with the variables that it trains (a GAN has two).

    Attributes:
      name: readable name, unique within the model.
      loss: scalar mean over the tower's examples.
      variables: the variables that this loss trains; no variable belongs to two objectives.
    """

    name: str
    loss: tf.Tensor
    variables: tuple[tf.Variable, ...]


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """What a model function returns for one tower's batch.

    Attributes:
      loss: scalar, the mean over the tower's examples; None where only predictions or objectives are made.
      weight: scalar weight of that mean, such as the number of unmasked tokens; None = the number of examples.
      metrics: name -> `Metric`, or a scalar mean over the examples, or a pair (scalar mean, scalar weight).
      predictions: tensors with one row an example, for exporting.
      objectives: several losses in place of `loss`.
    """

    loss: tf.Tensor | None = None
    weight: tf.Tensor | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    predictions: Any = None
    objectives: tuple[Objective, ...] = ()


Model: TypeAlias = Callable[..., ModelOutput]  # model(batch, *, training)


@dataclasses.dataclass(frozen=True)
class TowerBatch:
    """One tower's part of a global batch.

    Attributes:
      features: structure of tensors, first axis [n_i]; where the tower has no example, one row of the global batch.
      examples: int64 scalar n_i, 0 where the row is only a stand-in.
      first: int64 scalar, index in the global batch of the first row.
    """

    features: Batch
    examples: tf.Tensor
    first: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Mark:
    """A counter inside the graph that tells whether a part of a step is done, while the step is not.

    Attributes:
      what: the part, in words: 'the input', 'tower 1 on /gpu:1'.
      advance: operation that counts once, when the part is done; a step runs it too.
      count: int64 scalar, how often it did in this session.
    """

    what: str
    advance: tf.Operation
    count: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Input:
    """A training input: one global batch a step, split over the towers.

    Attributes:
      batches: one `TowerBatch` for each tower.
      examples: int64 scalar, examples in this step's global batch.
      initializer: operation that starts the iterators at the first batch.
      ended: for each iterator a bool scalar that asks it whether it is at its end; none where the data has none.
      position, restore_position: string scalar, the iterators' state after this step's batch (None = not saved); sets them to one.
      fingerprint: identifies the pipeline that a position belongs to; what stands before its '/' the batches that come in it.
      epoch_examples: examples in one pass over the dataset; None = unknown or endless.
      taken: local int64 [2 + shards]: pass, batch in it, examples given of each shard, as of the last step; None where the position is.
      go_to: function (session, place, from this place; None = the start of its pass) that reads on to a place.
      mark: counts the batches, then sets `taken`; comes before all that a step changes.
      place_only: `position` only tells whether there is one; a checkpoint holds `taken` alone.
      shards: examples in each of the shards that the dataset was cut into; none = it was not.
    """

    batches: tuple[TowerBatch, ...]
    examples: tf.Tensor
    initializer: tf.Operation
    ended: tuple[tf.Tensor, ...]
    position: tf.Tensor | None
    restore_position: Callable[[tf.Tensor], tf.Operation] | None
    fingerprint: str
    epoch_examples: int | None = None
    taken: tf.Variable | None = None
    go_to: Callable[..., None] | None = None
    mark: Mark | None = None
    place_only: bool = False
    shards: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StateWrite:
    """A model's own write to a non-trainable variable (a moving mean), read from UPDATE_OPS and not run.

    Attributes:
      variable, kind: the variable that the model writes, by 'assign', 'assign_add' or 'assign_sub'.
      value: what is assigned, added or subtracted.
    """

    variable: tf.Variable
    kind: str
    value: tf.Tensor


@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """What was recorded while one tower was built.

    Attributes:
      tower, output: where it runs; what the model returned, its losses and weight in fp32.
      examples: int64 scalar, real examples of this tower.
      weight: fp32 scalar, this tower's unnormalised share of the mean.
      gradients: of `weight * loss`, aligned with `variables`; None where the loss does not reach a variable.
      variables: the trainable variables as this tower sees them, in order of creation.
      state: the model's writes to non-trainable variables.
      penalties: regularisation terms that the loss does not contain, scalars.
      metrics: name -> `Metric`, all short forms resolved, empty towers adding nothing.
      summaries: serialised summary tensors that the model made.
    """

    tower: Tower
    output: ModelOutput
    examples: tf.Tensor
    weight: tf.Tensor
    gradients: tuple[Gradient, ...]
    variables: tuple[tf.Variable, ...]
    state: tuple[StateWrite, ...]
    penalties: tuple[tf.Tensor, ...]
    metrics: Mapping[str, Metric]
    summaries: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Sum:
    """Unnormalised totals: sums of w_i x_i in at least fp32. Adding two Sums is associative.

    Attributes:
      gradients, variables: aligned; the canonical trainable variables (tower 0's).
      weight, loss: fp32 scalars, the sums of the towers' weights and of weight * loss.
      state: summed state writes, each value weighted by examples over `examples`.
      examples: int64 scalar, number of examples.
      metrics: name -> Metric with summed `sums`.
    """

    gradients: tuple[Gradient, ...]
    variables: tuple[tf.Variable, ...]
    weight: tf.Tensor
    loss: tf.Tensor
    state: tuple[StateWrite, ...]
    examples: tf.Tensor
    metrics: Mapping[str, Metric]


@dataclasses.dataclass(frozen=True)
class Update:
    """One application of a total: apply these gradients to these variables, on this device.

    Attributes:
      device: device string for the update's own operations.
      scope: makes the context in which the optimizer makes its slots.
      gradients, variables: aligned; one copy of the trainable variables.
      state: writes to apply with it; only one of several Updates carries them.
    """

    device: str
    scope: Callable[[], AbstractContextManager[Any]]
    gradients: tuple[Gradient, ...]
    variables: tuple[tf.Variable, ...]
    state: tuple[StateWrite, ...]


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """All that a session needs to know of one training step.

    Attributes:
      ops: the operation that makes one whole step, one for each runner; an output of it says whether the step changed anything.
      step: int64 scalar, global_step after this step; fetching it is ordered with the step.
      report: name -> scalar, fetched at every step: step, loss, penalty, total_loss, learning_rate, examples, examples_seen, skipped.
      scalars: name -> scalar tensor, computed only when summaries are due: gradient_norm, weight_norm, towers/0/loss, ...
      metrics: name -> Metric, totals of this step's global batch.
      summaries, summary_prefixes: serialised Summary tensors of the model and the histograms; scope prefixes to strip from their tags.
      global_step, saved: the int64 step variable, and the variables of a checkpoint by name.
      sync: operation that sets every copy from the canonical variables, run after initialising and restoring.
      input: the input that feeds the step.
      marks: of the input and of each tower; fetch their `advance` with `ops`.
      waited: fp64 [2], seconds that this step waited for its batch, and that it took; fetched with it. None = not measured.
    """

    ops: tuple[tf.Operation, ...]
    step: tf.Tensor
    report: Mapping[str, tf.Tensor]
    scalars: Mapping[str, tf.Tensor]
    metrics: Mapping[str, Metric]
    summaries: tuple[tf.Tensor, ...]
    summary_prefixes: tuple[str, ...]
    global_step: tf.Variable
    saved: Mapping[str, tf.Variable]
    sync: tf.Operation
    input: Input
    marks: tuple[Mark, ...] = ()
    waited: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The only functions in which replication strategies differ.

    Attributes:
      name: as in `--strategy`.
      scope: Tower -> context in which that tower's model is built; its value is a `gradients.Own`.
      reduce: the towers' outputs -> their Sum, once, or beside each tower's variables.
      spread: (one Sum, or all that `reduce` made; the towers' outputs) -> the Updates that bring it to every copy of the variables.
    """

    name: str
    scope: Callable[[Tower], AbstractContextManager[Any]]
    reduce: Callable[[Sequence[TowerOutput]], Sequence[Sum]]
    spread: Callable[[Sequence[Sum], Sequence[TowerOutput]], Sequence[Update]]
