"""Fetching many structures of tensors at once through prepared callables, cheaply enough for the hot path."""

import collections
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._plans: dict[Any, Plan] = {}
        self._leaf_types: set[type] = set()  # so that the hot path tells a tensor from a structure by one look-up
        self._constant: set[int] = set()  # ids of tensors and of tuples of them, which can't change and are kept by a plan

    def fetch(self, asked: Sequence[Any], options: tf.RunOptions | None = None, metadata: tf.RunMetadata | None = None) -> list[Any]:
        """Runs once and returns the values of each structure in `asked`, in the same form.

        It is fastest where each of them is a tensor, or a tuple of tensors and operations that is the same one each time.

        Args:
          asked: fetch structures; a tensor that is in several is fetched once.
          options: of this run; None = none, and no metadata.
          metadata: is filled in where there are options.
        """
        plan = self._plan(asked)
        if not options:
            return plan.run()
        flat = plan.step(options=options, run_metadata=metadata)
        return [build(flat) for build in plan.builders]

    def fed(self, asked: Sequence[Any], feeds: Mapping[Any, Any], *about: Any) -> list[Any]:
        """`fetch` with values in place of some tensors; `about`: RunOptions and RunMetadata or None."""
        return self._session.run(asked, feeds, *about)

    def steady(self, asked: Sequence[Any]) -> Callable[[], list[Any]] | None:
        """`fetch` of these structures as a function; None where their contents may change."""
        plan = self._plan(asked)
        return plan.run if all(id(part) in self._constant for part in asked) else None

    def _plan(self, asked: Sequence[Any]) -> 'Plan':
        return self._plans.get(self._key(asked)) or self._make(asked)

    def _key(self, asked: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([id(part) if id(part) in self._constant else self._signature(part) for part in asked])

    def _make(self, asked: Sequence[Any]) -> 'Plan':
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._constant.clear()
        plan = self._plans[self._key(asked)] = Plan(self._session, asked)
        self._leaf_types.update(type(leaf) for leaf in plan.leaves if not isinstance(leaf, str | dict | list | tuple))
        self._constant.update(id(part) for part in asked if self._is_constant(part))
        return self._plans.setdefault(self._key(asked), plan)  # the key of the next call, if it asks for the same objects

    def _is_constant(self, structure: Any) -> bool:
        return type(structure) in self._leaf_types or (isinstance(structure, tuple) and self._leaf_types.issuperset(map(type, structure)))

    def _signature(self, structure: Any) -> Any:
        kind = type(structure)
        if kind in self._leaf_types:
            return id(structure)
        if isinstance(structure, dict):
            return kind, *structure, *[id(part) if type(part) in self._leaf_types else self._signature(part) for part in structure.values()]
        if isinstance(structure, list | tuple):
            return kind, *[id(part) if type(part) in self._leaf_types else self._signature(part) for part in structure]
        return structure if kind is str else id(structure)


class Plan:
    """A prepared callable for some fetch structures: every tensor is fetched once, whoever asks for it.

    TensorFlow's callable gets a flat list, since it spends longer on the form of nested results than this does.
    """

    def __init__(self, session: tf.Session, structures: Sequence[Any]) -> None:
        self.structures = tuple(structures)
        self.leaves: list[Any] = []
        self._places: dict[int, int] = {}
        self.builders = [self._builder(structure) for structure in structures]
        self.step = session.make_callable(self.leaves, accept_options=True)

    def run(self) -> list[Any]:
        """The values of each structure."""
        flat = self.step()
        return [build(flat) for build in self.builders]

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
