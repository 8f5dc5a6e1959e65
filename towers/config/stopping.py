"""When a training has learned enough: a metric of an evaluator that gets no better, or has reached a target."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PATIENCE = re.compile(r'([^:<>=]+)(?::(min|max))?:(\d+)')
_TARGET = re.compile(r'([^:<>=]+)(<=|>=)([-+.\deE]+)')


@dataclasses.dataclass(frozen=True)
class Rule:
    """What `--early_stop` asks for.

    Attributes:
      metric: its name in an evaluator's results.
      rises: whether more is better.
      patience: evaluations without a better value; None = a target.
      target: the value to reach; None = patience.
    """

    metric: str
    rises: bool
    patience: int | None = None
    target: float | None = None

    def holds(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Why training ends, in words; empty while it goes on.

        Args:
          rows: results of one evaluator; of several for one step the last one counts.
        """
        values = {row['step']: row[self.metric] for row in rows if isinstance(row.get(self.metric), int | float) and 'step' in row}
        best, since = None, 0
        for step in sorted(values):
            value = values[step]
            if self.target is not None and (value >= self.target if self.rises else value <= self.target):
                return f'{self.metric} is {value:.6g} at step {step}'
            better = best is None or (value > best[1] if self.rises else value < best[1])
            best, since = ((step, value), 0) if better and value == value else (best, since + 1)
        if best is None or self.patience is None or since < self.patience:
            return ''
        return f'{self.metric} got no better than {best[1]:.6g}, of step {best[0]}, in {since} evaluations'


def parse(text: str) -> Rule:
    """A rule from such as 'accuracy:5', 'perplexity:min:3', 'accuracy>=0.99' and 'loss<=0.1'.

    Raises:
      ValueError: it is none of these.
    """
    target = _TARGET.fullmatch(text)
    patience = _PATIENCE.fullmatch(text)
    if patience and int(patience[3]) > 0:
        way = patience[2] or ('min' if patience[1] == 'loss' else 'max')
        return Rule(patience[1], way == 'max', patience=int(patience[3]))
    try:
        if target:
            return Rule(target[1], target[2] == '>=', target=float(target[3]))
    except ValueError:
        pass
    raise ValueError(
        f'--early_stop wants metric:evaluations or metric>=value, got {text!r}; give e.g. accuracy:5, loss:5 or accuracy>=0.99.'
    )
