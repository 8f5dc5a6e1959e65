"""The checks of check_gpu.py: each a command as a user types it, with a limit, and what its output must show."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow.compat.v1 as tf

ROOT = pathlib.Path(__file__).resolve().parent.parent
_STEPS, _TOLERANCE = 60, 1e-3  # convolutions on GPUs add in an order of their own
_AHEAD = '--input_pipeline=sharded', '--noexact_resume'
_IMAGES = '--model=resnet20', '--dataset=synthetic', '--data_args=shape=[32,32,3]', '--data_args=examples=[2048,64]'
# What changes speed and no number: each alone, on the same network and batch as the first.
_CHOICES = {
    'as it is': (),
    'balanced': ('--strategy=balanced',),
    'mirrored': ('--strategy=mirrored',),
    'collective': ('--strategy=collective',),
    'channels first': ('--model_args=channels_first=true',),
    'channels last, no rewriting': ('--graph_optimizer=off',),
    'a pipeline for each tower': _AHEAD,
    'the same, copied ahead': (*_AHEAD, '--prefetch_to_device'),
}
_SHOWN = 12  # lines of a failed command's output


@dataclasses.dataclass(frozen=True)
class Results:
    """What came of it.

    Attributes:
      lines: the report.
      good: whether every check holds.
    """

    lines: tuple[str, ...]
    good: bool


@dataclasses.dataclass(frozen=True)
class Check:
    """A command and what to make of it.

    Attributes:
      name: in the report.
      arguments: of Python.
      holds: function from the output to '' or what is wrong with it.
      tells: what of the output stands in the report, as a regular expression.
    """

    name: str
    arguments: Sequence[str]
    holds: Callable[[str], str] = lambda output: ''
    tells: str = r'^examples/s.*|^.* / .*\(median.*'


def run(device: str, towers: int, *, limit_secs: float) -> Results:
    """Runs all checks; those for which no time is left fail.

    Args:
      device: 'gpu', or 'cpu' for fake ones.
      towers: how many.
      limit_secs: for all together.

    Raises:
      ValueError: there is no GPU to check.
    """
    if device == 'gpu' and not tf.config.list_physical_devices('GPU'):
        raise ValueError(f'{_machine()}: nothing to check; give --device=cpu to rehearse the checks on fake GPUs.')
    end = time.monotonic() + limit_secs
    lines, good = [_machine()], True
    with tempfile.TemporaryDirectory(prefix='towers-check-') as folder:
        for check in _checks(device, towers, pathlib.Path(folder)):
            began = time.monotonic()
            wrong, told = _made(check, max(1.0, end - began))
            good = good and not wrong
            lines.append(f'{"FAILS" if wrong else "holds"}  {check.name} ({time.monotonic() - began:.0f} s){": " + wrong if wrong else ""}')
            lines += [f'       {line}' for line in told]
    return Results(tuple(lines), good)


def _machine() -> str:
    build = tf.sysconfig.get_build_info()
    gpus = [tf.config.experimental.get_device_details(gpu).get('device_name', gpu.name) for gpu in tf.config.list_physical_devices('GPU')]
    cuda = f'CUDA {build.get("cuda_version", "none")}, cuDNN {build.get("cudnn_version", "none")}'
    return f'TensorFlow {tf.version.VERSION}, {cuda}, {os.cpu_count()} cores, GPUs: {", ".join(gpus) or "none"}'


def _checks(device: str, towers: int, folder: pathlib.Path) -> Iterator[Check]:
    found = len(tf.config.list_physical_devices('GPU'))
    virtual = [f'--towers_per_gpu={-(-towers // found)}', '--gpu_memory_limit_mb=4096'] if device == 'gpu' and 0 < found < towers else []
    base = [f'--device={device}', f'--num_gpus={towers}', f'--train_steps={_STEPS}', '--log_steps=1', '--global_batch_size=128', *virtual]

    def training(name: str, *more: str) -> list[str]:
        return [str(ROOT / 'scripts/train.py'), *base, f'--model_dir={folder / name}', *more]

    if device == 'gpu':
        yield Check('tests of real GPUs', ['-m', 'pytest', '-q', '-m', 'gpu', str(ROOT / 'tests')], tells=r'^\d+ passed.*')
    yield Check('one tower', [*training('one'), '--num_gpus=1', *(['--towers_per_gpu=1'] if virtual else [])])
    for strategy in ('parameter_server', 'balanced', 'mirrored', 'collective'):
        name = f'{towers} towers, {strategy}: the losses of one'
        yield Check(name, training(strategy, f'--strategy={strategy}'), lambda _, of=strategy: _differ(folder / 'one', folder / of))
    yield Check('every operation on its own device', training('strict', '--placement=strict'))
    if device == 'gpu' and not virtual:
        yield Check('a share of each GPU', training('share', '--gpu_memory_fraction=0.3', '--nogpu_allow_growth'))
        yield Check("threads of the GPU's own", training('threads', '--gpu_thread_mode=gpu_private'))
    yield Check('an evaluator beside it', training('beside', '--evaluate'), tells=r'.*accuracy.*')
    last = {'gpu': 200, 'cpu': 6}[device]
    for choice, flags in _CHOICES.items():
        place = f'speed {choice}'
        arguments = training(place, *_IMAGES, *flags, f'--train_steps={last}', f'--log_steps={last // 2}')
        yield Check(f'speed of ResNet-20, {choice}', arguments, functools.partial(_improper, folder / place), tells=r'^step .*examples/s')
    overhead = [str(ROOT / 'scripts/benchmark.py'), '--measure=overhead', '--rounds=5', *base]
    yield Check('speed', [argument for argument in overhead if not argument.startswith(('--train_steps', '--log_steps'))])


def _made(check: Check, limit_secs: float) -> tuple[str, list[str]]:
    """What is wrong with a check, '' for nothing, and the lines of its output to report."""
    try:
        done = subprocess.run(
            [sys.executable, *check.arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_secs, check=False
        )
    except subprocess.TimeoutExpired:
        return f'no end within the {limit_secs:.0f} s that were left', []
    if done.returncode:
        return f'exit code {done.returncode}', done.stdout.splitlines()[-_SHOWN:]
    return check.holds(done.stdout), re.findall(check.tells, done.stdout, re.MULTILINE)


def _improper(folder: pathlib.Path, _: str) -> str:
    """What is wrong with the last row of a run's metrics, '' where its loss is finite."""
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return '' if rows and math.isfinite(rows[-1]['loss']) else f'no finite loss in {len(rows)} rows'


def _differ(one: pathlib.Path, other: pathlib.Path) -> str:
    """How the losses of two runs differ, '' where they don't."""
    losses = [[json.loads(line)['loss'] for line in (folder / 'metrics.jsonl').read_text().splitlines()] for folder in (one, other)]
    if len(losses[0]) != _STEPS or len(losses[1]) != _STEPS:
        return f'{len(losses[0])} and {len(losses[1])} rows, expected {_STEPS} each'
    worst = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(*losses, strict=True))
    return '' if worst <= _TOLERANCE else f'losses differ by {worst:.2g}, expected {_TOLERANCE:g} at most'
