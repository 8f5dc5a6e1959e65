"""What a run is asked to do: one frozen dataclass for each section, and `Config`, which is all of them.

A field's default stands beside a one-line doc; scripts make an absl flag of each field. A stage's signature names its
own section only, which a `Config` is.
"""

import dataclasses
import math
import re
from typing import Any, Literal

from towers.config import cluster, devices, evaluation, options, replication, stopping

option = options.option
require = options.require
_at_least = options.at_least
Section = options.Section
DeviceConfig = devices.DeviceConfig
ClusterConfig = cluster.ClusterConfig
StrategyConfig = replication.StrategyConfig
EvalConfig = evaluation.EvalConfig


def shown(value: Any) -> str:
    """A value as it is given to its flag."""
    if isinstance(value, tuple):
        return ','.join(part if isinstance(part, str) else f'{part:g}' for part in value)
    return str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig(Section):
    """Input: how examples become batches."""

    batch_size: int | None = option(None, 'examples for each tower and step; 32 if neither size is given')
    global_batch_size: int | None = option(None, 'examples for each step over all towers; the other way to say batch_size')
    input_pipeline: Literal['global', 'sharded'] = option(
        'global', 'global: one pipeline, its batch split over the towers; sharded: a pipeline for each tower, which keeps its slice'
    )
    input_shards: int = option(
        0, 'cut the dataset into so many shards; each machine reads only its own, other machines get those of a lost one; 0 = none'
    )
    prefetch: int | None = option(None, 'global batches made ahead of the step; chosen by tf.data if not given')
    prefetch_to_device: bool = option(False, "copy a tower's part of the next batch to its device ahead; sharded, without exact_resume")
    train_epochs: int | None = option(None, 'passes over the training data after which training ends')
    exact_resume: bool = option(
        True, "checkpoints hold the input's position; data that has none (generators, random maps) is refused; off: epochs start anew"
    )

    def __post_init__(self) -> None:
        _at_least(self, 1, 'batch_size', 'global_batch_size', 'train_epochs')
        _at_least(self, 0, 'prefetch', 'input_shards')
        require(
            not self.input_shards or self.input_pipeline == 'global',
            f'--input_shards={self.input_shards} gives each machine a pipeline of its own, got --input_pipeline={self.input_pipeline}; '
            'leave one of the two out.',
        )
        require(
            not self.prefetch_to_device or (self.input_pipeline == 'sharded' and not self.exact_resume),
            '--prefetch_to_device copies ahead from a pipeline for each tower, and what is ahead has no position; '
            'give --input_pipeline=sharded --noexact_resume too, or leave it out.',
        )
        require(
            self.batch_size is None or self.global_batch_size is None,
            f'--batch_size={self.batch_size} and --global_batch_size={self.global_batch_size} are two ways to say one thing; give one.',
        )

    def examples_per_step(self, towers: int) -> int:
        """The global batch size for `towers` towers.

        Raises:
          ValueError: the global batch has fewer examples than there are towers.
        """
        size = self.global_batch_size or (self.batch_size or 32) * towers
        require(
            size >= towers,
            f'Global batch {size} is smaller than {towers} towers; use at least one example for each tower, or --num_gpus={size}.',
        )
        return size


# Fields of the optimizer's section that mean something for some choices only: (the field that chooses, those choices).
ONLY_FOR = {
    'momentum': ('optimizer', ('momentum', 'nesterov', 'rmsprop')),
    'beta1': ('optimizer', ('adam', 'lazy_adam', 'adamw')),
    'beta2': ('optimizer', ('adam', 'lazy_adam', 'adamw')),
    'rho': ('optimizer', ('rmsprop', 'adadelta')),
    'epsilon': ('optimizer', ('adam', 'lazy_adam', 'adamw', 'rmsprop', 'adadelta')),
    'boundaries': ('schedule', ('piecewise',)),
    'decay_rate': ('schedule', ('piecewise', 'exponential')),
    'decay_every': ('schedule', ('exponential',)),
    'staircase': ('schedule', ('exponential',)),
    'decay_over': ('schedule', ('polynomial', 'cosine')),
    'end_learning_rate': ('schedule', ('polynomial', 'cosine')),
    'power': ('schedule', ('polynomial',)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer: the update and its learning rate."""

    optimizer: Literal[
        'sgd', 'momentum', 'nesterov', 'adam', 'lazy_adam', 'adamw', 'rmsprop', 'adagrad', 'adagrad_da', 'adadelta', 'ftrl',
        'proximal_sgd', 'proximal_adagrad',
    ] = option('momentum', "tf.train's optimizers by name; nesterov is momentum with look-ahead, lazy_adam adam that leaves rows without a gradient, adamw adam that wants --weight_decay")  # fmt: skip  # noqa: E501
    learning_rate: float = option(0.05, 'learning rate before the schedule; scaled by the number of towers by --lr_scaling only')
    lr_scaling: Literal['none', 'linear', 'sqrt'] = option(
        'none', 'multiply the whole schedule by the number of towers, or its square root; for a rate that suits one --batch_size'
    )
    gradient_reduction: Literal['mean', 'sum'] = option(
        'mean', 'over the examples of the global batch, or what a weight counts; sum makes the step grow with the batch'
    )
    momentum: float = option(0.9, 'of momentum, nesterov and rmsprop')
    beta1: float = option(0.9, "decay of Adam's first moment")
    beta2: float = option(0.999, "decay of Adam's second moment")
    rho: float = option(0.9, 'decay of the squared gradients of rmsprop and adadelta')
    epsilon: float | None = option(None, "the optimizer's epsilon; its own default if not given")
    weight_decay: float = option(
        0.0, 'decoupled weight decay (AdamW): every trainable variable loses learning_rate * weight_decay of itself; slim means --l2'
    )
    l2: float = option(0.0, 'penalty l2 * sum(w^2) / 2 in the loss, which the optimizer sees as gradient; AdamW means --weight_decay')
    ema_decay: float | None = option(None, 'moving averages of the trained variables with this decay, for --use_ema; none if not given')
    clip_norm: float | None = option(None, 'global norm to which the mean gradient is clipped')
    schedule: Literal['constant', 'piecewise', 'exponential', 'polynomial', 'cosine'] = option('constant', 'how the learning rate changes')
    schedule_unit: Literal['steps', 'examples', 'epochs'] = option('steps', 'what boundaries, decay_every, decay_over and warmup count')
    boundaries: tuple[float, ...] = option((), 'piecewise: where the rate is multiplied by decay_rate again')
    decay_rate: float = option(0.1, 'piecewise and exponential: the factor')
    decay_every: float | None = option(None, 'exponential: multiply by decay_rate once in so many')
    staircase: bool = option(True, 'exponential: in steps, not smoothly')
    decay_over: float | None = option(None, 'polynomial and cosine: reach end_learning_rate after so many; the whole training if not given')
    end_learning_rate: float = option(0.0, 'polynomial and cosine: the last rate')
    power: float = option(1.0, 'polynomial: exponent')
    warmup: float = option(0.0, 'the rate rises linearly over so many, whatever the schedule')

    def __post_init__(self) -> None:
        _at_least(self, 0, 'learning_rate', 'weight_decay', 'l2', 'end_learning_rate', 'warmup', 'momentum')
        for name in ('clip_norm', 'decay_every', 'decay_over', 'epsilon', 'decay_rate', 'power'):
            value = getattr(self, name)
            require(value is None or value > 0, f'--{name} must be above 0, got {value!r}; give a positive value.')
        require(self.ema_decay is None or 0 <= self.ema_decay < 1, f'--ema_decay must be in [0, 1), got {self.ema_decay!r}.')
        for name in ('beta1', 'beta2', 'rho'):
            require(0 <= getattr(self, name) < 1, f'--{name} must be in [0, 1), got {getattr(self, name)!r}.')
        require(
            self.schedule != 'piecewise' or bool(self.boundaries),
            '--schedule=piecewise needs --boundaries, got none; give e.g. --boundaries=30,60 --schedule_unit=epochs.',
        )
        require(list(self.boundaries) == sorted(set(self.boundaries)), f'--boundaries must rise, got {list(self.boundaries)}; sort them.')
        require(
            self.schedule != 'exponential' or self.decay_every is not None,
            '--schedule=exponential needs --decay_every, got none; give e.g. --decay_every=1 --schedule_unit=epochs.',
        )
        for field in dataclasses.fields(OptimizerConfig):
            chooser, choices = ONLY_FOR.get(field.name, ('', ()))
            value = getattr(self, field.name)
            require(
                not chooser or value == field.default or getattr(self, chooser) in choices,
                f'--{field.name}={shown(value)} is for --{chooser}={"|".join(choices)}, '
                f'got --{chooser}={getattr(self, chooser or "schedule")}; leave it out, or choose one of those.',
            )
        require(
            self.schedule_unit == 'steps' or self.schedule != 'constant' or self.warmup > 0,
            f'--schedule_unit={self.schedule_unit} is for a schedule or a warm-up, got neither; give one, or leave it out.',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Run: how long, where and with which seed."""

    model_dir: str | None = option(None, 'run directory; runs/<model>-<dataset> for scripts if not given')
    train_steps: int | None = option(None, 'global steps at which training ends; 400 if no limit is given')
    steps_per_run: int = option(1, 'steps in one call of the session, fewer up to one that is reported, saved or evaluated')
    train_secs: float | None = option(None, 'seconds of this call after which training ends')
    early_stop: str | None = option(
        None, "end when an evaluator's metric got no better in so many evaluations, or reached a target: accuracy:5, loss<=0.1"
    )
    seed: int = option(1, 'of initial weights, shuffling, dropout and augmentation')
    deterministic: bool = option(False, 'the same bits at every run of the same towers, at some cost')
    grace_secs: float = option(60.0, 'seconds after a first signal until the process ends unsaved, if a step then still blocks')
    step_timeout_secs: float | None = option(
        None, 'seconds that a step or its input may take, ten times as many at the start; 600 or 50 usual steps if not given; 0 = any'
    )
    on_step_timeout: Literal['stop', 'warn'] = option('stop', 'after step_timeout_secs: stop the run, or warn and go on waiting')
    nan_policy: Literal['stop', 'skip', 'rollback', 'ignore'] = option(
        'stop',
        'a step whose loss or gradient is not finite changes nothing; then: stop; skip its batch; rollback to the newest checkpoint '
        'and skip its batch. ignore: no check, it is applied',
    )
    nan_limit: int = option(10, 'skip and rollback: so many such steps in a row, without a step further than before, then stop')

    def __post_init__(self) -> None:
        _at_least(self, 0, 'grace_secs', 'step_timeout_secs')
        _at_least(self, 1, 'steps_per_run')
        _at_least(self, 0, 'train_steps', 'train_secs', 'seed', 'nan_limit')
        if self.early_stop is not None:
            stopping.parse(self.early_stop)
        require(
            self.nan_limit == RunConfig.nan_limit or self.nan_policy in ('skip', 'rollback'),
            f'--nan_limit={self.nan_limit} is for --nan_policy=skip|rollback, got {self.nan_policy}; leave it out, or choose one.',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints: saving, keeping and starting from them."""

    save_steps: int | None = option(
        None,
        'steps between checkpoints; 0 = not by steps; by default 100, or more where that took over 0.15 % of the time, unless '
        'save_secs is given',
    )
    save_secs: float | None = option(None, 'seconds between checkpoints')
    keep_checkpoints: int = option(5, 'newest checkpoints to keep')
    keep_hours: float | None = option(None, 'keep also the first checkpoint of every so many hours')
    keep_best: str | None = option(
        None, "keep also the best by this metric of an evaluator's: accuracy, loss, or which way: perplexity:min, recall:max"
    )
    sync_checkpoint: bool = option(False, 'write checkpoints in the training loop, not beside it')
    from_scratch: bool = option(False, 'start at step 0 though there are checkpoints; what the old run wrote moves to old-<n>/')
    allow_changed: tuple[str, ...] = option((), 'what may be another than when the run began: learning_rate,global_batch_size,...')
    init_checkpoint: str | None = option(None, 'checkpoint (prefix or folder) whose values a new run starts from')
    init_exclude: tuple[str, ...] = option((), 'regular expressions of variables that init_checkpoint does not set')
    init_rename: tuple[str, ...] = option((), "pattern:replacement pairs from this model's names to init_checkpoint's")

    def __post_init__(self) -> None:
        _at_least(self, 0, 'save_steps', 'save_secs', 'keep_hours')
        _at_least(self, 1, 'keep_checkpoints')
        for name in ('init_exclude', 'init_rename'):
            require(
                not getattr(self, name) or self.init_checkpoint is not None,
                f'--{name}={shown(getattr(self, name))} is for a warm start, got no --init_checkpoint; give it too, or leave this out.',
            )
        require(
            self.keep_best is None or re.fullmatch(r'[^:]+(:(min|max))?', self.keep_best) is not None,
            f'--keep_best wants a metric, or one with :min or :max, got {self.keep_best!r}; give e.g. --keep_best=accuracy.',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Section):
    """Reports: progress, TensorBoard and logs."""

    log_steps: int | None = option(
        None, 'steps between progress lines and rows of metrics.jsonl; by default 20, or more where that took over 0.15 % of the time'
    )
    summary_steps: int | None = option(
        None,
        "steps between the summaries that cost a little: norms, per-tower losses, the model's own; by default 100, or more where that "
        'took over 0.15 % of the time',
    )
    histograms: bool = option(False, 'histograms of variables and gradients in TensorBoard')
    images: bool = option(False, 'the first images of a batch in TensorBoard')
    tensorboard: bool = option(False, 'start TensorBoard on a free port and print its address')
    verbose: bool = option(False, "show TensorFlow's own start-up log")

    def __post_init__(self) -> None:
        _at_least(self, 1, 'log_steps', 'summary_steps')


SECTIONS: tuple[type[Section], ...] = (
    DeviceConfig,
    ClusterConfig,
    StrategyConfig,
    InputConfig,
    OptimizerConfig,
    RunConfig,
    CheckpointConfig,
    ReportConfig,
    EvalConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(
    DeviceConfig, ClusterConfig, StrategyConfig, InputConfig, OptimizerConfig, RunConfig, CheckpointConfig, ReportConfig, EvalConfig
):
    """Everything that a run can be asked for, flat: `Config(num_gpus=4, model_dir='runs/mine')`."""

    def __post_init__(self) -> None:
        for section in SECTIONS:
            section.__post_init__(self)
        replication.check_cluster(self.strategy, machines=len(self.worker_hosts), ps=len(self.ps_hosts))


def evaluation_devices(config: Config) -> DeviceConfig:
    """The devices of an evaluator: the run's options, with towers of its own, on the first of the run's GPUs."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(DeviceConfig)}
    towers = config.eval_num_gpus
    needed = math.ceil(towers / config.towers_per_gpu)
    fields['visible_gpus'] = config.visible_gpus[:needed] if len(config.visible_gpus) >= needed else ()
    on_cpu = config.eval_device == 'cpu'
    fields.update({name: getattr(DeviceConfig, name) for name in devices.GPUS_ALONE if on_cpu})
    own = config.eval_gpu_memory_fraction
    if own is not None or on_cpu:
        fields.update(gpu_memory_fraction=own, gpu_memory_limit_mb=None, memory_plan='off')
    fields['host_memory_mb'] = None  # the training's
    return DeviceConfig(**{**fields, 'num_gpus': towers, 'device': config.eval_device})
