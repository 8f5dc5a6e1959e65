"""Looking a name up in one of the zoo's literal dictionaries."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar('T')


def hint(name: str, known: Mapping[str, object]) -> str:
    """'; did you mean a or b?' for the known names near `name`, '' where none is near."""
    near = difflib.get_close_matches(name, known, n=2)
    return f'; did you mean {" or ".join(near)}?' if near else '.'


def look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    """`known[name]`; `kind` ('model', 'dataset') is for the message.

    Raises:
      ValueError: `name` is not known; the message lists the near names and all of them.
    """
    if name not in known:
        raise ValueError(f'Unknown {kind} {name!r}{hint(name, known)} The zoo has {", ".join(known)}.')
    return known[name]
