"""How a tower sees the model's variables: created once, named as in a one-tower program, read once a step.

`getter` and `creating` are the two hooks that TensorFlow has for this: a custom getter sees `get_variable` by name, a
creator scope sees every variable that is made, an optimizer's slots included.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import tensorflow.compat.v1 as tf

from towers import randomness, reads, transfers
from towers.graph import reseeding

Localise = Callable[[tf.Variable], tf.Variable]
Place: TypeAlias = Callable[[Mapping[str, Any]], str]


def view(
    variable: tf.Variable,
    device: str,
    *,
    scope: str = 'read',
    name: str | None = None,
    read: Callable[[tf.Variable], tf.Tensor] | None = None,
) -> tf.Variable:
    """The same variable, whose dense value crosses to `device` once a step however often it is used.

    The view stays a variable: `assign` writes the original, and gathers go to the table itself, so that a table is
    never read whole. It equals the original, in sets too. The read is made when the value is first asked for.

    Args:
      variable: a dense resource variable.
      device: device string of the reader.
      scope: name scope of the read.
      name: what the view calls itself, as TensorFlow does with ':0'; None = the variable's name.
      read: gives the value, which is brought to the device where it isn't there; None = a read of the variable.
    """
    scope = f'{scope}/{variable.op.name}/'

    came: list[tf.Tensor] = []

    def value() -> tf.Tensor:
        if not came:
            # The first use may lie inside a function or a branch, whose tensors nobody else can use: read outside it.
            with variable.graph.as_default(), tf.control_dependencies(None), tf.name_scope(scope), tf.device(None), tf.device(device):
                value = reads.read(variable) if read is None else read(variable)
                here = value.device == transfers.name_of(device) != variable.device
                came.append(value if here else tf.identity(value, name='to_tower'))
        return came[0]

    original_type: Any = type(variable)
    kind = _view_class(original_type)
    made = kind.__new__(kind)
    own = {'_towers_value': value, '_towers_came': came, '_towers_name': name or variable.name, '_towers_original': variable}
    made.__dict__.update(variable.__dict__, **own)
    return made


def original(variable: tf.Variable) -> tf.Variable:
    """The variable behind a view, or the variable itself."""
    return getattr(variable, '_towers_original', variable)


def value_of(view: tf.Variable) -> tf.Tensor | None:
    """The tensor that a view gives for its value; None where nobody has asked for it yet."""
    came: list[tf.Tensor] = getattr(view, '_towers_came', [])
    return came[0] if came else None


@functools.cache
def _view_class(kind: Any) -> Any:
    def beside_table(method: str) -> Callable[..., tf.Tensor]:
        def gather(self: Any, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
            # The table's rows are gathered, and their gradient made, where it lives: only rows travel.
            with tf.device(None), tf.device(self.device):
                return getattr(super(made, self), method)(indices, name=name)

        return gather

    overrides = {
        'value': lambda self: self._towers_value(),
        'name': property(lambda self: self._towers_name),
        'sparse_read': beside_table('sparse_read'),
        'gather_nd': beside_table('gather_nd'),
        '__eq__': lambda self, other: getattr(other, 'handle', None) is self.handle,
        '__ne__': lambda self, other: getattr(other, 'handle', None) is not self.handle,
        '__hash__': lambda self: hash(self._towers_original),
    }
    made: Any = type('TowerVariable', (kind,), overrides)
    return made


@contextlib.contextmanager
def seen_as(look: Callable[[tf.Variable], tf.Variable]) -> Iterator[Localise]:
    """While a tower is built, its trainable variables are what `look` makes of the canonical ones, one object for each.

    That holds for the result, which maps a canonical variable, and for what `tf.trainable_variables()` returns. A model
    that compares the two, or asks by name or scope, finds what a one-tower program would.

    Args:
      look: from a canonical trainable variable to what the tower's model uses.
    """
    collection = tf.get_default_graph().get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    looks: dict[Any, tf.Variable] = {}

    def localise(variable: tf.Variable) -> tf.Variable:
        if variable.ref() not in looks:
            looks[variable.ref()] = look(variable)
            if variable.trainable:
                collection[:] = [looks.get(v.ref(), v) for v in collection]
        return looks[variable.ref()]

    canonical = list(collection)
    looks.update((variable.ref(), look(variable)) for variable in canonical)
    collection[:] = [looks[variable.ref()] for variable in canonical]
    try:
        yield localise
    finally:
        known = len(canonical)
        collection[:] = [*canonical, *[original(v) for v in collection[known:]]]


def getter(*, seed: int, localise: Localise) -> Callable[..., tf.Variable]:
    """A custom getter for a tower: seeds by name, penalties beside their variable, and the tower's own view.

    Args:
      seed: the run's seed; initial weights depend on it and on the variable's name alone.
      localise: from a canonical variable to what this tower's model uses.
    """
    # An initial value decides its variable's type, but TensorFlow asks for the type again where the variable is shared.
    types = {variable.op.name: variable.dtype.base_dtype for variable in tf.global_variables()}

    def get(getter: Callable[..., tf.Variable], name: str, *args: Any, **kwargs: Any) -> tf.Variable:
        kwargs['use_resource'] = True
        if name in types:
            kwargs['dtype'] = types[name]
        else:
            kwargs['initializer'] = seeded(kwargs.get('initializer'), randomness.fold(seed, name), kwargs)
        if kwargs.get('regularizer') is not None:
            kwargs['regularizer'] = _beside_variable(kwargs['regularizer'])
        variable = getter(name, *args, **kwargs)
        is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
        return localise(variable) if hasattr(variable, 'handle') and not is_local else variable

    return get


def seeded(initializer: Any, seed: int, kwargs: dict[str, Any]) -> Any:
    """An initializer whose draws depend on `seed` alone, not on the operations made before it.

    An initializer that the user gave a seed keeps it; a number is returned as it is.

    Args:
      initializer: as `get_variable` takes it.
      seed: what the draws depend on.
      kwargs: the other arguments of get_variable.
    """
    if initializer is None:
        return tf.glorot_uniform_initializer(seed=seed) if tf.as_dtype(kwargs.get('dtype') or tf.float32).is_floating else None
    if isinstance(initializer, type):
        initializer = initializer()
    if not callable(initializer):
        return reseeding.reseeded(initializer, seed) if isinstance(initializer, tf.Tensor) else initializer
    if not hasattr(initializer, 'get_config'):
        return _seeded_function(initializer, seed, takes_shape=kwargs.get('shape') is not None)
    settings = initializer.get_config()
    if 'seed' in settings and settings['seed'] is None:
        settings.pop('dtype', None)  # get_variable gives it, and TensorFlow warns of it here
        return type(initializer).from_config({**settings, 'seed': seed})
    return initializer


def _seeded_function(initializer: Callable[..., Any], seed: int, *, takes_shape: bool) -> Callable[..., Any]:
    """A plain function draws inside a graph function of its own, where operation seeds count from the start."""

    def call(*args: Any, **kwargs: Any) -> tf.Tensor:
        @tf.function(autograph=False)
        def draw() -> tf.Tensor:
            tf.set_random_seed(seed)
            return tf.convert_to_tensor(initializer(*args, **kwargs))

        return draw()

    def with_shape(shape: Any, dtype: Any = None) -> tf.Tensor:
        return call(shape, dtype=dtype)

    return with_shape if takes_shape else lambda: call()


def _beside_variable(regularizer: Callable[[tf.Variable], Any]) -> Callable[[tf.Variable], Any]:
    """The penalty as one tensor on the variable's device; TensorFlow would make it anew at each use, inside the user's scopes."""

    @functools.cache
    def penalty(reference: Any) -> Any:
        variable = reference.deref()
        with variable.graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.device(variable.device):
            with tf.name_scope(f'{variable.op.name}/Regularizer/'):
                return regularizer(variable)

    return lambda variable: penalty(variable.ref())


@contextlib.contextmanager
def creating(*, place: Place, prefix: str, first: bool, again: Sequence[tf.Variable] | None = None) -> Iterator[None]:
    """Variables made inside are placed, and named without the tower's scope; later towers may make local ones only.

    Args:
      place: what a variable is made of, as a creator gets it -> device string.
      prefix: the tower's name scope with its slash.
      first: whether this is what makes the canonical variables.
      again: where tower 0 is built again, what is given in place of the first ones that it would make; None = it isn't.

    Raises:
      ValueError: a later tower makes a variable that a checkpoint would hold.
    """
    before, made_by = iter(again or ()), 'tower_0' if again is None else 'an earlier build of it'

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
        if not first and not local:
            if (made := next(before, None)) is not None:
                return made
            raise ValueError(
                f'{prefix[:-1]} made the variable {kwargs.get("name") or "Variable"!r}, which {made_by} did not share; '
                f'expected the variables of {made_by}. get_variable inside the model, with the same name each time, is what shares.'
            )
        if local:
            return next_creator(**kwargs)
        with tf.device(None), tf.device(place(kwargs)), without(prefix):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        yield


def by_bytes(devices: Sequence[str]) -> Place:
    """Places each variable on the device that holds the fewest bytes so far."""
    held = dict.fromkeys(devices, 0)

    def place(kwargs: Mapping[str, Any]) -> str:
        least = min(devices, key=held.__getitem__)
        shape, dtype = tf.TensorShape(kwargs.get('shape')), tf.as_dtype(kwargs.get('dtype') or tf.float32)
        held[least] += (shape.num_elements() or 1) * dtype.size
        return least

    return place


def is_trainable(kwargs: Mapping[str, Any]) -> bool:
    """Whether a creator makes a trainable variable."""
    return kwargs.get('trainable') is not False


def without(prefix: str) -> AbstractContextManager[Any]:
    """The current name scope less its leading `prefix`."""
    current = tf.get_default_graph().get_name_scope() + '/'
    if not current.startswith(prefix):
        return contextlib.nullcontext()
    return tf.name_scope(current[len(prefix) :] or None)


@contextlib.contextmanager
def rooted() -> Iterator[None]:
    """Variables made inside (slots, beta powers) get the names of a classic program: no surrounding name scope."""

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        with tf.name_scope(None):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        yield


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Variables made inside are local: initialised, but in no checkpoint and in no trainable collection."""

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        kwargs.update(collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
        with tf.name_scope(None):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        yield


def copy(variable: tf.Variable, tower: int, device: str) -> tf.Variable:
    """A local copy of a canonical variable for one tower, zero until the first sync; it stays in the variable's name scope."""
    scope, _, name = variable.op.name.rpartition('/')
    with local(), tf.device(None), tf.device(device):
        return tf.Variable(
            lambda: tf.zeros(variable.shape, variable.dtype.base_dtype),
            name='/'.join(part for part in (scope, f'replica_{tower}', name) if part),
            use_resource=True,
        )
