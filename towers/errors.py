"""The errors that a run ends with, and the place in the graph and in the user's code that an error came from."""

import pathlib
import re
import sysconfig
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_TENSORFLOW = next(str(folder) for folder in pathlib.Path(tf.__file__).parents if folder.name == 'tensorflow')
_LIBRARY = str(pathlib.Path(__file__).parent)
_STANDARD = sysconfig.get_paths()['stdlib']
_FIRST_ROOT = re.compile(r'root error\(s\) found\.\s*\(0\)(.*?)(?=\n\s*\(1\)|\n\d+ successful operations|\Z)', re.DOTALL)
_NODE = re.compile(r'(?<!\}\})\{\{node ([^}]+)\}\}')  # not one inside a function
_IN_DATASET = re.compile(r'Error in user-defined function passed to \w+:\d+ transformation with iterator: \S+: ')
_RULE = re.compile(r'={5,}')  # between two errors
_FUNCTION = re.compile(r'\{\{function_node ([^}]+)\}\}')


# What a session raises where another task is gone, frozen, or another process than before.
OF_TASKS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.CancelledError)


class Diverged(RuntimeError):
    """The loss is not finite, so training on would only spoil the variables; scripts exit with 3."""


class Stalled(RuntimeError):
    """A step or another part of the run took longer than it may; scripts exit with 1."""


class NotWritten(RuntimeError):
    """What was asked for could not be written, as on a full disk; scripts exit with 1."""


class OutOfMemory(tf.errors.ResourceExhaustedError):
    """A device has no memory left; scripts show `screen`, which has lines, and exit with 1."""

    def __init__(self, message: str, screen: str) -> None:
        super().__init__(None, None, message)
        self.screen = screen


def says_end(error: tf.errors.OpError) -> bool:
    """Whether an iterator's end is among what went wrong."""
    return 'End of sequence' in error.message


def named(error: tf.errors.OpError, graph: tf.Graph) -> set[str]:
    """The operations of `graph` that an error says it came from."""
    operations = {operation.name for operation in graph.get_operations()}
    return operations.intersection(_NODE.findall(error.message))


def source_line(operation: tf.Operation) -> str | None:
    """The user's line that made an operation, as 'file:line', or None where the graph does not know it.

    That is the innermost frame outside TensorFlow, Towers and Python itself.
    """
    return users_line(list(operation.traceback or ()))


def users_line(frames: Sequence[Any]) -> str | None:
    """The innermost of a stack's frames that is a user's, as 'file:line'."""
    for frame in reversed(frames):
        filename = str(frame.filename)
        ours = filename.startswith((_TENSORFLOW, _LIBRARY, '<'))
        python = filename.startswith(_STANDARD) and 'site-packages' not in filename
        if not ours and not python:
            return f'{filename}:{frame.lineno}'
    return None


def find_operation(error: tf.errors.OpError, graph: tf.Graph) -> tf.Operation | None:
    """The operation of `graph` that an error came from, or None.

    A prepared callable's error carries none, so names are taken from the message: the first node that `graph` has, else
    the operation that calls the function named there (an assertion sits in a branch of its own).
    """
    if error.op is not None:
        return error.op
    message = _first_root(error.message)
    operations = {operation.name: operation for operation in graph.get_operations()}
    named = [name for name in _NODE.findall(message) if name in operations]
    if named:
        return operations[named[0]]
    functions = set(_FUNCTION.findall(message))
    for operation in operations.values() if functions else ():
        if any(value.func.name in functions for value in operation.node_def.attr.values()):
            return operation
    return None


def located(error: tf.errors.OpError, graph: tf.Graph) -> tf.errors.OpError:
    """The same kind of error with a message of one line: what went wrong, in which node and device, whose line made it.

    Args:
      error: as a session raised it; raise the result `from` it.
      graph: the graph that ran.

    Returns:
      a new error; where the message names no operation of `graph` it is the bare reason.
    """
    operation = find_operation(error, graph)
    message = _reason(error.message)
    if operation is not None:
        line = source_line(operation)
        place = f'node {operation.name} ({operation.type}) on {operation.device or "no particular device"}'
        message += f' [{place}{", made at " + line if line else ""}]'
    kind: Any = type(error)
    return kind(operation and operation.node_def, None, message)


def brief(message: str) -> str:
    """A message in one line, without what gRPC says of its calls and what comes behind that."""
    text = ' '.join(_RULE.sub(' ', message).split())
    return text.partition(' Additional GRPC error information')[0]


def _first_root(message: str) -> str:
    found = _FIRST_ROOT.search(message)
    return found.group(1) if found else message


def _reason(message: str) -> str:
    """A runtime's message without its traceback and its list of nodes, in one line."""
    text = _first_root(re.sub(r"\AGraph execution error:(.*\nNode: '[^\n]*\n)?", '', message, flags=re.DOTALL))
    return brief(re.sub(r'\[\[.*?\]\]', '', _IN_DATASET.sub('', text), flags=re.DOTALL))
