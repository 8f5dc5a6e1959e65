"""What the sections of the configuration are made of: fields that carry their doc, and checks of values."""

import dataclasses
from typing import Any, TypeVar

T = TypeVar('T')


def option(default: T, doc: str, *, repeated: bool = False) -> T:
    """A dataclass field that carries its one-line doc, from which a flag's help is made; a `repeated` flag is given for each entry."""
    return dataclasses.field(default=default, metadata={'doc': doc, 'repeated': repeated})


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def at_least(section: Any, least: float, *names: str) -> None:
    """Raises ValueError where a field of `section` that is given is below `least`."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= least, f'--{name} must be at least {least:g}, got {value!r}; give a larger value.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the sections; `__post_init__` checks one section's values."""

    def __post_init__(self) -> None:
        """Raises ValueError where a value can't be right."""
