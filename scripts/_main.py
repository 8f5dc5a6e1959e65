"""What every command does around its work: flags, exit codes, errors in one line, a table at the end."""

import contextlib
import math
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from absl import flags

from scripts import _flags, _output
from towers import errors
from towers.run import signals
from towers.sessions import admission

ROOT = pathlib.Path(__file__).resolve().parent.parent
DONE, FAILED, MISUSED, DIVERGED, STOPPED = 0, 1, 2, 3, 75  # 76 is given by the session itself: run() was blocked
_NUMBERS = 8  # that a line of a table takes


def run(main: Callable[[flags.FlagValues], int], values: flags.FlagValues, doc: str | None) -> NoReturn:
    """Parses the flags, runs `main` with them, and exits with its code or the one of its error."""
    _handle_signals(_interrupt)
    code = FAILED
    try:
        code = _guarded(main, values, doc or '')
    except Exception:
        traceback.print_exc()
    # Half a second passes until Python and TensorFlow have ended in order, a server never does, and a signal meanwhile would make a
    # failure of what is done.
    _handle_signals(lambda signum, frame: signals.leave(code))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()  # for as long as whoever reads it takes
    signals.leave(code)


def print_table(rows: Mapping[str, Any]) -> None:
    """Prints names and values in two columns."""
    width = max(map(len, rows), default=0)
    with shown_to_the_end(until_signal=False), _output.lines(None) as write:
        for name, value in rows.items():
            write(f'{name:{width}}  {_in_brief(value)}')


def _in_brief(value: Any) -> str:
    """A value in one line; of many numbers, such as a confusion matrix, their shape."""
    shape = np.shape(value)
    if math.prod(shape) > _NUMBERS:
        return f'{" x ".join(map(str, shape))} numbers, see results.jsonl'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


@contextlib.contextmanager
def shown_to_the_end(*, until_signal: bool) -> Iterator[None]:
    """What is printed inside ends quietly where nobody reads it any more, such as `| head`, or by the signal that it goes on until."""
    try:
        yield
    except BrokenPipeError:
        _output.let_go()
    except KeyboardInterrupt:
        if not until_signal:
            raise


def stopped(step: int, steps_run: int, *, from_scratch: bool = False) -> int:
    """Says that a signal ended a training, and what was saved; returns the exit code."""
    without = f'before a further step; step {step} is saved' if step else 'before the first step: nothing to save'
    saved = f'after step {step}, which is saved' if steps_run else without
    again = ', without --from_scratch,' if from_scratch and steps_run else ''
    return _say(STOPPED, f'Stopped by a signal {saved}; run the same command again{again} to go on.')


def tensorboard_command(model_dir: str) -> str:
    """The command that shows a run directory, as it is typed in the current folder."""
    program = pathlib.Path(sys.executable).parent / 'tensorboard'
    if not program.exists():
        return f'tensorboard --logdir={model_dir}'
    with contextlib.suppress(ValueError):
        program = program.relative_to(os.getcwd())
    return f'{program} --logdir={model_dir}'


def _guarded(main: Callable[[flags.FlagValues], int], values: flags.FlagValues, doc: str) -> int:
    if _asks_help(sys.argv):
        print(_flags.help_text(values, doc))
        return DONE
    try:
        _flags.parse(values, sys.argv)
        return main(values)
    except KeyboardInterrupt as error:
        return _say(STOPPED, f'Stopped by {error or "a signal"}; run the same command again to go on.')
    except Exception as error:
        code = _code(error)
        if code is None:
            raise
        return _say(code, error, getattr(error, 'screen', None))


def _code(error: Exception) -> int | None:
    """The exit code of an error whose message says it all; None = its traceback is wanted too, and the code is 1.

    A ValueError of ours says what to do in its message, one out of a user's model needs the line that raised it. What
    TensorFlow's runtime says about a step comes from our session with the node, the device and the user's line in it.
    """
    if isinstance(error, errors.Diverged):
        return DIVERGED
    if isinstance(error, admission.Refused):
        return MISUSED
    of_a_step = type(error).__module__.startswith('tensorflow.') and _raised_in(error, 'towers')
    if of_a_step or type(error).__module__.startswith('towers.'):
        return FAILED
    if isinstance(error, ValueError) and _raised_in(error, 'towers', 'models', 'scripts'):
        return MISUSED
    missing = (FileNotFoundError, NotADirectoryError, PermissionError)
    return MISUSED if isinstance(error, missing) and _raised_in(error, 'models', 'scripts') else None


def _raised_in(error: Exception, *folders: str) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return os.path.realpath(frames[-1].filename).startswith(tuple(f'{ROOT / folder}{os.sep}' for folder in folders))


def _handle_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handler)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Before and after the work, which has handlers of its own."""
    _handle_signals(_leave)
    raise KeyboardInterrupt(f'{signal.Signals(signum).name} outside the work: nothing to save')


def _leave(signum: int, frame: FrameType | None) -> None:
    signals.leave(signals.EXIT_UNSAVED)


def _asks_help(argv: list[str]) -> bool:
    return any(argument in ('--help', '-help', '-h', '-?', '--helpfull', '--helpshort') for argument in argv[1:])


def _say(code: int, message: object, screen: str | None = None) -> int:
    """A message in one line, or a table that the error brings."""
    print(screen or ' '.join(str(message).split()), file=sys.stderr)
    return code
