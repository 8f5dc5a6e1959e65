"""The zoo's models: shapes, sizes, training and evaluation graphs, and the registry's errors."""

import dataclasses
import pickle

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import models
import towers

FAST = [name for name in models.MODELS if name not in ('resnet56', 'resnet50')]


def _output(model, *, shape, training, batch=2):
    """The model's output on a batch of known numbers."""
    image = np.random.default_rng(0).normal(size=(batch, *shape)).astype(np.float32)
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        return model({'image': tf.constant(image), 'label': tf.range(batch) % 10}, training=training)


def _sizes(variables):
    return sum(v.shape.num_elements() for v in variables)


def _lenet_size(shape, classes):
    height, width, channels = shape
    rows, columns = (height + 3) // 4, (width + 3) // 4
    return 25 * channels * 32 + 32 + 25 * 32 * 64 + 64 + rows * columns * 64 * 512 + 512 + 512 * classes + classes


@pytest.mark.parametrize(
    'name, shape, classes, expected',
    [
        ('mlp', (8, 8, 1), 10, 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
        ('lenet', (8, 8, 1), 10, _lenet_size((8, 8, 1), 10)),
        ('lenet', (28, 28, 1), 10, 1_663_370),  # the TensorFlow tutorial's size for 28 x 28
        ('lenet', (9, 11, 3), 7, _lenet_size((9, 11, 3), 7)),
        ('resnet20', (32, 32, 3), 10, 269_722),  # the paper's table 6: 0.27M
        ('resnet20', (8, 8, 3), 100, 269_722 + 90 * 65),
        ('resnet56', (32, 32, 3), 10, 853_018),  # 0.85M
        ('resnet50', (64, 64, 3), 1000, 25_557_032),  # torchvision's resnet50
    ],
)
def test_number_of_trainable_weights(name, shape, classes, expected):
    with tf.Graph().as_default():
        output = _output(models.build(name, classes=classes), shape=shape, training=True)
        assert _sizes(tf.trainable_variables()) == expected
        assert output.predictions['probability'].shape.as_list() == [2, classes]
        assert output.loss.shape.rank == 0 and output.loss.dtype == tf.float32


@pytest.mark.parametrize('name, norms', [('mlp', 0), ('lenet', 0), ('resnet20', 19), ('resnet56', 55), ('resnet50', 53)])
def test_training_and_evaluation_share_their_variables_and_only_training_writes_state(name, norms):
    graphs = {}
    for training in (True, False):
        with tf.Graph().as_default():
            _output(models.build(name), shape=(8, 8, 1), training=training)
            written = [op.inputs[0].name for op in tf.get_collection(tf.GraphKeys.UPDATE_OPS)]
            assert len(written) == len(set(written)) == (2 * norms if training else 0)
            assert not tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
            graphs[training] = [(v.op.name, v.shape.as_list(), v.trainable) for v in tf.global_variables()]
    assert graphs[True] == graphs[False]
    assert sum(not trainable for _, _, trainable in graphs[True]) == 2 * norms


@pytest.mark.parametrize('name, shape', [('mlp', (8, 8, 1)), ('lenet', (9, 13, 3)), ('resnet20', (9, 11, 3))])
def test_the_loss_falls(name, shape):
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        output = _output(models.build(name), shape=shape, training=True, batch=10)
        step = tf.train.MomentumOptimizer(0.02, 0.9).minimize(output.loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(output.loss)
            for _ in range(15):
                session.run(step)
            after = session.run(output.loss)
    assert 1 < before < 5 and after < 0.6 * before


@pytest.mark.parametrize(
    ('name', 'args'),
    [
        ('lenet', {'conv1': 3, 'conv2': 4, 'dense': 8}),
        ('resnet20', {'blocks': 1, 'width': 3}),
        ('resnet50', {'blocks': [1, 1], 'width': 2}),
    ],
)
def test_channels_first_is_the_same_model_with_the_same_variables(name, args):
    """On the CPU it needs the kernels of oneDNN, which are on by default where the processor has them."""
    found = []
    images = np.random.default_rng(1).normal(size=[4, 32, 36, 3]).astype(np.float32)
    for channels_first in (False, True):
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            batch = {'image': tf.constant(images), 'label': tf.constant([0, 1, 2, 3])}
            loss = models.build(name, channels_first=channels_first, **args)(batch, training=True).loss
            with tf.variable_scope('', reuse=True), tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
                state = [variable.read_value() for variable in tf.global_variables() if not variable.trainable]
            slopes = tf.gradients(loss, tf.trainable_variables())
            shapes = {variable.op.name: variable.shape.as_list() for variable in tf.global_variables()}
            kinds = {
                operation.get_attr('data_format') for operation in tf.get_default_graph().get_operations() if operation.type == 'Conv2D'
            }
            assert kinds == {b'NCHW' if channels_first else b'NHWC'}
            with tf.Session() as session:
                rng = np.random.default_rng(2)
                session.run(tf.global_variables_initializer())
                for variable in tf.trainable_variables():
                    variable.load(rng.normal(size=variable.shape.as_list()).astype(np.float32) * 0.3, session)
                found.append((shapes, session.run(loss), session.run(slopes), session.run(state)))
    (shapes, *last), (expected_shapes, *first) = found
    assert shapes == expected_shapes
    for value, expected in zip(tf.nest.flatten(first), tf.nest.flatten(last), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)


def test_batch_norm_takes_the_moving_values_in_evaluation():
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        trained, evaluated = (_output(models.build('resnet20'), shape=(12, 12, 1), training=t, batch=16) for t in (True, False))
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            gaps = []
            for _ in range(2):
                first, second = session.run([trained.predictions['probability'], evaluated.predictions['probability']])
                gaps.append(abs(first - second).max())
                for _ in range(60):
                    session.run(updates)
    assert gaps[0] > 0.05 and gaps[1] < 0.1 * gaps[0]  # not 0: the moving variance divides by n - 1


@pytest.mark.parametrize('name', FAST)
def test_without_labels_a_model_predicts(name):
    with tf.Graph().as_default():
        output = models.build(name)({'image': tf.zeros([3, 8, 8, 1])}, training=False)
    assert isinstance(output, towers.ModelOutput) and output.loss is None
    assert output.predictions['class'].shape.as_list() == [3]


@pytest.mark.parametrize('name', models.MODELS)
def test_sizes_are_frozen_and_a_built_model_travels_to_another_process(name):
    _, hparams = models.MODELS[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        hparams().classes = 3
    model = pickle.loads(pickle.dumps(models.build(name, classes=7)))
    assert model.keywords == {'hparams': hparams(classes=7)}


def test_arguments_reach_the_model():
    assert models.build('mlp', hidden=[5, 3]).keywords['hparams'].hidden == (5, 3)
    assert models.build('resnet56', norm_momentum=0).keywords['hparams'] == models.MODELS['resnet56'][1](norm_momentum=0)
    assert models.build('mlp', hidden=()).keywords['hparams'].hidden == ()


@pytest.mark.parametrize(
    'name, args, message',
    [
        ('lenett', {}, r"^Unknown model 'lenett'; did you mean lenet\? The zoo has mlp, lenet, resnet20, resnet56, resnet50\.$"),
        ('resnet10', {}, 'did you mean resnet'),
        ('xyz', {}, r"^Unknown model 'xyz'\. The zoo has"),
        ('lenet', {'clases': 3}, r"Model 'lenet' has no argument 'clases'; did you mean classes\? It takes conv1=32, conv2=64, dense=512"),
        ('lenet', {'dense': 1.5}, r"Model 'lenet' wants dense as a whole number of at least 1, got 1\.5; its default is 512\."),
        ('lenet', {'dense': True}, 'dense as a whole number of at least 1, got True'),
        ('lenet', {'conv1': 0}, 'conv1 as a whole number of at least 1, got 0'),
        ('lenet', {'conv1': 'many'}, "got 'many'"),
        ('mlp', {'hidden': 64}, r'hidden as a list of whole numbers of at least 1, got 64; its default is \(256, 128\)'),
        ('mlp', {'hidden': (64, -1)}, r'got \(64, -1\)'),
        ('resnet20', {'norm_momentum': 'high'}, "norm_momentum as a number, got 'high'"),
        ('resnet20', {'augment': 1}, 'augment as true or false, got 1; its default is False'),
        ('resnet20', {'norm_momentum': 1.0}, r'norm_momentum must be in \[0, 1\), got 1\.0'),
    ],
)
def test_wrong_names_and_arguments_say_what_is_right(name, args, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, **args)
