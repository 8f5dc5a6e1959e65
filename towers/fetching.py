"""Fetching many structures of tensors at once through prepared callables, cheaply enough for the hot path."""

import collections
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_MOST_PLANS = 64  # a hook that asks for new objects at every step must not fill the memory
_MAPPINGS = (dict, collections.OrderedDict)  # any other kind of structure is left to TensorFlow whole


class Fetcher:
    """Prepared callables, found by what is asked for: the things to fetch and the form of the results.

    A structure is what `tf.Session.run` takes. Its contents may change between two calls; it is then another one.
    """

    def __init__(self, session: tf.Session) -> None:
        """Prepares callables of `session`, each when it is needed for the first time."""
        self._session = session
        self._plans: dict[Any, _Plan] = {}
        self._leaf_types: set[type] = set()  # so that the hot path tells a tensor from a structure by one look-up
        self._constant: set[int] = set()  # ids of tuples of leaves, which can't change

    def fetch(self, asked: Sequence[Any], options: tf.RunOptions | None = None, metadata: tf.RunMetadata | None = None) -> list[Any]:
        """Runs once and returns the values of each structure in `asked`, in the same form.

        Args:
          asked: fetch structures; a tensor that is in several is fetched once.
          options: of this run; None = none, and no metadata.
          metadata: is filled in where there are options.
        """
        key = tuple([self._signature(structure) for structure in asked])
        plan = self._plans.get(key) or self._make(key, asked)
        flat = plan.step(options=options, run_metadata=metadata) if options else plan.step()
        return [build(flat) for build in plan.builders]

    def _make(self, key: Any, asked: Sequence[Any]) -> '_Plan':
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._constant.clear()
        plan = self._plans[key] = _Plan(self._session, asked)
        self._leaf_types.update({type(leaf) for leaf in plan.leaves} - {str})
        self._constant.update(id(part) for part in asked if isinstance(part, tuple) and self._leaf_types.issuperset(map(type, part)))
        return self._plans.setdefault(tuple([self._signature(structure) for structure in asked]), plan)

    def _signature(self, structure: Any) -> Any:
        kind = type(structure)
        if kind in self._leaf_types or id(structure) in self._constant:
            return id(structure)  # the plan keeps it alive, so that its id stays its own
        if kind in _MAPPINGS:
            return kind, *structure, *[id(part) if type(part) in self._leaf_types else self._signature(part) for part in structure.values()]
        if _is_sequence(structure):
            return kind, *[id(part) if type(part) in self._leaf_types else self._signature(part) for part in structure]
        return structure if kind is str else id(structure)


class _Plan:
    """A prepared callable for some fetch structures: every tensor is fetched once, whoever asks for it.

    TensorFlow's callable gets a flat list, since it spends longer on the form of nested results than this does.
    """

    def __init__(self, session: tf.Session, structures: Sequence[Any]) -> None:
        self.structures = tuple(structures)
        self.leaves: list[Any] = []
        self._places: dict[int, int] = {}
        self.builders = [self._builder(structure) for structure in structures]
        self.step = session.make_callable(self.leaves, accept_options=True)

    def _builder(self, structure: Any) -> Callable[[list[Any]], Any]:
        """A function from the flat values to values in the form of `structure`."""
        kind = type(structure)
        if kind in _MAPPINGS:
            gather, names = self._gather(structure.values()), list(structure)
            return lambda flat: kind(zip(names, gather(flat), strict=True))
        if _is_sequence(structure):
            gather, make = self._gather(structure), getattr(kind, '_make', kind)  # `_make`: a named tuple's own way from a list
            return gather if kind is tuple else lambda flat: make(gather(flat))
        return operator.itemgetter(self._place(structure))

    def _gather(self, parts: Iterable[Any]) -> Callable[[list[Any]], tuple[Any, ...]]:
        parts = list(parts)
        if len(parts) > 1 and not any(type(part) in _MAPPINGS or _is_sequence(part) for part in parts):
            return operator.itemgetter(*map(self._place, parts))
        builders = [self._builder(part) for part in parts]
        return lambda flat: tuple([build(flat) for build in builders])

    def _place(self, leaf: Any) -> int:
        place = self._places.setdefault(id(leaf), len(self.leaves))
        if place == len(self.leaves):
            self.leaves.append(leaf)
        return place


def _is_sequence(structure: Any) -> bool:
    return type(structure) in (list, tuple) or (isinstance(structure, tuple) and hasattr(structure, '_fields'))
