"""What people would use instead on TensorFlow 2: MirroredStrategy with a loop of one's own, and Keras' fit under it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from scripts._bench import sides, workloads


@contextlib.contextmanager
def mirrored(case: sides.Case) -> Iterator[sides.Step]:
    """tf.distribute.MirroredStrategy, a tf.function round strategy.run, a Keras optimizer: the guide's custom training loop."""
    strategy = _strategy(case.towers)
    with strategy.scope():
        store = _variables(case.workload)
        trained = [variable for variable in store.values() if variable.trainable]
        optimizer = tf2.keras.optimizers.SGD(workloads.RATE, workloads.MOMENTUM)
        optimizer.build(trained)
    read = _reader(case, strategy)

    def replica(batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        with tf2.GradientTape() as tape, tf.variable_scope('', custom_getter=lambda getter, name, *_, **__: store[name]):
            loss = case.workload.model(batch, training=True).loss
            if case.workload.l2:
                loss += case.workload.l2 * tf.add_n([tf.nn.l2_loss(variable) for variable in trained])
            scaled = loss / case.towers
        optimizer.apply_gradients(zip(tape.gradient(scaled, trained), trained, strict=True))
        return loss

    @tf2.function
    def step(batch: Any) -> tf.Tensor:
        return strategy.reduce(tf2.distribute.ReduceOp.MEAN, strategy.run(replica, (batch,)), axis=None)

    yield lambda: step(read()).numpy()


@contextlib.contextmanager
def keras_fit(case: sides.Case) -> Iterator[sides.Step]:
    """The same model of Keras layers, compiled and fitted under MirroredStrategy; a call says how long so many steps take inside a fit."""
    strategy = _strategy(case.towers)
    with strategy.scope():
        model = getattr(_Keras, case.workload.keras)()
        model.compile(
            optimizer=tf2.keras.optimizers.SGD(workloads.RATE, workloads.MOMENTUM),
            loss=tf2.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=['accuracy'],
        )  # fmt: skip
    with tf2.device('/cpu:0'):
        data = pairs(case)
    clock = _Clock()

    def fit(steps: int = 1) -> float:
        model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[clock])
        return clock.secs

    yield fit


class _Clock(tf2.keras.callbacks.Callback):
    """How long the last pass of a fit took, without what begins and ends the fit."""

    began = secs = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.secs = time.perf_counter() - self.began


def pairs(case: sides.Case) -> tf2.data.Dataset:
    """Global batches without end as fit takes them, (features, label): always the same one, or those of the pipeline."""
    work = case.workload
    if case.source == 'constants':
        batches = tf2.data.Dataset.from_tensors(work.features(case.global_batch)).repeat()
    else:
        batches = sides.batches(case)
    [name] = set(batches.element_spec) - {'label'}
    return batches.map(lambda batch: (batch[name], batch['label'])).prefetch(tf2.data.AUTOTUNE)


def _strategy(towers: int) -> Any:
    [cpu] = tf2.config.list_physical_devices('CPU')
    tf2.config.set_logical_device_configuration(cpu, [tf2.config.LogicalDeviceConfiguration() for _ in range(towers)])
    return tf2.distribute.MirroredStrategy([f'/cpu:{index}' for index in range(towers)])


def _variables(work: workloads.Workload) -> dict[str, tf.Variable]:
    """The variables that the model asks for, by name, made for the strategy in whose scope this is called."""
    with tf.Graph().as_default(), tf.Session() as session:
        work.model(work.features(2), training=True)
        found = tf.global_variables()
        session.run(tf.global_variables_initializer())
        values = [(variable.op.name, variable.trainable, session.run(variable)) for variable in found]
    kinds: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    kinds[False] = {
        'synchronization': tf2.VariableSynchronization.ON_READ, 'aggregation': tf2.VariableAggregation.MEAN,
    }  # fmt: skip
    return {name: tf2.Variable(value, trainable=trainable, name=name, **kinds[trainable]) for name, trainable, value in values}


def _reader(case: sides.Case, strategy: Any) -> Callable[[], Any]:
    """The next batch for each replica: always the same, which is in place, or one of a distributed dataset."""
    if case.source == 'constants':
        fixed = strategy.experimental_distribute_values_from_function(lambda context: case.workload.features(case.workload.batch))
        return lambda: fixed
    iterator = iter(strategy.experimental_distribute_dataset(sides.batches(case).prefetch(tf2.data.AUTOTUNE)))
    return lambda: next(iterator)


class _Keras:
    """The workloads' models of Keras layers."""

    @staticmethod
    def perceptron() -> Any:
        layers = tf2.keras.layers
        return tf2.keras.Sequential([layers.Input((28, 28, 1)), layers.Flatten(), layers.Dense(100, 'relu'), layers.Dense(10)])

    @staticmethod
    def embedding() -> Any:
        layers = tf2.keras.layers
        return tf2.keras.Sequential(
            [layers.Input((20,), dtype='int64'), layers.Embedding(100_000, 64), layers.GlobalAveragePooling1D(), layers.Dense(10)]
        )

    @staticmethod
    def resnet50() -> Any:
        model = tf2.keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=1000, classifier_activation=None)
        for layer in model.layers:
            if hasattr(layer, 'kernel'):  # this model takes no regularizer
                layer.kernel.regularizer = tf2.keras.regularizers.L2(1e-4 / 2)
        return model

    @staticmethod
    def resnet20() -> Any:
        layers = tf2.keras.layers
        penalty = tf2.keras.regularizers.L2(1e-4 / 2)

        def convolution(x: Any, filters: int, stride: int = 1) -> Any:
            x = layers.Conv2D(filters, 3, stride, 'same', use_bias=False, kernel_regularizer=penalty)(x)
            return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

        inputs = layers.Input((32, 32, 3))
        x = layers.ReLU()(convolution(inputs, 16))
        for stage, block in ((stage, block) for stage in range(3) for block in range(3)):
            stride, filters = 2 if stage and not block else 1, 16 * 2**stage
            y = convolution(layers.ReLU()(convolution(x, filters, stride)), filters)
            if stride == 2:  # the paper's option A, as the zoo's
                x = layers.ZeroPadding2D(0)(x[:, ::2, ::2])
                x = layers.Concatenate()([x, layers.Lambda(lambda part: part * 0.0)(x)])
            x = layers.ReLU()(layers.Add()([x, y]))
        outputs = layers.Dense(10, kernel_regularizer=penalty)(layers.GlobalAveragePooling2D()(x))
        return tf2.keras.Model(inputs, outputs)
