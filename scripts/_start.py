"""The start of every command: TensorFlow imported without its noise, logs in one short format.

This module is imported before TensorFlow, so it imports the standard library only. A process that multiprocessing
spawns runs the script's first lines again, and so gets the same.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

_stderr = 2  # file descriptor, another one while 2 is held
_LOG_FORMAT = '%(levelname).1s %(asctime)s %(message)s'


def load_tensorflow(argv: Sequence[str]) -> None:
    """Imports TensorFlow and looks for GPUs, quietly unless `--verbose` is among the arguments, and sets up the logs.

    Two lines of TensorFlow's start-up obey no setting, so file descriptor 2 is held meanwhile; what came is shown after
    all if the import fails.
    """
    end_on_signals()
    if importlib.util.find_spec('tensorflow') is None:
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        print(f'TensorFlow is not installed for {sys.executable}; run: {sys.executable} -m pip install -e {root}', file=sys.stderr)
        sys.exit(2)
    verbose = any(argument.lstrip('-') in ('verbose', 'verbose=true', 'verbose=1') for argument in argv[1:])
    if not verbose:
        os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # the C++ runtime's errors are shown, its warnings are not
    os.environ.setdefault('CUDA_DEVICE_ORDER', 'PCI_BUS_ID')  # so that GPUs have the numbers that nvidia-smi gives them
    with contextlib.nullcontext() if verbose else _held_stderr():
        tf = importlib.import_module('tensorflow.compat.v1')
        tf.config.list_physical_devices('GPU')  # a machine without a driver is told so here, once
    if not verbose:
        tf.get_logger().setLevel(logging.ERROR)
    _set_up_logs()


def end_on_signals() -> None:
    """Until the command has its own handlers, SIGTERM and SIGINT end it with 75: nothing is lost, run it again."""
    if multiprocessing.current_process().name == 'MainProcess':  # parent_process() is not known yet in a child that imports this
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, _end)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    # At once, since what is being imported might catch any exception.
    with contextlib.suppress(OSError):
        os.write(_stderr, f'Stopped by {signal.Signals(signum).name} before the work: nothing to save; run it again.\n'.encode())
    os._exit(75)


def _set_up_logs() -> None:
    absl_logging = importlib.import_module('absl.logging')
    absl_logging.use_absl_handler()
    absl_logging.get_absl_handler().setFormatter(logging.Formatter(_LOG_FORMAT, '%H:%M:%S'))
    absl_logging.set_verbosity(absl_logging.INFO)
    # Our flags are apart from the global ones, whose readers (the logs, a user's model) then see defaults.
    importlib.import_module('absl.flags').FLAGS.mark_as_parsed()


@contextlib.contextmanager
def _held_stderr() -> Iterator[None]:
    """Holds back what is written to file descriptor 2; shows it if the body raises."""
    if sys.stderr is None:  # closed by whoever started us
        yield
        return
    global _stderr
    sys.stderr.flush()
    _stderr = real = os.dup(2)
    with tempfile.TemporaryFile() as held:
        faulthandler.enable(real)  # a TensorFlow that aborts says at least where
        os.dup2(held.fileno(), 2)
        try:
            yield
        except Exception:
            held.seek(0)
            os.write(real, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            faulthandler.enable(2)
            _stderr = 2
            os.close(real)
