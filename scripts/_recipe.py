"""What a model's recipe sets of the configuration, beside what the command line gives."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import flags, logging

from towers import config as config_lib

# One thing: a boundary means nothing without its unit and its schedule.
_SCHEDULE = ('schedule', 'schedule_unit', *(name for name, (chooser, _) in config_lib.ONLY_FOR.items() if chooser == 'schedule'), 'warmup')
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(config_lib.Config)}


def fields(values: flags.FlagValues, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Config that the recipe sets, which one line in the log tells.

    It fills what is not given. It sets nothing where another optimizer than its own is given, whose learning rate would be
    another too, and nothing of its schedule where a part of that is given with another value.
    """
    given = {name: values[name].value for name in _DEFAULTS if not values[name].using_default_value}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    mine = {**_DEFAULTS, **recipe}
    if 'optimizer' in given and given['optimizer'] != mine['optimizer']:
        used = {name: given.get(name, _DEFAULTS[name]) for name in recipe if name != 'optimizer'}
        _say(values, f'nothing is taken (for --optimizer={mine["optimizer"]}); used: {_listed(used)}')
        return {}
    other = [name for name in _SCHEDULE if name in given and given[name] != mine[name]]
    taken = {name: value for name, value in recipe.items() if name not in given and not (other and name in _SCHEDULE)}
    left = f'; its schedule is not taken, as --{other[0]} is given' if other else ''
    _say(values, (_listed(taken) or 'nothing is taken') + left)
    return taken


def recorded(config: config_lib.Config, recipe: Mapping[str, Any]) -> dict[str, list[str]]:
    """The flags' values with which a run has the same fields without its recipe."""
    return {name: [config_lib.shown(getattr(config, name))] for name in recipe}


def _say(values: flags.FlagValues, text: str) -> None:
    logging.info('Recipe of %s: %s.', values.model, text)


def _listed(chosen: Mapping[str, Any]) -> str:
    return ' '.join(f'--{name}={config_lib.shown(value)}' for name, value in chosen.items())
