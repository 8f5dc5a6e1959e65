"""Augmentation of images: what it may do to one, and law 14: each example's draw is its own, whatever N and after a resume."""

import functools

import harness
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import models
import towers
from models import augment
from towers.checkpoint import manifest

IMAGES = np.random.default_rng(1).normal(size=(6, 5, 4, 2)).astype(np.float32)
PAD = 2


def changed(change, *, steps=1, n=1):
    """What `change` makes of IMAGES in each of so many steps: [step, 6, 5, 4, 2]."""

    def model(batch, *, training):
        tf.add_to_collection('changed', change(batch))
        return towers.ModelOutput(tf.reduce_mean(batch) * tf.get_variable('w', []))

    with harness.started(model, harness.rows(IMAGES), harness.config(n=n, global_batch_size=6)) as run:
        parts = tf.get_collection('changed')
        return np.stack([np.concatenate(run.session.run([parts, run.program.step.ops])[0]) for _ in range(steps)])


@functools.cache
def on_one_tower(name):
    return changed(CHANGES[name], steps=8)


CHANGES = {'flip': augment.flip, 'pad_and_crop': lambda images: augment.pad_and_crop(images, PAD)}


def test_a_flip_mirrors_about_half_of_the_images():
    found = on_one_tower('flip')
    mirrored = (found == IMAGES[:, :, ::-1]).all((2, 3, 4))
    np.testing.assert_array_equal(mirrored, ~(found == IMAGES).all((2, 3, 4)))
    assert 12 < mirrored.sum() < 36 and len(np.unique(mirrored, axis=0)) > 4


def test_a_crop_is_a_part_of_the_padded_image_anywhere():
    padded = np.pad(IMAGES, [(0, 0), (PAD, PAD), (PAD, PAD), (0, 0)])
    parts = {(y, x): padded[:, y : y + 5, x : x + 4] for y in range(2 * PAD + 1) for x in range(2 * PAD + 1)}
    places = []
    for step in on_one_tower('pad_and_crop'):
        for number, image in enumerate(step):
            [place] = [place for place, part in parts.items() if np.array_equal(image, part[number])]
            places.append(place)
    for axis in (0, 1):
        assert {place[axis] for place in places} == set(range(2 * PAD + 1))
    assert len(set(places)) > 15


@pytest.mark.parametrize('n', [2, 4])
@pytest.mark.parametrize('name', CHANGES)
def test_each_example_is_changed_alike_on_any_number_of_towers(name, n):
    np.testing.assert_array_equal(changed(CHANGES[name], steps=3, n=n), on_one_tower(name)[:3])


def test_a_resumed_training_changes_images_as_the_whole_one_does(tmp_path):
    def dataset():
        labels = np.arange(6, dtype=np.int64) % 3
        return tf.data.Dataset.from_tensor_slices({'image': np.tile(IMAGES, (1, 2, 2, 1)), 'label': labels}).shuffle(6)

    def train(folder, steps):
        model = models.build('resnet20', blocks=1, width=4, classes=3, augment=True)
        settings = harness.config(model_dir=str(tmp_path / folder), global_batch_size=4, learning_rate=0.1, train_steps=steps)
        towers.train(model, dataset, settings)
        reader = tf.train.load_checkpoint(manifest.prefix_of(str(tmp_path / folder), steps))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != 'input_position'}

    whole = train('whole', 5)
    train('parts', 2)
    resumed = train('parts', 5)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.parametrize(('training', 'augment'), [(True, True), (True, False), (False, True)])
def test_only_training_changes_images_and_only_if_asked_to(training, augment):
    model = models.build('resnet20', blocks=1, width=4, augment=augment)

    def one(batch, **_):
        return model({'image': tf.tile(batch, [1, 2, 2, 1]), 'label': tf.zeros([6], tf.int64)}, training=training)

    with harness.started(one, harness.rows(IMAGES), harness.config(global_batch_size=6)) as run:
        kinds = {operation.type for operation in run.program.graph.get_operations()}
    assert ('StatelessRandomUniformV2' in kinds) == (training and augment)
