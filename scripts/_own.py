"""A user's own functions by name, package.module:function, and the folders in which their modules are looked for."""

import difflib
import functools
import importlib
import inspect
import multiprocessing
import os
import site
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def is_own(flag: str, name: str) -> bool:
    """Whether a name is a user's function, not one of the zoo.

    Raises:
      ValueError: it is neither.
    """
    if ':' not in name and '.' in name:
        raise ValueError(f'{flag}={name}: expected a name of the zoo or package.module:function; put a colon before the function.')
    return ':' in name


def find(flag: str, name: str, folders: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that `package.module:function` names; the current folder is on the path.

    Args:
      flag: for the message.
      name: what to find.
      folders: those that `prefer` put on the path, for the message.

    Raises:
      ValueError: no such module or function; the message says what was looked for and where.
    """
    module_name, _, attribute = name.partition(':')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and (module_name == error.name or module_name.startswith(f'{error.name}.'))):
            raise  # the module is there and itself imports what is not
        missing = '' if error.name == module_name else f' (no {error.name!r})'
        where = ''.join(f', in {folder}{"" if os.path.isdir(folder) else " (gone)"}' for folder in folders)
        remedy = ' Give the folder that holds it: --code_dir=FOLDER.' if folders else ''
        raise ValueError(
            f'{flag}={name}: no module {module_name!r}{missing} in {os.getcwd()}{where} or on the Python path.{remedy}'
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith('_')]
        near = difflib.get_close_matches(attribute, public, n=2) or public[:5]
        hint = f'; it has {", ".join(near)}' if near else ''
        raise ValueError(f'{flag}={name}: no function {attribute!r} in {module.__file__}{hint}.')
    return function


def bound(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    """A user's model with its arguments, checked against its signature before anything is built."""
    signature = inspect.signature(function)
    try:
        signature.bind(tf.constant, training=True, **args)
    except TypeError as error:
        raise ValueError(
            f'--model={name}: {function.__name__}{signature} is called with (batch, training=..., and --model_args): {error}.'
        ) from error
    return functools.partial(function, **args)


def prefer(folders: Iterable[str]) -> None:
    """Puts folders before all others in which modules are looked for, the last one first."""
    found = [os.path.abspath(folder) for folder in folders if os.path.isdir(folder)]
    if found:
        # A child that multiprocessing spawns inherits the path, whose first entry is replaced by the first line of its script.
        sys.path[:0] = [found[-1], *reversed(found)]


def folders(names: Iterable[str | None]) -> list[str]:
    """The folders from which the modules of functions, already found, were imported; none for what is installed."""
    installed = {_ROOT, *site.getsitepackages(), site.getusersitepackages()}
    found = []
    for name in names:
        module_name = (name or '').partition(':')[0]
        module = sys.modules.get(module_name) if name and ':' in name else None
        path = getattr(module, '__file__', None)
        if path:
            levels = len(module_name.split('.')) + (os.path.basename(path) == '__init__.py')
            folder = os.path.abspath(os.path.join(path, *['..'] * levels))
            found += [folder] if folder not in {*installed, *found} else []
    return found


def _order_path() -> None:
    """The current folder comes before this checkout, so that a `models` of its own is found; the commands' imports are made by now.

    The first line of each script put the checkout first, in a child too, where the rest is the path of its parent.
    """
    here = os.getcwd()
    if sys.path[:2] == [_ROOT, here]:
        is_child = multiprocessing.current_process().name != 'MainProcess'
        sys.path[:2] = [] if is_child else [here, here, _ROOT]  # twice, see `prefer`


_order_path()
