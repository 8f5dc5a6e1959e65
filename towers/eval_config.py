"""The section of the configuration that says how checkpoints are evaluated."""

import dataclasses
import re
from typing import Literal

from towers import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(options.Section):
    """Evaluation: the evaluator beside or after the training."""

    evaluate: bool = options.option(False, 'run an evaluator beside the training, in a process of its own')
    eval_name: str = options.option('test', 'name of the evaluator; it writes under eval/<name>')
    eval_cadence: str = options.option(
        'every', 'checkpoints an evaluator takes: every, newest, or those 100steps or 600secs after the last taken; the final one always'
    )
    eval_batch_size: int = options.option(256, 'examples for each tower and evaluation step')
    eval_num_gpus: int = options.option(1, 'towers of the evaluator')
    eval_device: Literal['auto', 'gpu', 'cpu'] = options.option('cpu', "where the evaluator's towers run")
    eval_gpu_memory_fraction: float | None = options.option(None, "the evaluator's share of each of its GPUs, as --gpu_memory_fraction")
    eval_idle_secs: float = options.option(600.0, 'seconds without a new checkpoint after which a continuous evaluator ends')

    def __post_init__(self) -> None:
        options.at_least(self, 1, 'eval_batch_size', 'eval_num_gpus')
        options.at_least(self, 0, 'eval_idle_secs')
        options.require(
            re.fullmatch(r'[\w-][\w.-]*', self.eval_name) is not None,
            f'--eval_name must be the name of a folder, got {self.eval_name!r}; use letters, digits, dots, - and _.',
        )
        cadence(self.eval_cadence)


def cadence(text: str) -> tuple[str, float]:
    """How an evaluator chooses checkpoints: ('every' | 'newest' | 'steps' | 'secs', how many of the last two).

    Raises:
      ValueError: `text` is none of 'every', 'newest', '100steps' and '60secs'.
    """
    if text in ('every', 'newest'):
        return text, 0.0
    found = re.fullmatch(r'(\d+(?:\.\d+)?)(steps|secs)', text)
    if not found:
        raise ValueError(f'--eval_cadence must be every, newest, or such as 100steps or 60secs, got {text!r}; correct it.')
    return found[2], float(found[1])
