"""The section of the configuration about devices, their memory and their threads."""

import dataclasses
import math
from typing import Any, Literal

from towers.config import options

# Fields that mean nothing to CPU devices as fake GPUs, and what they do.
GPUS_ALONE = {
    'xla': 'compiles what runs on GPUs',
    'gpu_allow_growth': "says how a GPU's memory is taken",
    'gpu_allocator': "says who manages a GPU's memory",
    'gpu_thread_mode': 'is for threads that launch kernels on GPUs',
    'gpu_thread_count': 'is for threads that launch kernels on GPUs',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceConfig(options.Section):
    """Devices: where the towers run."""

    num_gpus: int = options.option(1, 'number of towers, one on each GPU')
    device: Literal['auto', 'gpu', 'cpu'] = options.option('auto', 'auto: GPUs where there are any, else CPU devices as fake GPUs')
    visible_gpus: tuple[int, ...] = options.option(
        (), 'physical numbers of the GPUs to use, first to last tower: 5,7; the first ones if not given'
    )
    towers_per_gpu: int = options.option(1, 'so many towers on each GPU, as virtual GPUs with equal parts of its memory')
    gpu_allow_growth: bool = options.option(True, 'take the memory of a GPU as it is needed; off: all of the share at the start')
    gpu_memory_fraction: float | None = options.option(
        None, 'share of each GPU that this process may take, up to 1; a whole GPU if not given'
    )
    gpu_memory_limit_mb: int | None = options.option(None, 'the share in MiB of each GPU, or of each virtual one')
    gpu_allocator: Literal['bfc', 'cuda_malloc_async'] = options.option('bfc', "TensorFlow's own allocator, or CUDA's")
    gpu_thread_mode: Literal['global', 'gpu_private', 'gpu_shared'] = options.option(
        'global', 'threads that launch kernels: those of the session, some for each GPU, or some for all GPUs'
    )
    gpu_thread_count: int | None = options.option(None, 'how many of gpu_private or gpu_shared; 2 if not given')
    memory_plan: Literal['off', 'auto'] = options.option(
        'off', 'auto: the share of the GPUs is what other sessions leave, divided by ours to come'
    )
    host_memory_mb: int | None = options.option(
        None, 'main memory in MiB that this process will take, for the admission; not counted if not given'
    )
    placement: Literal['auto', 'soft', 'strict'] = options.option(
        'auto', 'what a device can not run: soft: moves to the CPU and is listed; strict: is an error; auto: soft on GPUs'
    )
    log_placement: bool = options.option(False, "log each operation's device")
    graph_optimizer: Literal['auto', 'on', 'off'] = options.option(
        'auto', "TensorFlow's rewriting of the training graph (Grappler); auto: off on the CPU, but for updates of single rows"
    )
    xla: bool = options.option(False, 'compile what runs on GPUs with XLA')
    intra_op_threads: int | None = options.option(None, 'threads inside one operation; chosen from devices and towers if not given')
    inter_op_threads: int | None = options.option(None, 'operations that run at once; chosen from devices and towers if not given')
    per_session_threads: bool = options.option(False, "inter_op_threads of the session's own, apart from those of the process")

    def __post_init__(self) -> None:
        options.at_least(
            self, 1, 'num_gpus', 'intra_op_threads', 'inter_op_threads', 'towers_per_gpu', 'gpu_memory_limit_mb', 'gpu_thread_count'
        )
        options.at_least(self, 1, 'host_memory_mb')
        _check_shares(self)
        numbers = self.visible_gpus
        options.require(
            len(set(numbers)) == len(numbers) and all(number >= 0 for number in numbers),
            f'--visible_gpus wants each number once, from 0 on, got {list(numbers)}; give e.g. --visible_gpus=5,7.',
        )
        options.require(
            not numbers or len(numbers) == self.gpus_needed,
            f'--visible_gpus={",".join(map(str, numbers))} names {len(numbers)}, {self.num_gpus} towers with {self.towers_per_gpu} on each '
            f'need {self.gpus_needed}; give as many.',
        )
        options.require(
            self.gpu_thread_count is None or self.gpu_thread_mode != 'global',
            f'--gpu_thread_count={self.gpu_thread_count} is for threads of the GPUs, got --gpu_thread_mode=global; '
            'give --gpu_thread_mode=gpu_private or gpu_shared.',
        )

    @property
    def gpus_needed(self) -> int:
        """GPUs, real or fake, that the towers need."""
        return math.ceil(self.num_gpus / self.towers_per_gpu)


def _check_shares(section: Any) -> None:
    fraction, limit = section.gpu_memory_fraction, section.gpu_memory_limit_mb
    options.require(fraction is None or 0 < fraction <= 1, f'--gpu_memory_fraction must be above 0 and at most 1, got {fraction!r}.')
    for name, value in (('gpu_memory_fraction', fraction), ('gpu_memory_limit_mb', limit)):
        options.require(
            value is None or section.memory_plan == 'off',
            f'--memory_plan=auto chooses the share, got --{name}={value} too; give one of the two.',
        )
    options.require(
        fraction is None or limit is None,
        f'--gpu_memory_fraction={fraction} and --gpu_memory_limit_mb={limit} are two ways to say one thing; give one.',
    )
