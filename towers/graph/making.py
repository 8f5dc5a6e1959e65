"""Who makes a model's variables: whatever is built first of it; all else shares them. Part of the stage `strategies`."""

import contextlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from towers import structs
from towers.graph import variables


class Maker:
    """Makes a model's variables while it is first built, as a survey or as tower 0, and gives them to those that come later.

    Args:
      seed: the run's seed.
      is_done: whether all variables are there already.
    """

    def __init__(self, seed: int, *, is_done: bool = False) -> None:
        self._seed, self._is_done = seed, is_done
        self._plain: list[tf.Variable] = []  # made in a survey without `get_variable`, by which only one tower can find them

    @contextlib.contextmanager
    def scope(self, tower: structs.Tower, place: variables.Place, localise: variables.Localise) -> Iterator[None]:
        """The context in which a tower's model finds its variables.

        Args:
          tower: to be built.
          place: where a variable is made.
          localise: from a canonical variable to what this tower's model uses.
        """
        first = tower.index == 0 and not self._is_done
        again = None if first or tower.index else self._plain
        shared, known = set(), len(tf.global_variables())

        def found(variable: tf.Variable) -> tf.Variable:
            shared.add(variable.ref())
            return localise(variable)

        getter = variables.getter(seed=self._seed, localise=found)
        with variables.creating(place=place, prefix=f'{tower.scope}/', first=first, again=again):
            with tf.variable_scope(tf.get_variable_scope(), reuse=None if first else tf.AUTO_REUSE, custom_getter=getter):
                yield
        if tower.is_survey:
            self._is_done = True
            self._plain = [variable for variable in tf.global_variables()[known:] if variable.ref() not in shared]
