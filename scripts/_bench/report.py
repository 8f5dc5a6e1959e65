"""What was measured, as a table, a plot of characters, JSON lines, and against an earlier run."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from towers import errors
from towers.run import writers

Row = Mapping[str, Any]
_KEY = ('workload', 'towers', 'source', 'side', 'base')
_BAR, _NAME = 30, 46  # widths


def table(rows: Sequence[Row]) -> str:
    """One line for each side: ratio to the first side with its quartiles, a bar, steps per second, start and memory."""
    if not rows:
        return 'Nothing to compare: the first side is left out.'
    widest = max(float(row['ratio']) for row in rows)
    lines = [f'{"":{_NAME}} {"ratio":>6} {"(quartiles)":14}{"":{_BAR}}  steps/s  start s  peak MB  clean slices']
    for row in rows:
        name = f'{row["workload"]} x {row["towers"]} {row["source"][:9]:9} {row["side"]}'
        bar = '#' * max(1, round(_BAR * row['ratio'] / widest))
        spread = f'({row["low"]:.2f}-{row["high"]:.2f})'
        lines.append(
            f'{name:{_NAME}.{_NAME}} {row["ratio"]:6.2f} {spread:14}{bar:{_BAR}} {row["steps_per_sec"]:8.1f} {row["start_secs"]:8.1f} '
            f'{row["peak_mb"]:8.0f}  {row["clean"]}/{row["slices"]}'
        )
    if any(row['is_disturbed'] for row in rows):
        lines.append('Others kept this machine busy: with so few clean slices all are counted; measure again on a quiet machine.')
    return '\n'.join(lines)


class Out:
    """The file of JSON lines to which rows are appended; what a full disk does not take is kept, and written with what comes later.

    Args:
      path: None = rows are written nowhere.

    Raises:
      ValueError: the file can't be opened for writing.
    """

    def __init__(self, path: str | None) -> None:
        self._path, self._lines = path, writers.JsonLines(path) if path else None
        self._kept, self._error = list[Row](), OSError()
        try:
            if path:
                open(path, 'a').close()
        except OSError as error:
            raise ValueError(f'--out={path} can not be written ({error.strerror}); give a file in a folder that is there.') from None

    def add(self, rows: Iterable[Row]) -> None:
        """Appends the rows in order, as far as they can be written."""
        if self._lines is None:
            return
        self._kept += rows
        while self._kept:
            if error := self._lines.append(self._kept[0]):
                self._error = error
                return
            del self._kept[0]

    def close(self) -> None:
        """Ends the writing.

        Raises:
          NotWritten: rows are left that could not be written.
        """
        if self._lines is not None:
            self._lines.close()
        if self._kept:
            reason = self._error.strerror or self._error
            raise errors.NotWritten(f'{self._path} lacks the last {len(self._kept)} rows ({reason}); the tables above hold them.')


def read(path: str) -> list[Row]:
    """The rows of such a file.

    Raises:
      ValueError: there is no such file, or a line is no row.
    """
    if not os.path.isfile(path):
        raise ValueError(f'{path} is no file; expected one that an earlier --out wrote.')
    with open(path) as file:
        rows = [_row(path, number, line) for number, line in enumerate(file, start=1)]
    if not rows:
        raise ValueError(f'{path} holds no rows; expected what --out wrote.')
    return rows


def moved(before: Sequence[Row], now: Sequence[Row]) -> Iterator[str]:
    """A line for each ratio whose quartiles don't meet those of the earlier run, the newest of each case and side."""
    earlier = {tuple(row[key] for key in _KEY): row for row in before}
    pairs = [(row, earlier.get(tuple(row[key] for key in _KEY))) for row in now]
    if before and not any(old for _, old in pairs):
        yield 'Nothing to compare: the earlier run has none of these cases with these sides.'
    for row, old in pairs:
        if old is not None and (row['high'] < old['low'] or row['low'] > old['high']):
            change = row['ratio'] / old['ratio'] - 1
            name = ' '.join(str(row[key]) for key in _KEY[:-1])
            yield f'{name}: {old["ratio"]:.2f} -> {row["ratio"]:.2f} ({change:+.0%}), {"slower" if change < 0 else "faster"}'


def _row(path: str, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
        missing = [key for key in (*_KEY, 'ratio', 'low', 'high') if key not in row]
    except (ValueError, TypeError):
        missing = ['a JSON object']
    if missing:
        raise ValueError(f'{path}: line {number}: expected a row as --out writes them, missing {", ".join(missing)}; give another file.')
    return row
